// Static scales of experts, read past an L1 that may hold those of an earlier call: some warps that
// read them have not waited for the kernel before.
#pragma once

#include "fused_moe/config.h"

namespace jax_hpc::fused_moe {

__device__ __forceinline__ float act_scale_of(const Weights& weights, int expert) {
  return __ldcg(weights.act_scale + expert * weights.act_scale_stride);
}

// What down's sums are multiplied by.
struct DownFactor {
  const Weights& weights;
  __device__ __forceinline__ float operator()(int expert) const {
    return act_scale_of(weights, expert) * __ldcg(weights.down_scale + expert);
  }
};

}  // namespace jax_hpc::fused_moe
