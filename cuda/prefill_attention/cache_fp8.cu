#include "prefill_attention/launch_cache.cuh"

namespace jax_hpc::prefill_attention {

template cudaError_t launch_attention<Fp8Cache>(const Arguments&, int, bool, const Maps&,
                                                cudaStream_t);

}  // namespace jax_hpc::prefill_attention
