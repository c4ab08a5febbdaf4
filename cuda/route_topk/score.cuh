// From a logit to its score, and from a score to what the choice compares. NaN counts as -inf, +inf
// as the largest float.
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

// 1 / x to within one ulp for x in [2^-126, 2^126).
__device__ __forceinline__ float approximate_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  const float y = approximate_reciprocal(x);
  return __fmaf_rn(y, __fmaf_rn(-x, y, 1.0f), y);
}

// e^-x for x >= 0; zero of NaN.
__device__ __forceinline__ float exponential_of_minus(float x) {
  constexpr float kBeyondExponent = 200.0f;  // where the result is zero
  return expf(-fminf(x, kBeyondExponent));
}

// A row's scores, the same bits wherever one is computed: roundings are spelled out, so that no
// product and sum become one instruction in one place only.
struct Scorer {
  Scoring scoring;
  float largest;      // logit of the row, for softmax
  float inverse_sum;  // of the exponentials, for softmax

  __device__ __forceinline__ float exponential(float logit) const {
    return fminf(exponential_of_minus(__fsub_rn(largest, logit)), 1.0f);  // also of +inf
  }
  __device__ __forceinline__ float softmax(float exponential) const {
    return __fmul_rn(exponential, inverse_sum);
  }
  static __device__ __forceinline__ float sigmoid(float logit) {
    const float e = exponential_of_minus(fabsf(logit));
    const float inverse = approximate_reciprocal(__fadd_rn(1.0f, e));
    return __fmul_rn(logit >= 0.0f ? 1.0f : e, inverse);  // of NaN the latter, zero
  }
  __device__ __forceinline__ float score(float logit) const {
    return scoring == Scoring::kSoftmax ? softmax(exponential(logit)) : sigmoid(logit);
  }
};

// A biased score stays finite, so that an expert outside the chosen groups is always below one
// inside. NaN counts as the smallest float. The score is in [0, 1].
__device__ __forceinline__ uint32_t selection_key(float score, float bias) {
  return to_ordered(__fadd_rn(score, fminf(fmaxf(bias, -FLT_MAX), FLT_MAX)));
}

}  // namespace jax_hpc::route_topk
