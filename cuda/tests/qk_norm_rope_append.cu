// The attention prologue without JAX: every option against float64, what it must not touch, and how
// long it takes on cold buffers beside the floor.
//
//   qk_norm_rope_append check        all kinds of problems, cut in several ways
//   qk_norm_rope_append check small  a few of them, for compute-sanitizer's slower tools; `races`,
//                                    for racecheck, are the same
//   qk_norm_rope_append time [T..]   heads 64/8 and 8/1, bf16 and fp8
//   qk_norm_rope_append tune [T..]   the same, over ways to cut
//
// Built by `make kernel-tests`.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "qk_norm_rope_append/heuristics.h"
#include "qk_norm_rope_append/launch.h"
#include "tests/prologue_problem.cuh"
#include "tests/support.cuh"

namespace {

using namespace jax_hpc::qk_norm_rope_append;
using namespace jax_hpc::tests;

struct Results {
  Bytes q, k_pages, v_pages;
  std::vector<float> q_scale, k_scale_pages;

  bool operator==(const Results& other) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    return q == other.q && k_pages == other.k_pages && v_pages == other.v_pages &&
           same(q_scale, other.q_scale) && same(k_scale_pages, other.k_scale_pages);
  }
};

constexpr int kGuard = 64;  // elements behind every result

Results run(const Problem& p, const Inputs& in, const std::vector<Config>& configs,
            std::string* fault) {
  DeviceArray<__nv_bfloat16> qkv(in.qkv), q_bf16(in.q_norm_bf16), k_bf16(in.k_norm_bf16);
  DeviceArray<float> q_norm(in.q_norm), k_norm(in.k_norm), table(in.cos_sin);
  DeviceArray<float> k_scale(in.k_scale), v_scale(in.v_scale);
  DeviceArray<int> positions(in.positions), slots(in.slots);
  const int64_t q_rows = int64_t{p.tokens} * p.q_heads;
  DeviceArray<uint8_t> q(q_rows * p.head_dim * size_of(p.fp8_q) + kGuard);
  DeviceArray<uint8_t> k_pages(page_rows(p) * p.head_dim * size_of(p.fp8_k) + kGuard);
  DeviceArray<uint8_t> v_pages(page_rows(p) * p.head_dim * size_of(p.fp8_v) + kGuard);
  DeviceArray<float> q_scale(q_rows + kGuard), k_scale_pages(page_rows(p) + kGuard);
  const auto weight = [](Weight kind, const auto& bf16, const auto& full) -> const void* {
    if (kind == Weight::kNone) return nullptr;
    return kind == Weight::kBf16 ? static_cast<const void*>(bf16.data()) : full.data();
  };
  const Arrays arrays{qkv.data(),
                      weight(p.q_weight, q_bf16, q_norm),
                      weight(p.k_weight, k_bf16, k_norm),
                      table.data(),
                      positions.data(),
                      slots.data(),
                      p.k_scale == Scale::kNone ? nullptr : k_scale.data(),
                      p.v_scale == Scale::kNone ? nullptr : v_scale.data(),
                      q.data(),
                      p.fp8_q ? q_scale.data() : nullptr,
                      k_pages.data(),
                      v_pages.data(),
                      p.k_scale_per_token ? k_scale_pages.data() : nullptr};
  Results first;
  for (size_t i = 0; i < configs.size(); ++i) {
    q.poison(), k_pages.poison(), v_pages.poison(), q_scale.poison(), k_scale_pages.poison();
    require(launch(p, configs[i], arrays, nullptr), "launch");
    require(cudaDeviceSynchronize(), "kernel");
    Results got{q.host(), k_pages.host(), v_pages.host(), q_scale.host(), k_scale_pages.host()};
    if (i == 0) {
      first = std::move(got);
    } else if (!(got == first)) {
      *fault = "cut " + std::to_string(i) + " differs";
    }
  }
  return first;
}

// Whether every byte, or float, from `first` on is as poison() left it.
bool is_untouched(const Bytes& bytes, size_t first, size_t count) {
  return std::all_of(bytes.begin() + first, bytes.begin() + first + count,
                     [](uint8_t byte) { return byte == 0xff; });
}

// What is wrong with a problem's results; empty if nothing is.
std::string fault_of(const Problem& p, uint32_t seed) {
  const Inputs in = make_inputs(p, seed);
  const Config chosen = choose(p);
  std::string fault;
  const Results got =
      run(p, in, {chosen, chosen, {1, 1}, {3, 2}, {kMostWarps, most_turns(p)}}, &fault);
  if (!fault.empty()) return fault;
  const auto place = [&](int token, int head) {
    return std::to_string(token) + "/" + std::to_string(head);
  };

  std::vector<bool> is_written(page_rows(p));
  for (int token = 0; token < p.tokens; ++token) {
    for (int head = 0; head < p.heads(); ++head) {
      const std::vector<double> want = head_of(p, in, token, head);
      const int kv_head = (head - p.q_heads + p.kv_heads) % p.kv_heads;
      const bool is_q = head < p.q_heads;
      const bool is_k = !is_q && head < p.q_heads + p.kv_heads;
      const int slot = in.slots[token];
      if (!is_q && !is_kept(p, slot)) continue;
      const bool is_fp8 = is_q ? p.fp8_q : is_k ? p.fp8_k : p.fp8_v;
      const size_t row = is_q ? size_t(token) * p.q_heads + head
                              : (size_t(slot / p.page_size) * p.kv_heads + kv_head) * p.page_size +
                                    slot % p.page_size;
      if (is_k) is_written[row] = true;
      double scale = 1;
      if (is_fp8 && (is_q || (is_k && p.k_scale_per_token))) {
        scale = scale_of_row(want);
        const float written = is_q ? got.q_scale[row] : got.k_scale_pages[row];
        if (!(std::abs(written - scale) <= 1e-5 * scale)) return "scale " + place(token, head);
      } else if (is_fp8) {
        scale = is_k ? in.k_scale[kv_head] : in.v_scale[kv_head];
      }
      const Bytes& bytes = is_q ? got.q : is_k ? got.k_pages : got.v_pages;
      if (!is_stored(bytes.data() + row * p.head_dim * size_of(is_fp8), is_fp8, want, scale)) {
        return "head " + place(token, head);
      }
    }
  }
  const size_t k_row = size_t(p.head_dim) * size_of(p.fp8_k);
  const size_t v_row = size_t(p.head_dim) * size_of(p.fp8_v);
  for (size_t row = 0; row < is_written.size(); ++row) {
    if (is_written[row]) continue;
    if (!is_untouched(got.k_pages, row * k_row, k_row) ||
        !is_untouched(got.v_pages, row * v_row, v_row) || !std::isnan(got.k_scale_pages[row])) {
      return "row " + std::to_string(row) + " of the pages was touched";
    }
  }
  for (const Bytes* bytes : {&got.q, &got.k_pages, &got.v_pages}) {
    if (!is_untouched(*bytes, bytes->size() - kGuard, kGuard)) return "written beyond the end";
  }
  return "";
}

// Options by the bits of a number, so that neighbours differ in most of them.
Problem problem_of(int head_dim, int rotary, int q_heads, int kv_heads, uint32_t bits) {
  const auto take = [&](uint32_t count) {
    const uint32_t value = bits % count;
    bits = mix(bits + 1);
    return static_cast<int>(value);
  };
  Problem p{};
  p.head_dim = head_dim, p.rotary = rotary, p.q_heads = q_heads, p.kv_heads = kv_heads;
  p.options = {take(2) == 0 ? 1e-6f : 0.1f, static_cast<Norm>(take(3)),
               static_cast<Style>(take(2))};
  p.q_weight = p.options.norm == Norm::kNone ? Weight::kNone : static_cast<Weight>(take(3));
  p.k_weight = p.options.norm == Norm::kNone ? Weight::kNone : static_cast<Weight>(take(3));
  p.fp8_q = take(2) == 0;
  p.fp8_k = take(2) == 0;
  p.fp8_v = take(4) == 0 ? !p.fp8_k : p.fp8_k;
  p.k_scale_per_token = p.fp8_k && take(2) == 0;
  p.k_scale = p.fp8_k && !p.k_scale_per_token ? static_cast<Scale>(take(3)) : Scale::kNone;
  p.v_scale = p.fp8_v ? static_cast<Scale>(take(3)) : Scale::kNone;
  constexpr int kPageSizes[] = {16, 64, 24, 128, 1};
  p.page_size = kPageSizes[take(5)];
  p.positions = 50;
  return p;
}

int check(bool small) {
  const std::vector<std::pair<int, int>> heads = {{8, 1}, {64, 8}, {5, 3}, {1, 1}, {12, 2}};
  int failures = 0;
  int runs = 0;
  int number = 0;
  for (const int head_dim : {64, 128, 256}) {
    for (const int rotary : {head_dim, head_dim / 2, 16, 20, head_dim - 2, 0}) {
      for (const auto& [q_heads, kv_heads] : heads) {
        for (const int tokens : {1, 9, 150}) {
          const auto seed = static_cast<uint32_t>(number++);
          if (small && (seed % 7 != 0 || tokens == 150)) continue;
          ++runs;
          Problem p = problem_of(head_dim, rotary, q_heads, kv_heads, mix(seed));
          p.tokens = tokens;
          // 7 * i modulo the slots are distinct while there are more slots than tokens and 7 is
          // no divisor of their number.
          p.pages = 2 + tokens / p.page_size;
          while (p.pages * p.page_size % 7 == 0) ++p.pages;
          const std::string fault = fault_of(p, seed);
          if (fault.empty()) continue;
          ++failures;
          std::cout << p << ": " << fault << "\n";
        }
      }
    }
  }
  std::cout << runs - failures << " passed, " << failures << " failed\n";
  return failures == 0 ? 0 : 1;
}

// Times of one problem on enough buffers that each call finds its own cold; of the table there is
// one, as in a model.
class Timing {
 public:
  explicit Timing(const Problem& p)
      : problem_(p),
        calls_(static_cast<int>(std::max<int64_t>(8, 220'000'000 / bytes(p)))),
        qkv_(calls_ * qkv_size()),
        q_(calls_ * q_size()),
        pages_(2 * calls_ * page_size()),
        scales_(calls_ * (int64_t{p.tokens} * p.q_heads + page_rows(p))),
        weight_(std::vector<float>(p.head_dim, 1.0f)),
        table_(std::vector<float>(size_t(p.positions) * p.rotary, 0.5f)),
        positions_(counted(p.tokens)),
        slots_(counted(p.tokens)) {
    fill_normal<<<256, 256>>>(qkv_.data(), qkv_.size(), 1, false);
  }

  // Read once, and written once.
  static int64_t bytes(const Problem& p) {
    const int64_t written = int64_t{p.q_heads} * size_of(p.fp8_q) +
                            int64_t{p.kv_heads} * (size_of(p.fp8_k) + size_of(p.fp8_v));
    return int64_t{p.tokens} * p.head_dim * (2 * p.heads() + written);
  }
  double microseconds(const Config& config) {
    return time_in_graph(calls_, [&](int i, cudaStream_t stream) {
      float* scales =
          scales_.data() + i * (int64_t{problem_.tokens} * problem_.q_heads + page_rows(problem_));
      const Arrays arrays{qkv_.data() + i * qkv_size(),
                          weight_.data(),
                          weight_.data(),
                          table_.data(),
                          positions_.data(),
                          slots_.data(),
                          nullptr,
                          nullptr,
                          q_.data() + i * q_size(),
                          scales,
                          pages_.data() + 2 * i * page_size(),
                          pages_.data() + (2 * i + 1) * page_size(),
                          scales + int64_t{problem_.tokens} * problem_.q_heads};
      return launch(problem_, config, arrays, stream);
    });
  }

 private:
  static std::vector<int> counted(int count) {
    std::vector<int> values(count);
    for (int i = 0; i < count; ++i) values[i] = i;
    return values;
  }
  int64_t qkv_size() const {
    return int64_t{problem_.tokens} * problem_.heads() * problem_.head_dim;
  }
  int64_t q_size() const {
    return int64_t{problem_.tokens} * problem_.q_heads * problem_.head_dim *
           size_of(problem_.fp8_q);
  }
  int64_t page_size() const {
    return page_rows(problem_) * problem_.head_dim * size_of(problem_.fp8_k);
  }

  Problem problem_;
  int calls_;
  DeviceArray<__nv_bfloat16> qkv_;
  DeviceArray<uint8_t> q_, pages_;
  DeviceArray<float> scales_, weight_, table_;
  DeviceArray<int> positions_, slots_;
};

void print_times(int q_heads, int kv_heads, bool is_fp8, int tokens, bool all) {
  constexpr int kPageSize = 64;
  Problem p{};
  p.tokens = tokens, p.q_heads = q_heads, p.kv_heads = kv_heads;
  p.head_dim = p.rotary = 128;
  p.positions = tokens, p.page_size = kPageSize;
  p.pages = jax_hpc::ceil_div(tokens, kPageSize);
  p.options = {1e-6f, Norm::kBeforeRope, Style::kHalf};
  p.q_weight = p.k_weight = Weight::kFloat;
  p.fp8_q = p.fp8_k = p.fp8_v = p.k_scale_per_token = is_fp8;
  Timing timing(p);
  const double practical = 4 + 1e-6 * static_cast<double>(Timing::bytes(p)) / 4.5;
  const Config chosen = choose(p);
  std::cout << p << ": practical floor " << practical << ", " << timing.microseconds(chosen)
            << " us  " << chosen << std::endl;
  for (const int warps : {1, 2, 4}) {
    for (const int turns : {1, 2, 3, 5, 8, 10, 12, 20, 45, 60, 90}) {
      if (!all || turns > most_turns(p)) continue;
      const Config config{warps, turns};
      std::cout << "  " << timing.microseconds(config) << " us  " << config << std::endl;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  if (command == "check") return check(argc > 2);
  if (command != "time" && command != "tune") {
    std::cerr << "usage: qk_norm_rope_append check [small | races] | time [T ...] | tune [T ...]\n";
    return 2;
  }
  std::vector<int> tokens;
  for (int i = 2; i < argc; ++i) tokens.push_back(std::atoi(argv[i]));
  if (tokens.empty()) tokens = {1, 64, 1024, 8192};
  for (const int count : tokens) {
    for (const bool is_fp8 : {false, true}) {
      print_times(8, 1, is_fp8, count, command == "tune");
      print_times(64, 8, is_fp8, count, command == "tune");
    }
  }
  return 0;
}
