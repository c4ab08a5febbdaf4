#include "router_gemm/launch_terms.cuh"

namespace jax_hpc::router_gemm {

template cudaError_t launch_terms<2>(const Problem&, const Config&, const Arrays&, cudaStream_t);

}  // namespace jax_hpc::router_gemm
