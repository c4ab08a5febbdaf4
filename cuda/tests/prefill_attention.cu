// Prefill attention without JAX: its kernels against float64, and how long they take.
//
//   prefill_attention check        all options on random batches
//   prefill_attention check small  a few tiny ones, for the sanitizer's slower tools; `races` too
//   prefill_attention time [case]  the recorded baselines' batches, each call of a graph on its own
//
// Built by `make kernel-tests`.
#include <cstdio>
#include <cstring>
#include <string>

#include "prefill_problem.cuh"

namespace {

using namespace jax_hpc::tests;
using jax_hpc::prefill_attention::Buffers;

struct Case {
  Problem p;
  std::vector<int> q_starts;
  std::vector<int> q_lens;
  std::vector<int> kv_lens;
  bool sinks;
  bool holes;  // page ids outside the pool within the length
  bool lse;
};

Problem make_problem(int batch, int group, int kv_heads, int head_dim, int page_size, bool fp8) {
  Problem p{};
  p.fp8_cache = fp8;
  p.batch = batch;
  p.group = group;
  p.kv_heads = kv_heads;
  p.head_dim = head_dim;
  p.page_size = page_size;
  p.scale = 1 / std::sqrt(static_cast<float>(head_dim));
  return p;
}

size_t plan_size(const Problem& p) {
  return static_cast<size_t>(jax_hpc::prefill_attention::plan_ints(p.tokens, p.batch, p.group));
}

double value_of(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Why a case fails; empty when it does not. `worst` is the largest error over its bound.
std::string failure_of(Case c, uint32_t seed, double& worst) {
  std::mt19937 random(seed);
  Problem& p = c.p;
  const std::vector<int> host_table = make_table(p, c.kv_lens, c.holes, random);
  const size_t rows = size_t(p.tokens) * p.q_heads();
  const int longest = std::max(1, *std::max_element(c.kv_lens.begin(), c.kv_lens.end()));
  const size_t cache = size_t(p.pages) * p.kv_heads * p.page_size * p.head_dim;
  DeviceArray<int> table(host_table);
  DeviceArray<int> q_starts(c.q_starts);
  DeviceArray<int> q_lens(c.q_lens);
  DeviceArray<int> kv_lens(c.kv_lens);
  DeviceArray<uint16_t> q(rows * p.head_dim);
  DeviceArray<uint16_t> k(cache);
  DeviceArray<uint16_t> v(cache);
  DeviceArray<float> q_scale(rows);
  DeviceArray<float> k_scale(size_t(p.pages) * p.kv_heads * p.page_size);
  DeviceArray<float> v_scale(p.kv_heads);
  std::vector<float> host_sinks(p.q_heads());
  for (float& sink : host_sinks) sink = static_cast<float>(random() % 1000) / 250 - 2;
  DeviceArray<float> sinks(host_sinks);
  DeviceArray<uint16_t> out(rows * p.head_dim);
  DeviceArray<float> lse(rows);
  DeviceArray<double> want(rows * p.head_dim);
  DeviceArray<double> bound(rows * p.head_dim);
  DeviceArray<double> want_lse(rows);
  DeviceArray<double> weights(rows * longest);
  DeviceArray<int> plan(plan_size(p));
  k.poison();  // NaN in every slot that is not written
  v.poison();
  const dim3 tokens(static_cast<unsigned>(longest), static_cast<unsigned>(p.batch));
  fill_values<<<64, 256>>>(q.data(), q.size(), seed, 1, p.fp8_query);
  for (DeviceArray<float>* scale : {&q_scale, &k_scale, &v_scale}) {
    fill_uniform<<<64, 256>>>(scale->data(), scale->size(), seed + 3);
  }
  fill_tokens<<<tokens, 128>>>(p, k.data(), table.data(), kv_lens.data(), seed + 1);
  fill_tokens<<<tokens, 128>>>(p, v.data(), table.data(), kv_lens.data(), seed + 2);
  const float* const used_sinks = c.sinks ? sinks.data() : nullptr;
  reference_rows<<<static_cast<int>(rows), kReferenceThreads>>>(
      {p, q.data(), k.data(), v.data(), table.data(), q_starts.data(), q_lens.data(),
       kv_lens.data(), q_scale.data(), k_scale.data(), v_scale.data(), used_sinks, want.data(),
       bound.data(), want_lse.data(), weights.data(), longest});
  require(cudaDeviceSynchronize(), "reference");

  const Buffers buffers{q.data(),
                        k.data(),
                        v.data(),
                        table.data(),
                        q_starts.data(),
                        q_lens.data(),
                        kv_lens.data(),
                        q_scale.data(),
                        k_scale.data(),
                        v_scale.data(),
                        used_sinks,
                        out.data(),
                        c.lse ? lse.data() : nullptr,
                        plan.data()};
  const auto run = [&](bool overlapped) {
    lse.poison();
    plan.poison();
    out.poison();
    require(jax_hpc::prefill_attention::launch(p, buffers, overlapped, nullptr), "launch");
    require(cudaDeviceSynchronize(), "kernel");
  };
  run(true);
  const std::vector<uint16_t> got = out.host();
  const std::vector<float> got_lse = lse.host();
  for (const bool overlapped : {false, true}) {
    run(overlapped);
    if (out.host() != got || std::memcmp(lse.host().data(), got_lse.data(), 4 * rows) != 0) {
      return "a second run gives other bits";
    }
  }
  const std::vector<double> truth = want.host();
  const std::vector<double> bounds = bound.host();
  const std::vector<double> truth_lse = want_lse.host();
  size_t where = 0;
  double here = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    double error = std::abs(value_of(got[i]) - truth[i]) / bounds[i];
    if (std::isnan(error)) error = INFINITY;
    if (error > here) here = error, where = i;
  }
  worst = std::max(worst, here);
  char message[200];
  if (here > 1) {
    std::snprintf(message, sizeof message,
                  "row %zu head %zu dim %zu: got %g, want %g; error %.2f x its bound",
                  where / p.head_dim / p.q_heads(), where / p.head_dim % p.q_heads(),
                  where % p.head_dim, value_of(got[where]), truth[where], here);
    return message;
  }
  // The tensor cores keep about 13 bits of a sum of e4m3 products.
  const double lse_bound = p.fp8_cache ? 2e-3 : 1e-4;
  for (size_t i = 0; c.lse && i < rows; ++i) {
    const bool right = std::isinf(truth_lse[i]) ? got_lse[i] == -INFINITY
                                                : std::abs(got_lse[i] - truth_lse[i]) < lse_bound;
    if (right) continue;
    std::snprintf(message, sizeof message, "lse of row %zu: got %g, want %g", i, got_lse[i],
                  truth_lse[i]);
    return message;
  }
  return "";
}

std::string name_of(const Case& c) {
  char text[240];
  std::snprintf(
      text, sizeof text,
      "T %d B %d G %d Hkv %d D %d N %d %s scales %d %d window %d cap %g sinks %d holes %d "
      "max_q_len %d",
      c.p.tokens, c.p.batch, c.p.group, c.p.kv_heads, c.p.head_dim, c.p.page_size,
      c.p.fp8_query   ? "fp8/fp8"
      : c.p.fp8_cache ? "bf16/fp8"
                      : "bf16",
      static_cast<int>(c.p.k_scale), static_cast<int>(c.p.v_scale), c.p.window, c.p.cap, c.sinks,
      c.holes, c.p.max_q_len);
  std::string name = text;
  for (int b = 0; b < c.p.batch && b < 6; ++b) {
    std::snprintf(text, sizeof text, " %d/%d", c.q_lens[b], c.kv_lens[b]);
    name += text;
  }
  return name;
}

Case random_case(std::mt19937& random, bool small) {
  const auto pick = [&](std::initializer_list<int> values) {
    return values.begin()[random() % values.size()];
  };
  const auto below = [&](int bound) { return static_cast<int>(random() % bound); };
  const bool fp8 = random() % 2 == 0;
  Case c{};
  c.p = make_problem(small ? pick({1, 2, 3}) : pick({1, 2, 3, 5, 12}),
                     pick({1, 2, 4, 5, 6, 7, 8, 12, 16}), pick({1, 1, 2}), pick({64, 128}),
                     pick({16, 32, 64, 128}), fp8);
  c.p.fp8_query = fp8 && random() % 2 == 0;
  if (fp8) {
    c.p.k_scale = static_cast<ScaleKind>(random() % 4);
    c.p.v_scale = static_cast<ScaleKind>(random() % 3);
  }
  c.p.window = pick({0, 0, 0, 1, 100, 1000});
  c.p.cap = static_cast<float>(pick({0, 0, 0, 3}));
  c.sinks = random() % 4 == 0;
  c.holes = random() % 3 == 0;
  c.lse = random() % 4 != 0;
  int longest = 1;
  for (int b = 0; b < c.p.batch; ++b) {
    const int q_len =
        small ? pick({0, 1, 9, below(40)}) : pick({0, 1, 1, 70, below(130), below(400)});
    const int context = small ? pick({0, 60, 200}) : pick({0, 0, 70, below(600), below(1500)});
    const bool clipped = random() % 16 == 0;  // rows before the first token
    c.q_starts.push_back(c.p.tokens);
    c.q_lens.push_back(q_len);
    c.kv_lens.push_back(clipped ? q_len / 2 : q_len + context);
    c.p.tokens += q_len + pick({0, 0, 3});
    longest = std::max(longest, q_len);
  }
  c.p.tokens = std::max(c.p.tokens, 1);
  c.p.max_q_len = random() % 6 == 0 ? std::max(1, longest - 3) : longest;
  return c;
}

int check(bool small) {
  const int count = small ? 8 : 60;
  std::mt19937 random(1);
  int failures = 0;
  double worst = 0;
  for (int i = 0; i < count; ++i) {
    const Case c = random_case(random, small);
    const std::string failure = failure_of(c, static_cast<uint32_t>(i) * 16 + 1, worst);
    if (failure.empty()) continue;
    if (++failures <= 12)
      std::cout << "case " << i << ": " << name_of(c) << ": " << failure << "\n";
  }
  std::cout << count - failures << " passed, " << failures << " failed; largest error " << worst
            << " of its bound" << std::endl;
  return failures == 0 ? 0 : 1;
}

// Cycles and nanoseconds of a short while on one SM.
__global__ void read_clock(uint64_t* cycles_and_ns) {
  constexpr int64_t kCycles = 50000;
  uint64_t begin_ns;
  uint64_t end_ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin_ns));
  const int64_t begin = clock64();
  while (clock64() - begin < kCycles) {
  }
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end_ns));
  cycles_and_ns[0] = static_cast<uint64_t>(clock64() - begin);
  cycles_and_ns[1] = end_ns - begin_ns;
}

// Layers with queries and caches of their own, more than 220 MB of them, and the time of one.
void time_mix(const Mix& mix, bool fp8) {
  Problem p = make_problem(mix.batch, 8, 8, 128, 64, fp8);
  p.fp8_query = fp8;
  if (fp8) p.k_scale = p.v_scale = ScaleKind::kTensor;
  p.tokens = mix.batch * mix.q_len;
  p.max_q_len = mix.q_len;
  const int length = mix.context + mix.q_len;
  std::mt19937 random(1);
  DeviceArray<int> table(make_table(p, std::vector<int>(mix.batch, length), false, random));
  std::vector<int> starts;
  for (int b = 0; b < mix.batch; ++b) starts.push_back(b * mix.q_len);
  DeviceArray<int> q_starts(starts);
  DeviceArray<int> q_lens(std::vector<int>(mix.batch, mix.q_len));
  DeviceArray<int> kv_lens(std::vector<int>(mix.batch, length));
  const size_t query = size_t(p.tokens) * p.q_heads() * p.head_dim;
  const size_t cache = size_t(p.pages) * p.kv_heads * p.page_size * p.head_dim;
  const int bytes = fp8 ? 1 : 2;
  const double moved = double(bytes) * (query + 2 * cache) + 2.0 * query;
  const int layers = std::clamp(static_cast<int>(220e6 / moved) + 1, 2, 64);
  DeviceArray<uint8_t> q(query * layers * bytes);
  DeviceArray<uint8_t> k(cache * layers * bytes);
  DeviceArray<uint8_t> v(cache * layers * bytes);
  DeviceArray<__nv_bfloat16> out(query * layers);
  DeviceArray<float> scale(size_t(p.tokens) * p.q_heads());
  DeviceArray<int> plan(plan_size(p));
  fill_values<<<1024, 256>>>(q.data(), query * layers, 1, 1, fp8);
  fill_values<<<1024, 256>>>(k.data(), cache * layers, 2, 1, fp8);
  fill_values<<<1024, 256>>>(v.data(), cache * layers, 3, 1, fp8);
  fill_uniform<<<64, 256>>>(scale.data(), scale.size(), 4);
  const auto launch = [&](int layer, cudaStream_t stream) {
    const size_t at = cache * layer * bytes;
    const Buffers b{q.data() + query * layer * bytes,
                    k.data() + at,
                    v.data() + at,
                    table.data(),
                    q_starts.data(),
                    q_lens.data(),
                    kv_lens.data(),
                    scale.data(),
                    scale.data(),
                    scale.data(),
                    nullptr,
                    out.data() + query * layer,
                    nullptr,
                    plan.data()};
    return jax_hpc::prefill_attention::launch(p, b, true, stream);
  };
  const double us = time_in_graph(layers, launch);
  // The clock that a busy device has come down to.
  DeviceArray<uint64_t> clock(2);
  for (int i = 0; i < layers; ++i) require(launch(i, nullptr), "launch");
  read_clock<<<1, 1>>>(clock.data());
  const std::vector<uint64_t> clocked = clock.host();
  const double pairs = (mix.context + 0.5 * mix.q_len) * mix.q_len * mix.batch;
  const double flops = 4 * pairs * p.q_heads() * p.head_dim;
  std::printf("%-13s %-4s %9.2f us %6.1f TFLOP/s, then at %.0f MHz\n", mix.name,
              fp8 ? "fp8" : "bf16", us, flops / us * 1e-6, 1e3 * clocked[0] / clocked[1]);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  const std::string which = argc > 2 ? argv[2] : "";
  if (command == "check") return check(!which.empty());
  if (command == "time") {
    for (const bool fp8 : {false, true}) {
      for (const Mix& mix : mixes()) {
        if (which.empty() || which == mix.name) time_mix(mix, fp8);
      }
    }
    return 0;
  }
  std::cerr << "usage: prefill_attention check [small | races] | time [case]\n";
  return 2;
}
