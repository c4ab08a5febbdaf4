// The sixteen values of a head that a lane holds: loads, stores and the fp8 rule.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/fp8.cuh"
#include "common/ptx.cuh"

namespace jax_hpc::qk_norm_rope_append {

constexpr int kChunk = 8;  // values that are read at once, 16 bytes in bf16
constexpr int kValues = 2 * kChunk;

// Where a lane's two chunks begin within a head.
struct Places {
  int first;
  int second;
};

__device__ __forceinline__ void unpack(uint32_t pair, float* values) {
  values[0] = __uint_as_float(pair << 16);
  values[1] = __uint_as_float(pair & 0xffff0000u);
}

// Eight values of shared memory.
__device__ __forceinline__ void read_chunk(SharedAddress from, float* values) {
  const float4 v = load_shared(from);
  unpack(__float_as_uint(v.x), values);
  unpack(__float_as_uint(v.y), values + 2);
  unpack(__float_as_uint(v.z), values + 4);
  unpack(__float_as_uint(v.w), values + 6);
}

// A head's floats in shared memory lie in vectors of four, the even ones first. Lanes read eight
// floats each, an even vector and the odd one behind it: side by side, eight lanes would meet in
// half of the banks with either.
template <int kHeadDim>
__device__ constexpr SharedAddress split_vector(unsigned vector) {
  return sizeof(float4) * ((vector % 2) * (kHeadDim / 8) + vector / 2);
}

// Eight floats, of which `first` is the first, of a head that lies so.
template <int kHeadDim>
__device__ __forceinline__ void read_split(SharedAddress head, int first, float* values) {
  const SharedAddress even = head + 2 * first;
  const float4 low = load_shared(even);
  const float4 high = load_shared(even + split_vector<kHeadDim>(1));
  values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
  values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

__device__ __forceinline__ float load_shared_float(SharedAddress from) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
  return value;
}

__device__ __forceinline__ int load_shared_int(SharedAddress from) {
  int value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}

__device__ __forceinline__ void store_shared_float(SharedAddress to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

// 4 bytes from global to shared memory, as copy_16.
__device__ __forceinline__ void copy_4(SharedAddress to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// A pointer that was chosen among several is of no known memory to the compiler.
__device__ __forceinline__ void store(void* to, const uint4& v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void store(void* to, const uint2& v) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ void store(float* to, float v) {
  asm volatile("st.global.f32 [%0], %1;" ::"l"(to), "f"(v) : "memory");
}

// Eight values, times a factor.
__device__ __forceinline__ void write_bf16(void* to, const float* v, float factor) {
  uint32_t pairs[kChunk / 2];
#pragma unroll
  for (int i = 0; i < kChunk; i += 2) pairs[i / 2] = pack_bf16(v[i] * factor, v[i + 1] * factor);
  store(to, uint4{pairs[0], pairs[1], pairs[2], pairs[3]});
}

// Eight values, by the rule of jax_hpc/fp8.py.
__device__ __forceinline__ void write_fp8(void* to, const float* v, float factor) {
  store(to,
        uint2{pack_fp8(v[0], v[1], v[2], v[3], factor), pack_fp8(v[4], v[5], v[6], v[7], factor)});
}

// At most the largest finite float; NaN stays NaN.
__device__ __forceinline__ float finite(float value) {
  float result;
  asm("min.NaN.f32 %0, %1, 0f7F7FFFFF;" : "=f"(result) : "f"(value));
  return result;
}

// 1 / value of a normal number, within 1 unit of its last place.
__device__ __forceinline__ float quick_reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// The same value. What a shuffle gives stays in a register; else the compiler may work it out from
// the thread's index in every turn.
__device__ __forceinline__ SharedAddress kept(SharedAddress value) {
  return __shfl_xor_sync(0xffffffffu, value, 0);
}

__device__ __forceinline__ float sum_of_squares(const float (&x)[kValues]) {
  float sum = 0;
  float other = 0;  // two chains of additions take half the time of one
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    sum += x[i] * x[i];
    other += x[i + kChunk] * x[i + kChunk];
  }
  return sum + other;
}

__device__ __forceinline__ float largest(const float (&x)[kValues]) {
  // Magnitudes are in order as integers too, NaN above all: of those, the larger of three is one
  // instruction.
  int pairs[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    pairs[i] = __float_as_int(larger_magnitude(x[i], x[i + kChunk]));
  }
  const int most = __vimax3_s32(pairs[0], pairs[1], pairs[2]);
  const int other = __vimax3_s32(pairs[3], pairs[4], pairs[5]);
  return __int_as_float(max(__vimax3_s32(most, pairs[6], pairs[7]), other));
}

// Over the lanes of a head; every lane of the warp takes part. The steps of both go side by side.
template <int kLanes, bool kFindsLargest>
__device__ __forceinline__ void join_head(float& sum, float& most) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (kFindsLargest) most = larger_magnitude(most, __shfl_xor_sync(0xffffffffu, most, step));
  }
}

}  // namespace jax_hpc::qk_norm_rope_append
