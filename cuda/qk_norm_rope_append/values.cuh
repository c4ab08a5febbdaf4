// The sixteen values of a head that a lane holds: loads, stores and the fp8 rule.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace jax_hpc::qk_norm_rope_append {

constexpr int kChunk = 8;  // values that are read at once, 16 bytes in bf16
constexpr int kValues = 2 * kChunk;

// Where a lane's two chunks begin within a head.
struct Places {
  int first;
  int second;
};

// Two chunks as they lie in memory.
struct Packed {
  uint4 first;
  uint4 second;
};

// Read once, and not needed again.
__device__ __forceinline__ Packed read_once(const __nv_bfloat16* head, Places at) {
  return {__ldcs(reinterpret_cast<const uint4*>(head + at.first)),
          __ldcs(reinterpret_cast<const uint4*>(head + at.second))};
}

__device__ __forceinline__ Packed read(const __nv_bfloat16* head, Places at) {
  return {__ldg(reinterpret_cast<const uint4*>(head + at.first)),
          __ldg(reinterpret_cast<const uint4*>(head + at.second))};
}

__device__ __forceinline__ void unpack(uint32_t pair, float* values) {
  values[0] = __uint_as_float(pair << 16);
  values[1] = __uint_as_float(pair & 0xffff0000u);
}

__device__ __forceinline__ void unpack(const uint4& chunk, float* values) {
  unpack(chunk.x, values);
  unpack(chunk.y, values + 2);
  unpack(chunk.z, values + 4);
  unpack(chunk.w, values + 6);
}

__device__ __forceinline__ void unpack(const Packed& packed, float (&values)[kValues]) {
  unpack(packed.first, values);
  unpack(packed.second, values + kChunk);
}

// Eight floats, 16 bytes at a time.
__device__ __forceinline__ void read(const float* from, float* values) {
  const float4 low = __ldg(reinterpret_cast<const float4*>(from));
  const float4 high = __ldg(reinterpret_cast<const float4*>(from) + 1);
  values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
  values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
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

__device__ __forceinline__ void write(__nv_bfloat16* to, const float* v) {
  store(to, uint4{pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                  pack_bf16(v[6], v[7])});
}

// jax_hpc/fp8.py: nearest, ties to even, clamped to +-448; NaN stays NaN.
__device__ __forceinline__ uint32_t pack_fp8(const float* v, float factor) {
  const float2 low = {v[0] * factor, v[1] * factor};
  const float2 high = {v[2] * factor, v[3] * factor};
  return __nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3) |
         uint32_t{__nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3)} << 16;
}

__device__ __forceinline__ void write(__nv_fp8_e4m3* to, const float* v, float factor) {
  store(to, uint2{pack_fp8(v, factor), pack_fp8(v + 4, factor)});
}

// The scale of a row whose largest magnitude is `most`, as fp8.amax_scale.
__device__ __forceinline__ float scale_of(float most) {
  const float scale = most * (1.0f / 448.0f);
  return scale < 0x1p-126f ? 1.0f : scale;
}

// The larger magnitude, or NaN where either is.
__device__ __forceinline__ float larger(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(fabsf(a)), "f"(fabsf(b)));
  return result;
}

// Over the lanes of a head; every lane of the warp takes part.
template <int kLanes>
__device__ __forceinline__ float sum_of_head(float value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, step);
  }
  return value;
}
template <int kLanes>
__device__ __forceinline__ float largest_of_head(float value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    value = larger(value, __shfl_xor_sync(0xffffffffu, value, step));
  }
  return value;
}

}  // namespace jax_hpc::qk_norm_rope_append
