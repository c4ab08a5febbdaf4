// Whether a stage's results are what they must be, each by what the tensor cores' sums and the
// roundings of that stage can lose. What follows a stage is judged by what the kernel itself passed
// on: a value that falls to the other side of a rounding shows in all that comes of it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "tests/moe_problem.cuh"

namespace jax_hpc::tests {

// Names the value that misses what it should be by more than its error; empty if none does.
inline std::string compare(const char* what, const Doubles& got, const Sums& want, int width) {
  for (size_t i = 0; i < want.value.size(); ++i) {
    if (std::isnan(want.value[i]) && std::isnan(got[i])) continue;
    if (std::abs(got[i] - want.value[i]) <= want.error[i]) continue;
    std::ostringstream text;
    text << what << " at " << i / width << ", " << i % width << ": got " << got[i] << ", expected "
         << want.value[i] << " within " << want.error[i];
    return text.str();
  }
  return "";
}

inline double cosine(const Doubles& a, const Doubles& b) {
  double dot = 0;
  double norms[2] = {0, 0};
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    dot += a[i] * b[i];
    norms[0] += a[i] * a[i];
    norms[1] += b[i] * b[i];
  }
  return norms[0] + norms[1] > 0 ? dot / std::sqrt(norms[0] * norms[1]) : 1;
}

inline Doubles widened(const std::vector<__nv_bfloat16>& values, size_t size) {
  Doubles wide(size);
  for (size_t i = 0; i < size; ++i) wide[i] = from_bf16(values[i]);
  return wide;
}

// Outputs of experts as a kernel left them.
inline Doubles widened_outputs(const std::vector<__nv_bfloat16>& values, Format format,
                               size_t size) {
  if (format != Format::kBf16) return widened(values, size);
  Floats floats(size);
  std::memcpy(floats.data(), values.data(), size * sizeof(float));
  return {floats.begin(), floats.end()};
}

// The intermediate as a kernel left it.
struct Act {
  const Bytes& values;
  const Floats& scales;  // kBlock only

  double scale(const Setup& setup, const Inputs& in, const Truth& truth, size_t place) const {
    const Problem& p = setup.p;
    const size_t row = place / p.inter;
    if (p.format == Format::kBf16) return 1;
    if (p.format == Format::kTensor) return in.act_scale[truth.row_expert[row]];
    return scales[row * blocks_of(p.inter, kBlock) + place % p.inter / kBlock];
  }
};

// What rounding to e4m3 moves a value of some magnitude by at most.
inline double half_step(double magnitude, double scale) {
  constexpr int kLeast = -6;  // exponent of the smallest normal value
  int exponent = 0;
  std::frexp(magnitude / scale, &exponent);
  return std::ldexp(scale, std::max(exponent - 1, kLeast) - 4);
}

// The dynamic scales: those of the largest magnitudes, within what these may be off.
inline std::string act_scale_fault(const Setup& setup, const Truth& truth, const Act& act) {
  const Problem& p = setup.p;
  if (p.format != Format::kBlock) return "";
  constexpr double kMost = 448;
  size_t place = 0;
  for (size_t row = 0; row < truth.row_expert.size(); ++row) {
    for (int group = 0; group < blocks_of(p.inter, kBlock); ++group) {
      const int columns = std::min(kBlock, p.inter - group * kBlock);
      double largest = 0;
      double error = 1e-6;
      for (int i = 0; i < columns; ++i, ++place) {
        const double value = std::abs(truth.activation.value[place]);
        largest = std::isnan(value) || std::isnan(largest) ? NAN : std::max(largest, value);
        error = std::max(error, truth.activation.error[place]);
      }
      const double got = kMost * act.scales[row * blocks_of(p.inter, kBlock) + group];
      if (std::isnan(got) && std::isnan(largest)) continue;
      if (largest <= error ? got >= 0 : std::abs(got - largest) <= error) continue;
      std::ostringstream text;
      text << "scale of act at " << row << ", " << group << ": got " << got << " / 448, expected "
           << largest << " / 448 within " << error / kMost;
      return text.str();
    }
  }
  return "";
}

// Values of the intermediate that were looked at, and those that were rounded to the other side
// than the truth's.
struct Rounded {
  size_t all = 0;
  size_t otherwise = 0;
};

// `act` is what the kernel's values stand for.
inline std::string act_fault(const Setup& setup, const Inputs& in, const Truth& truth,
                             const Act& quantized, const Doubles& act, Rounded* rounded) {
  constexpr double kMost = 448;
  const std::string fault = act_scale_fault(setup, truth, quantized);
  if (!fault.empty()) return fault;
  Sums want = truth.activation;
  if (setup.p.format == Format::kBf16) {
    for (size_t i = 0; i < act.size(); ++i) {
      want.error[i] += (kHalfBf16 + 1e-6) * (std::abs(want.value[i]) + want.error[i]);
    }
    return compare("act", act, want, setup.p.inter);
  }
  for (size_t i = 0; i < act.size(); ++i) {
    const double scale = quantized.scale(setup, in, truth, i);
    double& value = want.value[i];
    // A scale that comes of a NaN makes the whole group NaN.
    if (std::isnan(scale)) value = NAN;
    if (std::isnan(value)) continue;
    value = std::clamp(value, -kMost * scale, kMost * scale);
    want.error[i] += half_step(std::abs(value) + want.error[i], scale) + 1e-6 * std::abs(value);
    if (std::abs(act[i] - truth.act[i]) > 0.03 * std::abs(truth.act[i])) ++rounded->otherwise;
  }
  rounded->all += act.size();
  return compare("act", act, want, setup.p.inter);
}

inline Doubles act_of(const Setup& setup, const Inputs& in, const Truth& truth,
                      const Act& quantized) {
  Doubles act(truth.act.size());
  const bool is_bf16 = setup.p.format == Format::kBf16;
  for (size_t i = 0; i < act.size(); ++i) {
    const float value =
        is_bf16 ? bf16_at(quantized.values.data(), i) : from_fp8(quantized.values[i]);
    act[i] = double{value} * quantized.scale(setup, in, truth, i);
  }
  return act;
}

}  // namespace jax_hpc::tests
