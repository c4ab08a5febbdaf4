// Prefill attention: persistent CTAs of two consumer warpgroups and one that serves them.
#pragma once

#include "prefill_attention/consumer.cuh"
#include "prefill_attention/producer.cuh"
#include "prefill_attention/query_copies.cuh"
#include "prefill_attention/value_checks.cuh"

namespace jax_hpc::prefill_attention {

constexpr int kServiceRegisters = 56;
constexpr int kConsumerRegisters = 224;

template <class Cache, int D>
__device__ __forceinline__ void serve(const Arguments& a, const CUtensorMap* q_map,
                                      const CUtensorMap* k_map, const CUtensorMap* v_map,
                                      const Shared<Cache, D>& shared) {
  const int warp = threadIdx.x % kWarpgroup / kWarpSize;
  if (warp == 0) {
    KeyValueWarp<Cache, D>(a, k_map, v_map, shared).run();
  } else if (warp == 1) {
    QueryWarp<Cache, D>(a, q_map, shared).run();
  } else {
    Checker<Cache, D>(a, shared, warp - 2).run();
  }
}

template <class Cache, int D>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_kernel(const __grid_constant__ Arguments a, const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map) {
  extern __shared__ uint8_t memory[];
  constexpr SharedAddress kMask = Shared<Cache, D>::kAlignment - 1;
  const Shared<Cache, D> shared{(shared_address(memory) + kMask) & ~kMask};
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  if (threadIdx.x == kConsumers * kWarpgroup) {
    prefetch_descriptor(&q_map);
    prefetch_descriptor(&k_map);
    prefetch_descriptor(&v_map);
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  // From a shuffle the compiler knows that it is the same for a warp.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x / kWarpgroup), 0);
  if (warpgroup == kConsumers) {
    leave_registers<kServiceRegisters>();
    serve(a, &q_map, &k_map, &v_map, shared);
  } else {
    take_registers<kConsumerRegisters>();
    Consumer<Cache, D>(a, shared, warpgroup).run();
  }
}

}  // namespace jax_hpc::prefill_attention
