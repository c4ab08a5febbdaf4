// The fp8 rule of jax_hpc/fp8.py: e4m3, nearest with ties to even, clamped to +-448, NaN stays NaN.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

namespace jax_hpc {

// Four values times `factor`, the reciprocal of their scale.
__device__ __forceinline__ uint32_t pack_fp8(float a, float b, float c, float d, float factor) {
  const float2 low = {a * factor, b * factor};
  const float2 high = {c * factor, d * factor};
  return __nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3) |
         uint32_t{__nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3)} << 16;
}

// The larger magnitude, or NaN where either is.
__device__ __forceinline__ float larger_magnitude(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(fabsf(a)), "f"(fabsf(b)));
  return result;
}

// The dynamic scale of values whose largest magnitude is `most` (fp8.amax_scale).
__device__ __forceinline__ float scale_of_largest(float most) {
  const float scale = most * (1.0f / 448.0f);
  return scale < 0x1p-126f ? 1.0f : scale;
}

}  // namespace jax_hpc
