// The rows of x in the order of the index, for the wide products: the copy engine takes rows that
// lie together, and gives them to both CTAs of a cluster.
#pragma once

#include "common/launch.h"
#include "common/ptx.cuh"
#include "fused_moe/launch.h"

namespace jax_hpc::fused_moe {

constexpr int kSortThreads = 256;

// Grid: tokens.
__global__ __launch_bounds__(kSortThreads) void sort_kernel(const __grid_constant__ Problem p,
                                                            const int* pair_row, TokenRows x,
                                                            uint4* sorted, float* sorted_scale) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t token = blockIdx.x;
  const int units = p.hidden / int{sizeof(uint4)};
  const int blocks = ceil_div(p.hidden, kBlock);
  const auto* from = static_cast<const uint4*>(x.values) + token * units;
  pair_row += token * p.top_k;
  for (int i = static_cast<int>(threadIdx.x); i < units; i += kSortThreads) {
    const uint4 values = __ldcg(from + i);
#pragma unroll 8
    for (int k = 0; k < p.top_k; ++k) {
      const int64_t row = __ldcg(pair_row + k);
      if (row >= 0) sorted[row * units + i] = values;
    }
  }
  if (p.format != Format::kBlock) return;
  for (int i = static_cast<int>(threadIdx.x); i < blocks; i += kSortThreads) {
    const float scale = __ldcg(x.scale + token * blocks + i);
    for (int k = 0; k < p.top_k; ++k) {
      const int64_t row = __ldcg(pair_row + k);
      if (row >= 0) sorted_scale[row * blocks + i] = scale;
    }
  }
}

}  // namespace jax_hpc::fused_moe
