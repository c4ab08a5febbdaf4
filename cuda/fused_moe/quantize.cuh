// x in e4m3: by one scale, or by one of each token and 128 columns, with the bits of
// jax_hpc/fp8.py.
#pragma once

#include <cstdint>

#include "common/fp8.cuh"
#include "common/launch.h"
#include "fused_moe/launch.h"

namespace jax_hpc::fused_moe {

constexpr int kLaneValues = 16;  // 32 bytes of bf16, 16 of e4m3
constexpr int kGroupLanes = kBlock / kLaneValues;

__device__ __forceinline__ void unpack_bf16(uint32_t pair, float* values) {
  values[0] = __uint_as_float(pair << 16);
  values[1] = __uint_as_float(pair & 0xffff0000u);
}
__device__ __forceinline__ void unpack_bf16(const uint4& chunk, float* values) {
  unpack_bf16(chunk.x, values);
  unpack_bf16(chunk.y, values + 2);
  unpack_bf16(chunk.z, values + 4);
  unpack_bf16(chunk.w, values + 6);
}

// The largest magnitude among the eight lanes of a group of columns.
__device__ __forceinline__ float largest_of_group(const float (&values)[kLaneValues]) {
  float most = larger_magnitude(values[0], values[1]);
#pragma unroll
  for (int i = 2; i < kLaneValues; ++i) most = larger_magnitude(most, values[i]);
#pragma unroll
  for (int step = kGroupLanes / 2; step > 0; step /= 2) {
    most = larger_magnitude(most, __shfl_xor_sync(kWholeWarp, most, step));
  }
  return most;
}

// Where the values of a lane lie. Eight lanes take a group of columns, and groups of a row that end
// with it are no problem: hidden is a multiple of what a lane takes.
struct Chunk {
  bool has_group;
  bool has_values;
  int group;      // of all tokens' groups
  int64_t first;  // value of x
};

__device__ __forceinline__ Chunk chunk_of(const Problem& p, int cta) {
  const int groups = blocks_of(p.hidden, kBlock);
  const int group = cta * static_cast<int>(blockDim.x / kGroupLanes) +
                    static_cast<int>(threadIdx.x) / kGroupLanes;
  const int within = static_cast<int>(threadIdx.x) % kGroupLanes * kLaneValues;
  const bool has_group = group < p.tokens * groups;
  if (p.hidden % kBlock == 0) {
    return {has_group, has_group, group, int64_t{group} * kBlock + within};
  }
  const int token = group / groups;
  const int column = (group - token * groups) * kBlock + within;
  return {has_group, has_group && column < p.hidden, group, int64_t{token} * p.hidden + column};
}

// A lane's values in e4m3, and their scale. Eight lanes have a group's values, all of a warp call.
template <bool kPerGroup>
__device__ __forceinline__ uint4 quantized(const uint4& low, const uint4& high,
                                           const Weights& weights, float& scale) {
  float values[kLaneValues];
  unpack_bf16(low, values);
  unpack_bf16(high, values + 8);
  if constexpr (kPerGroup) {
    scale = scale_of_largest(largest_of_group(values));
  } else {
    scale = __ldcg(weights.input_scale);
  }
  const float factor = __frcp_rn(scale);
  uint32_t packed[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* v = values + 4 * i;
    packed[i] = pack_fp8(v[0], v[1], v[2], v[3], factor);
  }
  return {packed[0], packed[1], packed[2], packed[3]};
}

// x by CTA `cta` of as many as it takes.
template <bool kPerGroup>
__device__ __forceinline__ void quantize(const Problem& p, const Arrays& a, int cta) {
  const Chunk chunk = chunk_of(p, cta);
  uint4 low{};
  uint4 high{};
  if (chunk.has_values) {
    const auto* from =
        reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(a.x) + chunk.first);
    low = __ldg(from);
    high = __ldg(from + 1);
  }
  float scale;
  const uint4 packed = quantized<kPerGroup>(low, high, a.weights, scale);
  if (kPerGroup && chunk.has_group && threadIdx.x % kGroupLanes == 0) {
    a.workspace.x_scale[chunk.group] = scale;
  }
  if (!chunk.has_values) return;
  *reinterpret_cast<uint4*>(static_cast<uint8_t*>(a.workspace.x) + chunk.first) = packed;
}

}  // namespace jax_hpc::fused_moe
