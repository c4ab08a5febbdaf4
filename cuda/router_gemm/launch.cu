#include "router_gemm/launch.h"

#include "router_gemm/launch_terms.cuh"

namespace jax_hpc::router_gemm {

extern template cudaError_t launch_terms<1>(const Problem&, const Config&, const Arrays&,
                                            cudaStream_t);
extern template cudaError_t launch_terms<2>(const Problem&, const Config&, const Arrays&,
                                            cudaStream_t);
extern template cudaError_t launch_terms<3>(const Problem&, const Config&, const Arrays&,
                                            cudaStream_t);

cudaError_t launch(const Problem& problem, const Config& config, const void* x, const void* parts,
                   float* logits, cudaStream_t stream) {
  const Arrays arrays{static_cast<const __nv_bfloat16*>(x),
                      static_cast<const __nv_bfloat16*>(parts), logits};
  switch (problem.terms) {
    case 1:
      return launch_terms<1>(problem, config, arrays, stream);
    case 2:
      return launch_terms<2>(problem, config, arrays, stream);
    case 3:
      return launch_terms<3>(problem, config, arrays, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_hpc::router_gemm
