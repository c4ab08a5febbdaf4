// The choice of experts without JAX: every kernel and option against float64, and how long it takes
// alone and after the router product.
//
//   route_topk check            all kinds of routers
//   route_topk check small      a few of them, for compute-sanitizer's slower tools
//   route_topk check races      the same without equal keys, for racecheck
//   route_topk time H E K [T..] one router by time, with the overlap of the two kernels and without
//
// Built by `make kernel-tests`.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "route_topk/heuristics.h"
#include "route_topk/launch.h"
#include "router_gemm/heuristics.h"
#include "router_gemm/launch.h"
#include "tests/support.cuh"

namespace {

using jax_hpc::route_topk::Arrays;
using jax_hpc::route_topk::Config;
using jax_hpc::route_topk::Kernel;
using jax_hpc::route_topk::Options;
using jax_hpc::route_topk::Problem;
using jax_hpc::route_topk::Scoring;
using jax_hpc::tests::DeviceArray;
using jax_hpc::tests::fill_normal;
using jax_hpc::tests::mix;
using jax_hpc::tests::normal;
using jax_hpc::tests::require;
using jax_hpc::tests::time_in_graph;

// Scores of one token in float64, and what the choice compares; -inf outside the best groups.
struct Truth {
  bool alive = false;
  bool clear = true;  // float32 can tell the groups apart
  double slack = 0;   // how far float32 scores may be off
  std::vector<double> scores;
  std::vector<double> keys;
};

void keep_best_groups(const Problem& p, Truth* truth) {
  const int groups = p.options.num_groups;
  const int size = p.experts / groups;
  std::vector<double> strengths(groups);
  for (int group = 0; group < groups; ++group) {
    std::vector<double> members(truth->keys.begin() + group * size,
                                truth->keys.begin() + (group + 1) * size);
    std::partial_sort(members.begin(), members.begin() + 2, members.end(), std::greater<>());
    strengths[group] = members[0] + members[1];
  }
  std::vector<int> order(groups);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return strengths[a] > strengths[b]; });
  const int chosen = p.options.topk_groups;
  truth->clear = strengths[order[chosen - 1]] - strengths[order[chosen]] > 4 * truth->slack;
  for (int i = chosen; i < groups; ++i) {
    std::fill_n(truth->keys.begin() + order[i] * size, size, -INFINITY);
  }
}

Truth truth_of(const Problem& p, const float* logits, const float* bias) {
  Truth truth;
  double largest = -INFINITY;
  for (int i = 0; i < p.experts; ++i) {
    const float clean = std::isnan(logits[i]) ? -INFINITY : std::min(logits[i], FLT_MAX);
    truth.scores.push_back(clean);
    largest = std::max<double>(largest, clean);
  }
  truth.alive = largest > -INFINITY;
  if (!truth.alive) return truth;
  double sum = 0;
  for (double& score : truth.scores) {
    const bool is_softmax = p.options.scoring == Scoring::kSoftmax;
    score = is_softmax ? std::exp(score - largest) : 1 / (1 + std::exp(-score));
    sum += score;
  }
  double most = 0;
  for (int i = 0; i < p.experts; ++i) {
    if (p.options.scoring == Scoring::kSoftmax) truth.scores[i] /= sum;
    truth.keys.push_back(truth.scores[i] + (bias == nullptr ? 0 : bias[i]));
    most = std::max(most, truth.scores[i] + std::abs(truth.keys[i]));
  }
  truth.slack = most * (40 + p.experts / 128.0) * std::ldexp(1, -24);
  if (p.options.topk_groups < p.options.num_groups) keep_best_groups(p, &truth);
  return truth;
}

// What is wrong with one token's result; empty if nothing is.
std::string fault_of(const Problem& p, const Truth& truth, const int32_t* ids, const float* weights,
                     float identity_weight) {
  const Options& o = p.options;
  const int first_zero = p.experts - o.num_zero_experts;
  std::vector<int> want(p.experts);
  std::iota(want.begin(), want.end(), 0);
  if (truth.alive) {
    std::stable_sort(want.begin(), want.end(),
                     [&](int a, int b) { return truth.keys[a] > truth.keys[b]; });
  }
  if (truth.alive && !truth.clear) return "";
  double sum = 0;
  double identity = 0;
  for (int i = 0; i < o.k && truth.alive; ++i) sum += truth.scores[want[i]];
  const double factor = !truth.alive ? 0 : o.scale / (o.renormalize ? sum + 1e-20 : 1);
  const double slack = (40 + p.experts / 128.0) * std::ldexp(1, -23);
  const auto is_close = [&](int a, int b) {
    return std::abs(truth.keys[a] - truth.keys[b]) <= 2 * truth.slack;
  };
  std::vector<bool> seen(p.experts);
  for (int i = 0; i < o.k; ++i) {
    const bool is_zero = ids[i] == -1;
    if (is_zero ? o.num_zero_experts == 0 : ids[i] < 0 || ids[i] >= first_zero) return "range";
    if (is_zero != (want[i] >= first_zero)) {
      if (!truth.alive) return "dead row";
      // Of keys that are as good as equal either may come first, and all weights follow from it.
      const bool is_open = (i > 0 && is_close(want[i], want[i - 1])) ||
                           (i + 1 < p.experts && is_close(want[i], want[i + 1]));
      return is_open ? "" : "choice " + std::to_string(i) + ": zero expert or not";
    }
    // A zero expert's id is not told.
    const int id = is_zero ? want[i] : ids[i];
    if (!is_zero && seen[id]) return "twice";
    seen[id] = true;
    if (!truth.alive && !is_zero && id != want[i]) return "dead row";
    const double score = truth.alive ? truth.scores[id] : 0;
    const bool is_tie = truth.alive && truth.keys[id] == truth.keys[want[i]];
    if (is_tie && !is_zero && id != want[i]) return "tie " + std::to_string(i);
    if (truth.alive && !is_zero && !is_close(id, want[i])) {
      return "choice " + std::to_string(i) + ": " + std::to_string(id) + " for " +
             std::to_string(want[i]);
    }
    if (is_zero) identity += score * factor;
    const double weight = is_zero ? 0 : score * factor;
    if (!(std::abs(weights[i] - weight) <= slack * std::abs(weight) + 1e-30)) {
      return "weight " + std::to_string(i);
    }
  }
  const bool fits = std::abs(identity_weight - identity) <= 2 * slack * std::abs(identity) + 1e-30;
  return fits ? "" : "identity weight";
}

// Normal logits, some rows with many ties, with NaN and infinities, or with nothing finite.
std::vector<float> make_logits(const Problem& p, uint32_t seed) {
  std::vector<float> logits(size_t(p.tokens) * p.experts);
  for (size_t i = 0; i < logits.size(); ++i) {
    const auto kind = mix(static_cast<uint32_t>(i / p.experts) + seed) % 8;
    const float value = 2 * normal(i, seed);
    logits[i] = kind == 0 ? std::round(value) : value;
    if (kind == 1) logits[i] = i % 2 == 0 ? NAN : -INFINITY;
    if (kind == 2 && i % 3 == 0) logits[i] = NAN;
    if (kind == 3 && static_cast<int>(i % p.experts) == p.experts / 2) logits[i] = INFINITY;
  }
  return logits;
}

// Logits and a bias that grow along the same random order of the experts: no two keys are equal.
// Where some are, lanes of topk_cta_kernel write one place, whose content is not used then.
std::vector<float> make_distinct_logits(const Problem& p, uint32_t seed, std::vector<float>* bias) {
  std::vector<int> order(p.experts);
  std::iota(order.begin(), order.end(), 0);
  const auto key = [&](int i) { return mix(static_cast<uint32_t>(i) + mix(seed)); };
  std::sort(order.begin(), order.end(), [&](int a, int b) { return key(a) < key(b); });
  std::vector<float> logits(size_t(p.tokens) * p.experts);
  for (int rank = 0; rank < p.experts; ++rank) {
    const float place = (static_cast<float>(rank) + 0.5f) / static_cast<float>(p.experts);
    (*bias)[order[rank]] = 0.1f * place;
    for (int token = 0; token < p.tokens; ++token) {
      const float spread = 4 + static_cast<float>(token % 4);
      logits[size_t(token) * p.experts + order[rank]] = spread * (place - 0.5f);
    }
  }
  return logits;
}

struct Results {
  std::vector<int32_t> ids;
  std::vector<float> weights;
  std::vector<float> identity_weight;

  bool operator==(const Results& other) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    return ids == other.ids && same(weights, other.weights) &&
           same(identity_weight, other.identity_weight);
  }
};

// The instances that are made for the number of experts: all give the same bits.
std::vector<Config> all_configs(const Problem& p) {
  std::vector<Config> configs;
  const Config chosen = jax_hpc::route_topk::choose(p);
  if (chosen.kernel == Kernel::kShared) return {chosen};
  for (const int many : {1, 1000}) {
    Config config = jax_hpc::route_topk::choose({many, p.experts, p.options});
    configs.push_back(config);
    if (config.kernel == Kernel::kCta) continue;
    config.warps = 2;
    configs.push_back(config);
  }
  return configs;
}

// What is wrong with a problem's results; empty if nothing is.
std::string fault_of(const Problem& p, bool has_bias, bool distinct, uint32_t seed) {
  constexpr int kGuard = 64;
  std::vector<float> bias(p.experts);
  for (int i = 0; i < p.experts; ++i) bias[i] = 0.05f * normal(i, seed + 1);
  const std::vector<float> logits =
      distinct ? make_distinct_logits(p, seed, &bias) : make_logits(p, seed);
  DeviceArray<float> device_logits(logits);
  DeviceArray<float> device_bias(bias);
  const size_t size = size_t(p.tokens) * p.options.k;
  DeviceArray<int32_t> ids(size + kGuard);
  DeviceArray<float> weights(size + kGuard);
  DeviceArray<float> identity_weight(p.tokens + kGuard);
  const Arrays arrays{device_logits.data(), has_bias ? device_bias.data() : nullptr, ids.data(),
                      weights.data(), identity_weight.data()};
  const auto run = [&](const Config& config, bool overlaps) {
    ids.poison();
    weights.poison();
    identity_weight.poison();
    require(jax_hpc::route_topk::launch(p, config, arrays, overlaps, nullptr), "launch");
    require(cudaDeviceSynchronize(), "kernel");
    return Results{ids.host(), weights.host(), identity_weight.host()};
  };
  const Results got = run(jax_hpc::route_topk::choose(p), false);
  for (const Config& config : all_configs(p)) {
    for (const bool overlaps : {false, true}) {
      if (run(config, overlaps) == got) continue;
      std::ostringstream name;
      name << config << (overlaps ? " with overlap" : "") << " differs";
      return name.str();
    }
  }
  for (int i = 0; i < kGuard; ++i) {
    const bool intact = got.ids[size + i] == -1 && std::isnan(got.weights[size + i]) &&
                        std::isnan(got.identity_weight[p.tokens + i]);
    if (!intact) return "written beyond the end";
  }
  for (int token = 0; token < p.tokens; ++token) {
    const Truth truth =
        truth_of(p, logits.data() + size_t(token) * p.experts, has_bias ? bias.data() : nullptr);
    const std::string fault =
        fault_of(p, truth, got.ids.data() + size_t(token) * p.options.k,
                 got.weights.data() + size_t(token) * p.options.k, got.identity_weight[token]);
    if (!fault.empty()) return "token " + std::to_string(token) + ": " + fault;
  }
  return "";
}

// Every kind of option for a number of experts.
std::vector<Options> all_options(int experts) {
  std::vector<Options> all;
  for (const Scoring scoring : {Scoring::kSoftmax, Scoring::kSigmoid}) {
    for (const int k : {1, 8, 12, 33}) {
      if (k > experts) continue;
      all.push_back({k, scoring, k % 8 == 0, 2.5f, 0, 1, 1});
      all.push_back({k, scoring, k % 8 != 0, 6.0f, experts / 3, 1, 1});
      if (experts % 8 == 0 && experts / 2 >= k) {
        all.push_back({k, scoring, true, 1.0f, 0, 8, 4});
        all.push_back({k, scoring, false, 1.0f, experts / 4, experts / 4, experts / 8});
      }
    }
  }
  return all;
}

int check(bool small, bool distinct) {
  const std::vector<int> few = {31, 192, 257, 768, 1500};
  const std::vector<int> all = {1,   31,  33,  128,  192,  200,  257,
                                384, 512, 768, 1000, 1023, 1500, 4096};
  int failures = 0;
  int runs = 0;
  for (const int experts : small ? few : all) {
    for (const Options& options : all_options(experts)) {
      for (const int tokens : {3, 300}) {
        if (tokens == 300 && (small || runs % 4 != 0 || experts > 1024)) continue;
        const Problem problem{tokens, experts, options};
        const bool has_bias = runs % 2 == 0;
        const std::string fault =
            fault_of(problem, has_bias, distinct, static_cast<uint32_t>(++runs));
        if (fault.empty()) continue;
        ++failures;
        std::cout << problem << (has_bias ? ", bias: " : ": ") << fault << "\n";
      }
    }
  }
  std::cout << runs - failures << " passed, " << failures << " failed\n";
  return failures == 0 ? 0 : 1;
}

__global__ void scale(__nv_bfloat16* x, size_t size, float factor) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < size;
       i += size_t{gridDim.x} * blockDim.x) {
    x[i] = __float2bfloat16(factor * __bfloat162float(x[i]));
  }
}

// Logits as a product leaves them, in L2; the product's operands cold.
void print_times(int hidden, int experts, int k, int tokens, int num_sms) {
  const Problem problem{tokens, experts, {k, Scoring::kSigmoid, true, 2.5f, 0, 1, 1}};
  const jax_hpc::router_gemm::Problem product{tokens, hidden, experts, 2};
  const auto product_config = jax_hpc::router_gemm::choose(product, num_sms);
  const size_t x_size = size_t(tokens) * hidden;
  const size_t w_size = size_t(experts) * hidden * product.terms;
  const size_t size = size_t(tokens) * experts;
  const int calls = static_cast<int>(std::max<size_t>(8, 220'000'000 / (2 * (x_size + w_size))));
  DeviceArray<__nv_bfloat16> x(x_size * calls);
  DeviceArray<__nv_bfloat16> parts(w_size * calls);
  DeviceArray<float> logits(size);
  DeviceArray<float> bias(std::vector<float>(experts, 0.0f));
  DeviceArray<int32_t> ids(size_t(tokens) * k);
  DeviceArray<float> weights(size_t(tokens) * k);
  DeviceArray<float> identity_weight(tokens);
  fill_normal<<<256, 256>>>(x.data(), x_size * calls, 1, false);
  fill_normal<<<256, 256>>>(parts.data(), w_size * calls, 2, false);
  // Logits of a router's size: the sigmoid of larger ones is 1, and ties take a path of their own.
  scale<<<256, 256>>>(x.data(), x_size * calls, 2 / std::sqrt(float(hidden * product.terms)));
  const Arrays arrays{logits.data(), bias.data(), ids.data(), weights.data(),
                      identity_weight.data()};
  const auto multiply = [&](int i, cudaStream_t stream) {
    return jax_hpc::router_gemm::launch(product, product_config, x.data() + i * x_size,
                                        parts.data() + i * w_size, logits.data(), stream);
  };
  const auto both = [&](bool overlaps) {
    return time_in_graph(calls, [&](int i, cudaStream_t stream) {
      const cudaError_t status = multiply(i, stream);
      if (status != cudaSuccess) return status;
      return jax_hpc::route_topk::launch(problem, jax_hpc::route_topk::choose(problem), arrays,
                                         overlaps, stream);
    });
  };
  std::cout << problem << " after H=" << hidden << "\n";
  std::cout << "  product " << time_in_graph(calls, multiply) << " us, and choice " << both(false)
            << ", with overlap " << both(true) << "\n";
  const auto is_chosen = [&](const Config& c) {
    const Config chosen = jax_hpc::route_topk::choose(problem);
    return c.kernel == chosen.kernel && c.lane_values == chosen.lane_values &&
           c.warps == chosen.warps;
  };
  for (const Config& config : all_configs(problem)) {
    const double microseconds = time_in_graph(64, [&](int, cudaStream_t stream) {
      return jax_hpc::route_topk::launch(problem, config, arrays, false, stream);
    });
    std::cout << "  choice alone " << microseconds << " us  " << config
              << (is_chosen(config) ? "  <- chosen" : "") << "\n";
  }
}

}  // namespace

int main(int argc, char** argv) {
  int num_sms = 0;
  require(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0), "device 0");
  const std::string command = argc > 1 ? argv[1] : "";
  if (command == "check") return check(argc > 2, argc > 2 && std::string(argv[2]) == "races");
  if (command != "time" || argc < 5) {
    std::cerr << "usage: route_topk check [small | races] | time H E K [T ...]\n";
    return 2;
  }
  std::vector<int> tokens;
  for (int i = 5; i < argc; ++i) tokens.push_back(std::atoi(argv[i]));
  if (tokens.empty()) tokens = {1, 8, 64, 256, 1024, 4096};
  for (const int count : tokens) {
    print_times(std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]), count, num_sms);
  }
  return 0;
}
