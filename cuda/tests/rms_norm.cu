// The root-mean-square norm without JAX: every option against float64, every cut for the same bits,
// and how long it takes beside the floor.
//
//   rms_norm check        all kinds of problems
//   rms_norm check small  a few of them, for compute-sanitizer's slower tools; `races`, for
//                         racecheck, are the same
//   rms_norm time [T..]   H 2048, 4096 and 6144, on cold buffers and on warm ones; all cuts
//                         with a residual and bf16
//
// Built by `make kernel-tests`.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "rms_norm/heuristics.h"
#include "rms_norm/launch.h"
#include "tests/support.cuh"

namespace {

using namespace jax_hpc::rms_norm;
using namespace jax_hpc::tests;

using Bytes = std::vector<uint8_t>;
using Values = std::vector<__nv_bfloat16>;

constexpr int kGuard = 64;  // bytes behind every result
constexpr int kCuts[] = {1, 2, 4};

size_t size_of(const Problem& p) { return size_t(p.tokens) * p.hidden; }
bool fits(const Problem& p, int groups) {
  return warps_of_row(p.hidden, groups) <= most_warps(groups);
}

struct Inputs {
  Values x, residual, bf16_weight;
  std::vector<float> float_weight;
  float out_scale = 0.01f;
};

// Normal values; some rows are large, tiny, zero, or have a NaN or an infinity.
Inputs make_inputs(const Problem& p, uint32_t seed) {
  Inputs in;
  for (size_t i = 0; i < size_of(p); ++i) {
    const int row = static_cast<int>(i / p.hidden);
    const int column = static_cast<int>(i % p.hidden);
    constexpr float kSpreads[] = {1.0f, 300.0f, 1e-4f, 0.0f, 1e18f, 1.0f, 1.0f};
    float value = kSpreads[row % 7] * normal(i, seed);
    if (row % 7 == 5 && column == p.hidden / 2) value = NAN;
    if (row % 7 == 6 && column == p.hidden - 1) value = INFINITY;
    in.x.push_back(__float2bfloat16(value));
    in.residual.push_back(__float2bfloat16(kSpreads[row % 7] * normal(i, seed + 1)));
  }
  for (int i = 0; i < p.hidden; ++i) {
    in.float_weight.push_back(1.0f + 0.3f * normal(i, seed + 2));
    in.bf16_weight.push_back(__float2bfloat16(in.float_weight.back()));
  }
  return in;
}

struct Results {
  Bytes y, sum;
};

// In place: the sum takes the residual's memory.
Results run(const Problem& p, const Inputs& in, const Config& config, bool in_place) {
  const size_t bytes = size_of(p) * sizeof(__nv_bfloat16);
  DeviceArray<__nv_bfloat16> x(in.x), bf16_weight(in.bf16_weight);
  DeviceArray<float> float_weight(in.float_weight), out_scale(std::vector<float>{in.out_scale});
  DeviceArray<uint8_t> y(bytes + kGuard), sum(bytes + kGuard), residual(bytes + kGuard);
  y.poison(), sum.poison(), residual.poison();
  require(cudaMemcpy(residual.data(), in.residual.data(), bytes, cudaMemcpyHostToDevice), "copy");
  const bool is_bf16 = p.weight == Weight::kBf16;
  uint8_t* written = in_place ? residual.data() : sum.data();
  const Arrays arrays{x.data(),
                      is_bf16 ? static_cast<const void*>(bf16_weight.data()) : float_weight.data(),
                      p.has_residual ? residual.data() : nullptr,
                      p.fp8_out ? out_scale.data() : nullptr,
                      y.data(),
                      p.has_residual ? written : nullptr};
  require(launch(p, config, arrays, nullptr), "launch");
  require(cudaDeviceSynchronize(), "kernel");
  return {y.host(), in_place && p.has_residual ? residual.host() : sum.host()};
}

double bf16_at(const Bytes& bytes, size_t i) {
  __nv_bfloat16 value;
  std::memcpy(&value, bytes.data() + i * sizeof(value), sizeof(value));
  return __bfloat162float(value);
}

double fp8_at(const Bytes& bytes, size_t i) {
  __nv_fp8_e4m3 value;
  value.__x = bytes[i];
  return static_cast<float>(value);
}

// What is wrong with a value; 0 is nothing. In bf16 a value is rounded once from float32; in fp8
// again, which may go to the other side of a step's middle.
bool is_right(const Problem& p, double got, double want, double scale) {
  if (std::isnan(want)) return std::isnan(got);
  constexpr double kRounding = 0x1p-8 + 0x1p-19;
  if (!p.fp8_out) return std::abs(got - want) <= kRounding * std::abs(want) + 1e-38;
  const double wanted = std::clamp(want / scale, -448.0, 448.0);
  const double step = std::max(0x1p-4 * std::abs(wanted), 0x1p-10);  // half of one, or more
  return std::abs(got - wanted) <= step + 1.01 * kRounding * std::abs(wanted);
}

// What is wrong with a row; empty if nothing is.
std::string fault_of_row(const Problem& p, const Inputs& in, const Results& got, int row) {
  std::vector<double> values(p.hidden);
  float squares = 0;  // to see where float32 overflows
  double sum = 0;
  for (int i = 0; i < p.hidden; ++i) {
    const size_t at = size_t(row) * p.hidden + i;
    float value = __bfloat162float(in.x[at]);
    if (p.has_residual) {
      value = __bfloat162float(__float2bfloat16(value + __bfloat162float(in.residual[at])));
      const double kept = bf16_at(got.sum, at);
      if (!(kept == value || (std::isnan(kept) && std::isnan(value)))) {
        return "sum " + std::to_string(i);
      }
    }
    values[i] = value;
    squares += value * value;
    sum += values[i] * values[i];
  }
  const double factor = std::isinf(squares) ? 0 : 1 / std::sqrt(sum / p.hidden + p.eps);
  for (int i = 0; i < p.hidden; ++i) {
    const size_t at = size_t(row) * p.hidden + i;
    const double weight =
        p.weight == Weight::kBf16 ? __bfloat162float(in.bf16_weight[i]) : in.float_weight[i];
    const double want = std::isnan(squares) ? NAN : values[i] * factor * weight;
    const double value = p.fp8_out ? fp8_at(got.y, at) : bf16_at(got.y, at);
    if (!is_right(p, value, want, in.out_scale)) {
      return "value " + std::to_string(i) + ": " + std::to_string(value) + " for " +
             std::to_string(p.fp8_out ? want / in.out_scale : want);
    }
  }
  return "";
}

// What is wrong with a problem's results; empty if nothing is.
std::string fault_of(const Problem& p, uint32_t seed) {
  const Inputs in = make_inputs(p, seed);
  const Results got = run(p, in, choose(), false);
  for (const int groups : kCuts) {
    if (!fits(p, groups)) continue;
    const Results other = run(p, in, {groups}, p.has_residual);
    if (other.y != got.y) return "cut " + std::to_string(groups) + " differs";
    if (p.has_residual && other.sum != got.sum) return "in place differs";
  }
  const size_t y_bytes = size_of(p) * (p.fp8_out ? 1 : 2);
  const size_t sum_bytes = p.has_residual ? 2 * size_of(p) : 0;
  const auto untouched = [](const Bytes& bytes, size_t from) {
    return std::all_of(bytes.begin() + from, bytes.end(), [](uint8_t b) { return b == 0xff; });
  };
  if (!untouched(got.y, y_bytes) || !untouched(got.sum, sum_bytes)) return "written beyond the end";
  for (int row = 0; row < p.tokens; ++row) {
    const std::string fault = fault_of_row(p, in, got, row);
    if (!fault.empty()) return "row " + std::to_string(row) + ", " + fault;
  }
  return "";
}

int check(bool small) {
  const std::vector<int> all = {8,    16,   248,  256,  264,  1024, 2048,  2056, 2880,
                                4096, 5120, 6144, 7168, 8192, 8200, 12288, 16384};
  int failures = 0;
  int runs = 0;
  for (const int hidden : small ? std::vector<int>{8, 264, 2048, 8200} : all) {
    for (const int tokens : {1, 9, 300}) {
      if (tokens == 300 && (small || hidden > 2056)) continue;
      for (int options = 0; options < 8; ++options) {
        const Problem p{tokens,
                        hidden,
                        runs % 3 == 0 ? 0.1f : 1e-6f,
                        options % 2 == 0 ? Weight::kBf16 : Weight::kFloat,
                        options / 2 % 2 != 0,
                        options / 4 != 0};
        const std::string fault = fault_of(p, static_cast<uint32_t>(++runs));
        if (fault.empty()) continue;
        ++failures;
        std::cout << p << ": " << fault << "\n";
      }
    }
  }
  std::cout << runs - failures << " passed, " << failures << " failed\n";
  return failures == 0 ? 0 : 1;
}

// x and the residual once, and both results.
int64_t bytes_of(const Problem& p) {
  const int64_t row = 2 * int64_t{p.hidden};
  return p.tokens * (row * (p.has_residual ? 3 : 1) + (p.fp8_out ? row / 2 : row)) + row;
}

// Microseconds in a graph of calls; cold: over so many buffers that each call finds its own so.
double microseconds(const Problem& p, const Config& config, bool cold) {
  static DeviceArray<__nv_bfloat16> pool(400'000'000);
  const int64_t size = size_of(p);
  const int64_t sets = cold ? 1 + 120'000'000 / bytes_of(p) : 1;
  const int calls = static_cast<int>(std::max<int64_t>(sets, 64));
  DeviceArray<float> out_scale(std::vector<float>{1.0f});
  return time_in_graph(calls, [&](int i, cudaStream_t stream) {
    __nv_bfloat16* at = pool.data() + i % sets * (3 * size + p.hidden);
    const Arrays arrays{at, at + 3 * size, at + size, out_scale.data(), at + 2 * size, at + size};
    return launch(p, config, arrays, stream);
  });
}

void print_times(int hidden, int tokens) {
  for (const int options : {0, 1, 2}) {
    const Problem p{tokens, hidden, 1e-6f, Weight::kBf16, options > 0, options == 2};
    std::cout << p << ": floor " << static_cast<double>(bytes_of(p)) / 4.3e6 << "\n";
    for (const int groups : kCuts) {
      const bool is_chosen = choose().groups == groups;
      if (!fits(p, groups) || (options != 1 && !is_chosen)) continue;
      const double cold = microseconds(p, {groups}, true);
      std::cout << "  cold " << cold << " us, warm " << microseconds(p, {groups}, false) << " us  "
                << Config{groups} << (is_chosen ? "  <- chosen" : "") << std::endl;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  if (command == "check") return check(argc > 2);
  if (command != "time") {
    std::cerr << "usage: rms_norm check [small | races] | time [T ...]\n";
    return 2;
  }
  std::vector<int> tokens;
  for (int i = 2; i < argc; ++i) tokens.push_back(std::atoi(argv[i]));
  if (tokens.empty()) tokens = {1, 8, 64, 256, 1024, 8192};
  for (const int hidden : {2048, 4096, 6144}) {
    for (const int count : tokens) print_times(hidden, count);
  }
  return 0;
}
