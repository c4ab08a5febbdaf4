// The eight values of a row that a lane reads at once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/fp8.cuh"
#include "rms_norm/config.h"

namespace jax_hpc::rms_norm {

// Not by the read-only cache: a sum may be written where x or the residual was read.
__device__ __forceinline__ uint4 load_chunk(const void* from, bool exists) {
  return exists ? *static_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
}

__device__ __forceinline__ void unpack(const uint4& chunk, float (&values)[kChunk]) {
  const uint32_t pairs[] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    values[2 * i] = __uint_as_float(pairs[i] << 16);
    values[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint4 pack(const float (&v)[kChunk]) {
  return {pack_pair(v[0], v[1]), pack_pair(v[2], v[3]), pack_pair(v[4], v[5]),
          pack_pair(v[6], v[7])};
}

// Of values that are bf16 already.
__device__ __forceinline__ uint2 pack_chunk_fp8(const float (&v)[kChunk], float factor) {
  return {pack_fp8(v[0], v[1], v[2], v[3], factor), pack_fp8(v[4], v[5], v[6], v[7], factor)};
}

// A lane's part of the weight, as it is stored.
struct Bf16Weights {
  uint4 stored;

  __device__ __forceinline__ void load(const void* weight, int first, bool exists) {
    const auto* from =
        reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(weight) + first);
    stored = exists ? __ldg(from) : uint4{0, 0, 0, 0};
  }
  __device__ __forceinline__ void read(float (&values)[kChunk]) const { unpack(stored, values); }
};
struct FloatWeights {
  float4 low, high;

  __device__ __forceinline__ void load(const void* weight, int first, bool exists) {
    const auto* from = reinterpret_cast<const float4*>(static_cast<const float*>(weight) + first);
    low = exists ? __ldg(from) : float4{0, 0, 0, 0};
    high = exists ? __ldg(from + 1) : float4{0, 0, 0, 0};
  }
  __device__ __forceinline__ void read(float (&values)[kChunk]) const {
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
  }
};

// In one order, whatever the compiler would contract.
__device__ __forceinline__ float sum_of_squares(const float (&v)[kChunk]) {
  float pairs[kChunk / 2];
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    pairs[i] = __fmaf_rn(v[2 * i + 1], v[2 * i + 1], __fmul_rn(v[2 * i], v[2 * i]));
  }
  return __fadd_rn(__fadd_rn(pairs[0], pairs[1]), __fadd_rn(pairs[2], pairs[3]));
}

}  // namespace jax_hpc::rms_norm
