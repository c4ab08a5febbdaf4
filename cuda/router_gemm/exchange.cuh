// How the CTAs of a cluster add up their parts of the hidden axis: each owns some of the tile's
// sums and is sent everybody's, in shared memory, and adds them in the order of the senders.
#pragma once

#include "common/launch.h"
#include "common/ptx.cuh"
#include "router_gemm/config.h"

namespace jax_hpc::router_gemm {

__device__ __forceinline__ float4 add(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// The sum of what 1 << cluster_log2 senders have left, `sender_bytes` apart. All loads come before
// the first addition.
__device__ __forceinline__ float4 add_senders(SharedAddress from, int sender_bytes,
                                              int cluster_log2) {
  float4 parts[kPortableCluster];
#pragma unroll
  for (int i = 0; i < kPortableCluster; ++i) {
    if (i < 1 << cluster_log2) parts[i] = load_shared(from + i * sender_bytes);
  }
  float4 sum = parts[0];
#pragma unroll
  for (int i = 1; i < kPortableCluster; ++i) {
    if (i < 1 << cluster_log2) sum = add(sum, parts[i]);
  }
  return sum;
}

// The logits of a token and four experts from `expert` on, a multiple of 4.
__device__ __forceinline__ void write_logits(float* logits, const Problem& p, int token, int expert,
                                             float4 sum) {
  float* to = logits + static_cast<int64_t>(token) * p.experts + expert;
  if (p.experts % 4 == 0) {
    if (expert < p.experts) *reinterpret_cast<float4*>(to) = sum;
    return;
  }
  const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (expert + i < p.experts) to[i] = values[i];
  }
}

}  // namespace jax_hpc::router_gemm
