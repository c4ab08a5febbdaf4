// Picks the instance of the kernel for a kind of cache; one .cu per kind, so that they compile side
// by side.
#pragma once

#include "common/launch.h"
#include "decode_attention/kernel.cuh"

namespace jax_hpc::decode_attention {

template <class Cache>
cudaError_t launch_attention(const Arguments& arguments, const LaunchShape& shape,
                             const CUtensorMap& k_map, const CUtensorMap& v_map,
                             cudaStream_t stream);

// All of an SM's shared memory that can be, for this CTA and one of the merge.
template <class... Parameters>
cudaError_t launch_large(void (*kernel)(Parameters...), const LaunchShape& shape,
                         cudaStream_t stream, const Arguments& arguments, const CUtensorMap& k_map,
                         const CUtensorMap& v_map) {
  const cudaError_t status = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                  cudaFuncAttributePreferredSharedMemoryCarveout,
                                                  cudaSharedmemCarveoutMaxShared);
  if (status != cudaSuccess) return status;
  return jax_hpc::launch(kernel, shape, stream, arguments, k_map, v_map);
}

template <class Cache, int D>
cudaError_t launch_dim(const Arguments& arguments, const LaunchShape& shape,
                       const CUtensorMap& k_map, const CUtensorMap& v_map, cudaStream_t stream) {
  switch (arguments.column_tiles) {
    case 1:
      return launch_large(attention_kernel<Cache, D, 1>, shape, stream, arguments, k_map, v_map);
    case 2:
      return launch_large(attention_kernel<Cache, D, 2>, shape, stream, arguments, k_map, v_map);
  }
  return cudaErrorInvalidValue;
}

template <class Cache>
cudaError_t launch_attention(const Arguments& arguments, const LaunchShape& shape,
                             const CUtensorMap& k_map, const CUtensorMap& v_map,
                             cudaStream_t stream) {
  switch (arguments.problem.head_dim) {
    case 64:
      return launch_dim<Cache, 64>(arguments, shape, k_map, v_map, stream);
    case 128:
      return launch_dim<Cache, 128>(arguments, shape, k_map, v_map, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_hpc::decode_attention
