// Picks the instance of the kernel for a kind of cache; one .cu per kind, so that they compile side
// by side.
#pragma once

#include "common/launch.h"
#include "prefill_attention/kernel.cuh"
#include "prefill_attention/page_map.h"

namespace jax_hpc::prefill_attention {

template <class Cache, int D>
cudaError_t launch_dim(const Arguments& arguments, int ctas, bool overlaps, const Maps& maps,
                       cudaStream_t stream) {
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(ctas)),
                          .threads = kThreads,
                          .shared_bytes = Shared<Cache, D>::kBytes,
                          .overlaps_previous = overlaps};
  return jax_hpc::launch(prefill_kernel<Cache, D>, shape, stream, arguments, maps.q, maps.k,
                         maps.v);
}

template <class Cache>
cudaError_t launch_attention(const Arguments& arguments, int ctas, bool overlaps, const Maps& maps,
                             cudaStream_t stream) {
  switch (arguments.problem.head_dim) {
    case 64:
      return launch_dim<Cache, 64>(arguments, ctas, overlaps, maps, stream);
    case 128:
      return launch_dim<Cache, 128>(arguments, ctas, overlaps, maps, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_hpc::prefill_attention
