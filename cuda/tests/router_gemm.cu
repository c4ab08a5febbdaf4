// The router product without JAX: every configuration against float64, and how long each takes.
//
//   router_gemm check          small problems, all configurations
//   router_gemm check small    a few of them, for compute-sanitizer's slower tools
//   router_gemm check races    fewer yet, for racecheck: no tiled kernels in clusters
//   router_gemm time H E [T..] all configurations of a router by time, best first
//
// Built by `make kernel-tests`.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "router_gemm/heuristics.h"
#include "router_gemm/launch.h"
#include "tests/support.cuh"

namespace {

using jax_hpc::router_gemm::Config;
using jax_hpc::router_gemm::Kernel;
using jax_hpc::router_gemm::Problem;
using jax_hpc::tests::DeviceArray;
using jax_hpc::tests::fill_normal;
using jax_hpc::tests::normal;
using jax_hpc::tests::require;
using jax_hpc::tests::time_in_graph;

// One term is meant for weights that are bf16 already.
__global__ void fill_weights(__nv_bfloat16* parts, float* full, size_t size, int terms,
                             uint32_t seed, bool positive) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < size;
       i += size_t{gridDim.x} * blockDim.x) {
    float rest = normal(i, seed) * 0.05f;
    if (positive) rest = fabsf(rest);
    if (terms == 1) rest = __bfloat162float(__float2bfloat16(rest));
    full[i] = rest;
    for (int term = 0; term < terms; ++term) {
      parts[term * size + i] = __float2bfloat16(rest);
      rest = (rest - __bfloat162float(parts[term * size + i])) * 256.0f;
    }
  }
}

// One logit a thread: the float64 product, and the sum of magnitudes that the bounds refer to.
__global__ void reference(Problem p, const __nv_bfloat16* x, const float* w, double* logits,
                          double* magnitudes) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= p.tokens * p.experts) return;
  double sum = 0;
  double magnitude = 0;
  for (int k = 0; k < p.hidden; ++k) {
    const double product =
        static_cast<double>(__bfloat162float(x[int64_t{i / p.experts} * p.hidden + k])) *
        static_cast<double>(w[int64_t{i % p.experts} * p.hidden + k]);
    sum += product;
    magnitude += fabs(product);
  }
  logits[i] = sum;
  magnitudes[i] = magnitude;
}

// Every configuration that the launcher has an instance of.
std::vector<Config> all_configs(const Problem& p) {
  std::vector<Config> configs;
  for (const int cluster : {1, 2, 4, 8}) {
    if (p.hidden % 8 != 0) {
      configs.push_back({Kernel::kStream, 16, 16, cluster});
      continue;
    }
    configs.push_back({Kernel::kStream, 8, 16, cluster});
    for (const int experts : {16, 32, 64}) {
      configs.push_back({Kernel::kTiled, 64, experts, cluster});
    }
    for (const int experts : {64, 96, 128}) {
      if (experts < 128 || p.terms < 3) configs.push_back({Kernel::kTiled, 128, experts, cluster});
    }
  }
  return configs;
}

// Worst error over all logits, in units of the sum of magnitudes; infinity for a logit that was
// not written, a write beyond the end, or a second run with other bits.
double worst_error(const Problem& p, const Config& config, bool positive, uint32_t seed) {
  constexpr size_t kGuard = 64;
  const size_t x_size = size_t(p.tokens) * p.hidden;
  const size_t w_size = size_t(p.experts) * p.hidden;
  const size_t size = size_t(p.tokens) * p.experts;
  DeviceArray<__nv_bfloat16> x(x_size);
  DeviceArray<__nv_bfloat16> parts(w_size * p.terms);
  DeviceArray<float> full(w_size);
  DeviceArray<float> logits(size + kGuard);
  DeviceArray<double> truth(size);
  DeviceArray<double> magnitude(size);
  fill_normal<<<64, 256>>>(x.data(), x_size, seed, positive);
  fill_weights<<<64, 256>>>(parts.data(), full.data(), w_size, p.terms, seed + 1, positive);
  reference<<<static_cast<int>(size / 128 + 1), 128>>>(p, x.data(), full.data(), truth.data(),
                                                       magnitude.data());
  const auto run = [&] {
    logits.poison();
    require(jax_hpc::router_gemm::launch(p, config, x.data(), parts.data(), logits.data(), nullptr),
            "launch");
    require(cudaDeviceSynchronize(), "kernel");
    return logits.host();
  };
  const std::vector<float> got = run();
  const std::vector<float> again = run();
  if (std::memcmp(got.data(), again.data(), got.size() * sizeof(float)) != 0) return INFINITY;
  const std::vector<double> want = truth.host();
  const std::vector<double> scale = magnitude.host();
  double worst = 0;
  for (size_t i = 0; i < size; ++i) {
    const double error = std::abs(got[i] - want[i]) / scale[i];
    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
  }
  for (size_t i = size; i < got.size(); ++i) {
    if (!std::isnan(got[i])) return INFINITY;  // poison is NaN
  }
  return worst;
}

int check(bool small, bool races) {
  // None of the sizes fills a tile; one hidden size is not 16-byte aligned. 1736 hidden values are
  // 28 tiles of 64: more than the 12 stages of the longest ring in clusters of 1 and 2. 7000 refill
  // it in clusters of 8 too. Sums are emptied every 512.
  using Shapes = std::vector<std::array<int, 3>>;
  const Shapes few = {{13, 1736, 40}, {5, 123, 19}};
  const Shapes fewest = {{13, 1160, 24}, {5, 123, 19}};
  const Shapes all = {{1, 8, 1},      {13, 1736, 70}, {67, 1000, 33},
                      {130, 96, 257}, {5, 123, 19},   {70, 7000, 50}};
  const double bounds[] = {std::ldexp(1, -16), std::ldexp(1, -16), std::ldexp(1, -21)};
  int failures = 0;
  int runs = 0;
  for (int terms = 1; terms <= 3; ++terms) {
    for (const auto& [tokens, hidden, experts] : races ? fewest : small ? few : all) {
      const Problem problem{tokens, hidden, experts, terms};
      for (const Config& config : all_configs(problem)) {
        if (small && config.cluster == 4) continue;
        // Racecheck was not done with the first of these after 100 s; synccheck takes 13 for all.
        if (races && config.kernel == Kernel::kTiled && config.cluster > 1) continue;
        for (const bool positive : {false, true}) {
          if (small && positive) continue;
          const double error = worst_error(problem, config, positive, static_cast<uint32_t>(runs));
          ++runs;
          if (error <= bounds[terms - 1]) continue;
          ++failures;
          std::cout << problem << ", " << config << (positive ? ", all positive" : "")
                    << ": error 2^" << std::log2(error) << "\n";
        }
      }
    }
  }
  std::cout << runs - failures << " passed, " << failures << " failed\n";
  return failures == 0 ? 0 : 1;
}

// Microseconds of one call with cold operands, more than 200 MB of distinct arrays; negative where
// there is no such instance.
double time_of(const Problem& p, const Config& config) {
  const size_t x_size = size_t(p.tokens) * p.hidden;
  const size_t w_size = size_t(p.experts) * p.hidden * p.terms;
  const size_t size = size_t(p.tokens) * p.experts;
  const int calls = static_cast<int>(std::max<size_t>(8, 220'000'000 / (2 * (x_size + w_size))));
  DeviceArray<__nv_bfloat16> x(x_size * calls);
  DeviceArray<__nv_bfloat16> parts(w_size * calls);
  DeviceArray<float> logits(size * calls);
  fill_normal<<<256, 256>>>(x.data(), x_size * calls, 1, false);
  fill_normal<<<256, 256>>>(parts.data(), w_size * calls, 2, false);
  return time_in_graph(calls, [&](int i, cudaStream_t stream) {
    return jax_hpc::router_gemm::launch(p, config, x.data() + i * x_size, parts.data() + i * w_size,
                                        logits.data() + i * size, stream);
  });
}

void print_times(int hidden, int experts, int tokens, int terms, int num_sms) {
  const Problem problem{tokens, hidden, experts, terms};
  std::vector<std::pair<double, std::string>> rows;
  for (const Config& config : all_configs(problem)) {
    const double microseconds = time_of(problem, config);
    std::ostringstream name;
    name << config;
    if (microseconds > 0) rows.emplace_back(microseconds, name.str());
  }
  std::sort(rows.begin(), rows.end());
  std::ostringstream chosen;
  chosen << jax_hpc::router_gemm::choose(problem, num_sms);
  std::cout << problem << "\n";
  for (size_t i = 0; i < rows.size(); ++i) {
    const bool is_chosen = rows[i].second == chosen.str();
    std::cout << "  " << rows[i].first << " us  " << rows[i].second
              << (is_chosen ? "  <- chosen" : "") << "\n";
  }
}

}  // namespace

int main(int argc, char** argv) {
  int num_sms = 0;
  require(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0), "device 0");
  const std::string command = argc > 1 ? argv[1] : "";
  if (command == "check") return check(argc > 2, argc > 2 && std::string(argv[2]) == "races");
  if (command != "time" || argc < 4) {
    std::cerr << "usage: router_gemm check [small | races] | time H E [T ...]\n";
    return 2;
  }
  std::vector<int> tokens;
  for (int i = 4; i < argc; ++i) tokens.push_back(std::atoi(argv[i]));
  if (tokens.empty()) tokens = {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};
  for (const int count : tokens) {
    for (const int terms : {2, 3}) {
      print_times(std::atoi(argv[2]), std::atoi(argv[3]), count, terms, num_sms);
    }
  }
  return 0;
}
