// A prologue on the host: random operands, float64 truth, and how far a stored value may be off.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "qk_norm_rope_append/config.h"
#include "tests/support.cuh"

namespace jax_hpc::tests {

using namespace jax_hpc::qk_norm_rope_append;
using Bytes = std::vector<uint8_t>;

inline int size_of(bool is_fp8) { return is_fp8 ? 1 : 2; }
inline bool is_kept(const Problem& p, int slot) {
  return slot >= 0 && slot < p.pages * p.page_size;
}
inline int64_t page_rows(const Problem& p) { return int64_t{p.pages} * p.kv_heads * p.page_size; }

// Host operands of a problem. The slots are distinct; some tokens have none.
struct Inputs {
  std::vector<__nv_bfloat16> qkv;
  std::vector<float> q_norm, k_norm, cos_sin, k_scale, v_scale;
  std::vector<__nv_bfloat16> q_norm_bf16, k_norm_bf16;
  std::vector<int> positions, slots;
};

inline std::vector<__nv_bfloat16> to_bf16(std::vector<float>* values) {
  std::vector<__nv_bfloat16> rounded;
  for (float& value : *values) {
    rounded.push_back(__float2bfloat16(value));
    value = __bfloat162float(rounded.back());
  }
  return rounded;
}

inline Inputs make_inputs(const Problem& p, uint32_t seed) {
  Inputs in;
  const size_t values = size_t(p.tokens) * p.heads() * p.head_dim;
  for (size_t i = 0; i < values; ++i) {
    // One head in thirteen is zero.
    const bool is_zero = i / p.head_dim % 13 == 5;
    in.qkv.push_back(__float2bfloat16(is_zero ? 0 : 2 * normal(i, seed)));
  }
  for (int i = 0; i < p.head_dim; ++i) {
    in.q_norm.push_back(p.q_weight == Weight::kNone ? 1 : 1 + normal(i, seed + 1));
    in.k_norm.push_back(p.k_weight == Weight::kNone ? 1 : 1 + normal(i, seed + 2));
  }
  if (p.q_weight == Weight::kBf16) in.q_norm_bf16 = to_bf16(&in.q_norm);
  if (p.k_weight == Weight::kBf16) in.k_norm_bf16 = to_bf16(&in.k_norm);
  for (int i = 0; i < p.positions * p.rotary; ++i) {
    const float angle = 3 * normal(i % (p.rotary / 2) + i / p.rotary * p.rotary, seed + 3);
    in.cos_sin.push_back(i % p.rotary < p.rotary / 2 ? std::cos(angle) : std::sin(angle));
  }
  in.cos_sin.resize(std::max<size_t>(in.cos_sin.size(), 1));
  for (int i = 0; i < p.kv_heads; ++i) {
    in.k_scale.push_back(p.k_scale == Scale::kNone ? 1 : 0.01f + 0.002f * (i + 1));
    in.v_scale.push_back(p.v_scale == Scale::kNone ? 1 : 0.02f + 0.003f * (i + 1));
    if (p.k_scale == Scale::kTensor) in.k_scale[i] = in.k_scale[0];
    if (p.v_scale == Scale::kTensor) in.v_scale[i] = in.v_scale[0];
  }
  const int num_slots = p.pages * p.page_size;
  const int wrong[] = {-1, num_slots, INT32_MIN, INT32_MAX};
  for (int i = 0; i < p.tokens; ++i) {
    in.positions.push_back(static_cast<int>(mix(i + seed) % (p.positions + 4)) - 2);
    in.slots.push_back(i % 5 == 3 ? wrong[i % 4] : (i * 7 + static_cast<int>(seed)) % num_slots);
  }
  return in;
}

// A head after norm and rotation, in float64.
inline std::vector<double> head_of(const Problem& p, const Inputs& in, int token, int head) {
  const int dim = p.head_dim;
  std::vector<double> x(dim);
  for (int i = 0; i < dim; ++i) {
    x[i] = __bfloat162float(in.qkv[(size_t(token) * p.heads() + head) * dim + i]);
  }
  if (head >= p.q_heads + p.kv_heads) return x;
  const std::vector<float>& weight = head < p.q_heads ? in.q_norm : in.k_norm;
  const auto normalize = [&] {
    double sum = 0;
    for (const double value : x) sum += value * value;
    for (int i = 0; i < dim; ++i) x[i] *= weight[i] / std::sqrt(sum / dim + double(p.options.eps));
  };
  if (p.options.norm == Norm::kBeforeRope) normalize();
  const int position = std::clamp(in.positions[token], 0, p.positions - 1);
  const float* row = in.cos_sin.data() + size_t(position) * p.rotary;
  const int half = p.rotary / 2;
  for (int i = 0; i < half; ++i) {
    const bool is_half = p.options.style == Style::kHalf;
    double& a = x[is_half ? i : 2 * i];
    double& b = x[is_half ? i + half : 2 * i + 1];
    const double turned = a * row[i] - b * row[half + i];
    b = b * row[i] + a * row[half + i];
    a = turned;
  }
  if (p.options.norm == Norm::kAfterRope) normalize();
  return x;
}

inline double decode(const uint8_t* data, bool is_fp8) {
  if (!is_fp8) {
    __nv_bfloat16 value;
    std::memcpy(&value, data, 2);
    return __bfloat162float(value);
  }
  const int exponent = *data >> 3 & 15;
  const int mantissa = *data & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const double size =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return *data & 0x80 ? -size : size;
}

// Whether a stored head is the given one over the scale, within one rounding of float32 arithmetic.
inline bool is_stored(const uint8_t* data, bool is_fp8, const std::vector<double>& want,
                      double scale) {
  double most = 0;
  for (const double value : want) most = std::max(most, std::abs(value / scale));
  for (size_t i = 0; i < want.size(); ++i) {
    double value = want[i] / scale;
    if (is_fp8) value = std::clamp(value, -448.0, 448.0);
    const double smallest = is_fp8 ? 0x1p-6 : 0x1p-126;
    const double exponent = std::floor(std::log2(std::max(std::abs(value), smallest)));
    const double spacing = std::exp2(exponent - (is_fp8 ? 3 : 7));
    const double slack = 0.51 * spacing + 4e-6 * std::abs(value) + 2e-6 * most;
    if (!(std::abs(decode(data + i * size_of(is_fp8), is_fp8) - value) <= slack)) return false;
  }
  return true;
}

inline double scale_of_row(const std::vector<double>& row) {
  double most = 0;
  for (const double value : row) most = std::max(most, std::abs(value));
  return most == 0 ? 1 : most / 448;
}

}  // namespace jax_hpc::tests
