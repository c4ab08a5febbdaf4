// From a logit to its score, and from a score to what the choice compares.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "route_topk/config.h"

namespace jax_hpc::route_topk {

// Numbers of the same order as the floats (no NaN): what integer reductions compare.
__device__ __forceinline__ uint32_t to_ordered(float value) {
  const int32_t bits = __float_as_int(value);
  return static_cast<uint32_t>(bits ^ ((bits >> 31) | INT32_MIN));
}
__device__ __forceinline__ float from_ordered(uint32_t key) {
  const int32_t bits = static_cast<int32_t>(key);
  return __int_as_float(bits ^ (~(bits >> 31) | INT32_MIN));
}

// No expert, and an expert outside the chosen groups, are below every expert that may be chosen.
constexpr uint32_t kNoExpert = 0;
constexpr uint32_t kOutsideGroups = 1;

// NaN counts as -inf, +inf as the largest float.
__device__ __forceinline__ float clean_logit(float logit) {
  return fminf(fmaxf(logit, -INFINITY), FLT_MAX);
}

// 1 / x to within one ulp for x in [1, 2^126), without the branches of a division.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return fmaf(y, fmaf(-x, y, 1.0f), y);
}

// A row's scores, the same bits wherever one is computed: roundings are spelled out, so that no
// product and sum become one instruction in one place only.
struct Scorer {
  Scoring scoring;
  float largest;      // logit of the row
  float inverse_sum;  // of the exponentials, for softmax

  __device__ __forceinline__ float exponential(float logit) const {
    return expf(__fsub_rn(logit, largest));
  }
  __device__ __forceinline__ float softmax(float exponential) const {
    return __fmul_rn(exponential, inverse_sum);
  }
  static __device__ __forceinline__ float sigmoid(float logit) {
    const float e = expf(-fabsf(logit));  // in [0, 1]: nothing overflows
    const float inverse = reciprocal(__fadd_rn(1.0f, e));
    return logit < 0.0f ? __fmul_rn(e, inverse) : inverse;
  }
  __device__ __forceinline__ float score(float logit) const {
    return scoring == Scoring::kSoftmax ? softmax(exponential(logit)) : sigmoid(logit);
  }
};

// A biased score stays finite, so that an expert outside the chosen groups is always below one
// inside. NaN counts as the smallest float.
__device__ __forceinline__ uint32_t selection_key(float score, float bias) {
  return to_ordered(fminf(fmaxf(__fadd_rn(score, bias), -FLT_MAX), FLT_MAX));
}

}  // namespace jax_hpc::route_topk
