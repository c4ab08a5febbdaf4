// Decode attention: persistent CTAs of consumer warps and one producer warp.
#pragma once

#include "decode_attention/consumer.cuh"
#include "decode_attention/producer.cuh"

namespace jax_hpc::decode_attention {

template <class Cache, int D, int N>
__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const __grid_constant__ Arguments a, const __grid_constant__ CUtensorMap k_map,
                     const __grid_constant__ CUtensorMap v_map) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared shared(
      memory, Layout::of(D, Cache::kBytes, a.problem.fp8_query ? 1 : 2, N, 8 * N * a.row_groups,
                         a.slots, a.problem.k_scale == ScaleKind::kToken));
  const Thread thread{__shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpSize, 0),
                      keep(static_cast<int>(threadIdx.x) % kWarpSize)};
  if (thread.warp < kWarps) {
    init_barriers(shared, thread.warp, a.team_warps);
    wait_for_previous_kernel();
    start_barrier(kThreads);
    Consumer<Cache, D, N>(a, shared, thread).run();
  } else {
    // The producer's first copy would wait for its descriptor.
    if (elect_one()) {
      prefetch_descriptor(&k_map);
      prefetch_descriptor(&v_map);
    }
    wait_for_previous_kernel();
    Producer<Cache, D>(a, &k_map, &v_map, shared, thread.lane).run();
  }
}

}  // namespace jax_hpc::decode_attention
