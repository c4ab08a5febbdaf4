#include "decode_attention/launch_cache.cuh"

namespace jax_hpc::decode_attention {

template cudaError_t launch_attention<Fp8Cache>(const Arguments&, const LaunchShape&,
                                                const CUtensorMap&, const CUtensorMap&,
                                                cudaStream_t);

}  // namespace jax_hpc::decode_attention
