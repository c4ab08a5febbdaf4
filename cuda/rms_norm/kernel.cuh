// The root-mean-square norm of a row by one CTA: the row is read once and stays in registers, and
// its sum (of x and the residual) is on its way out before the lanes meet to add up the squares.
//
// The squares of each group of 256 values are added up by lanes, and the groups by a binary tree of
// neighbours, whoever holds them: so that no cut changes the bits.
#pragma once

#include "rms_norm/launch.h"
#include "rms_norm/values.cuh"

namespace jax_hpc::rms_norm {

constexpr unsigned kWholeWarp = 0xffffffffu;

// Adds up the groups of a warp, then those of the CTA; every thread gets the sum.
template <int kGroups>
__device__ __forceinline__ float sum_of_row(float (&sums)[kGroups]) {
  constexpr int kAtOnce = 4;
  __shared__ alignas(16) float parts[kMostWarps];
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
#pragma unroll
    for (float& sum : sums) sum = __fadd_rn(sum, __shfl_xor_sync(kWholeWarp, sum, step));
  }
#pragma unroll
  for (int half = 1; half < kGroups; half *= 2) {
#pragma unroll
    for (int i = 0; i < kGroups; i += 2 * half) sums[i] = __fadd_rn(sums[i], sums[i + half]);
  }
  if (lane == 0) parts[threadIdx.x / kWarpSize] = sums[0];
  if (threadIdx.x < kMostWarps && lane >= warps) parts[lane] = 0;
  __syncthreads();
  const float4 some = *reinterpret_cast<const float4*>(parts + lane * kAtOnce % kMostWarps);
  float sum = __fadd_rn(__fadd_rn(some.x, some.y), __fadd_rn(some.z, some.w));
  // Over all places, not only those of warps that exist: every lane needs the sum.
#pragma unroll
  for (int step = 1; step * kAtOnce < kMostWarps; step *= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(kWholeWarp, sum, step));
  }
  return sum;
}

template <int kGroups, class Weights, bool kHasResidual>
__global__ __launch_bounds__(most_warps(kGroups) * kWarpSize) void rms_norm_kernel(
    const __grid_constant__ Problem p, const __grid_constant__ Arrays a, float inverse_hidden) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int first = warp * kGroups * kGroup + lane * kChunk;
  const int64_t place = int64_t{blockIdx.x} * p.hidden + first;  // of the lane's first value
  const auto* x = static_cast<const __nv_bfloat16*>(a.x) + place;
  const auto* residual = static_cast<const __nv_bfloat16*>(a.residual) + place;
  auto* sum = static_cast<__nv_bfloat16*>(a.sum) + place;

  // All is asked for before anything is used.
  uint4 chunks[kGroups];
  uint4 added[kGroups];
  Weights weights[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const bool exists = first + i * kGroup < p.hidden;
    chunks[i] = load_chunk(x + i * kGroup, exists);
    if (kHasResidual) added[i] = load_chunk(residual + i * kGroup, exists);
  }
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    weights[i].load(a.weight, first + i * kGroup, first + i * kGroup < p.hidden);
  }
  const float out_scale = p.fp8_out ? __ldg(a.out_scale) : 1.0f;

  float sums[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    float values[kChunk];
    unpack(chunks[i], values);
    if (kHasResidual) {
      float other[kChunk];
      unpack(added[i], other);
#pragma unroll
      for (int j = 0; j < kChunk; ++j) values[j] = __fadd_rn(values[j], other[j]);
      chunks[i] = pack(values);
      if (first + i * kGroup < p.hidden) *reinterpret_cast<uint4*>(sum + i * kGroup) = chunks[i];
      unpack(chunks[i], values);  // rounded, as the sum is kept
    }
    sums[i] = sum_of_squares(values);
  }
  const float factor = p.fp8_out ? __frcp_rn(out_scale) : 1.0f;
  const float scale = rsqrtf(__fmaf_rn(sum_of_row(sums), inverse_hidden, p.eps));

#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    if (first + i * kGroup >= p.hidden) break;
    float values[kChunk];
    float weight[kChunk];
    unpack(chunks[i], values);
    weights[i].read(weight);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      values[j] = __fmul_rn(__fmul_rn(values[j], scale), weight[j]);
    }
    const uint4 normalised = pack(values);
    if (p.fp8_out) {
      unpack(normalised, values);
      auto* y = static_cast<uint8_t*>(a.y) + place + i * kGroup;
      *reinterpret_cast<uint2*>(y) = pack_chunk_fp8(values, factor);
    } else {
      auto* y = static_cast<__nv_bfloat16*>(a.y) + place + i * kGroup;
      *reinterpret_cast<uint4*>(y) = normalised;
    }
  }
}

}  // namespace jax_hpc::rms_norm
