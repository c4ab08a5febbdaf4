// Decode attention without JAX: its kernels against float64, and how long they take.
//
//   decode_attention check       all options on random batches
//   decode_attention check small a few tiny ones, for compute-sanitizer's slower tools
//   decode_attention check races tiny ones that racecheck can judge: see reuses_memory
//   decode_attention time [tp8]  the recorded baselines' mixes (tp8: of one KV head only), cold
//                                caches; the practical floor is 4 us + bytes / 4.5 TB/s
//   decode_attention splits [tp8]  the same cut by splits instead of a schedule: whole, into eight,
//                                and both static cuts
//   decode_attention sweep       other groups, head sizes, query lengths, page sizes and batches
//   decode_attention tune [tp8]  the same with other rings, numbers of CTAs, costs and cuts
//
// Built by `make kernel-tests`.
#include <cstdio>
#include <cstring>
#include <string>

#include "decode_balance.cuh"
#include "decode_problem.cuh"
#include "decode_timing.cuh"

namespace {

using namespace jax_hpc::tests;
using jax_hpc::decode_attention::Buffers;
using jax_hpc::decode_attention::Cut;
using jax_hpc::decode_schedule::task_cost;

struct Case {
  Problem p;
  Cut cut;
  std::vector<int> lengths;
  bool sinks;
  bool holes;  // page ids outside the pool within the length
};

// Why a case fails; empty when it does not.
std::string failure_of(Case c, uint32_t seed) {
  std::mt19937 random(seed);
  Problem& p = c.p;
  const std::vector<int> host_table = make_table(p, c.lengths, c.holes, random);
  const int q_heads = p.group * p.kv_heads;
  const size_t rows = size_t(p.batch) * p.q_len * q_heads;
  const int longest = std::max(1, *std::max_element(c.lengths.begin(), c.lengths.end()));
  const size_t cache = size_t(p.pages) * p.kv_heads * p.page_size * p.head_dim;
  DeviceArray<int> table(host_table);
  DeviceArray<int> lengths(c.lengths);
  DeviceArray<uint16_t> q(rows * p.head_dim);
  DeviceArray<uint16_t> k(cache);
  DeviceArray<uint16_t> v(cache);
  DeviceArray<float> q_scale(rows);
  DeviceArray<float> k_scale(size_t(p.pages) * p.kv_heads * p.page_size);
  DeviceArray<float> v_scale(p.kv_heads);
  DeviceArray<float> sinks(q_heads);
  DeviceArray<uint16_t> out(rows * p.head_dim);
  DeviceArray<float> lse(rows);
  DeviceArray<double> want(rows * p.head_dim);
  DeviceArray<double> want_lse(rows);
  DeviceArray<double> weights(rows * longest);
  const auto slots = static_cast<size_t>(jax_hpc::decode_attention::workspace_slots(p, c.cut));
  DeviceArray<float> partial_out(slots * p.rows() * p.head_dim);
  DeviceArray<float> partial_state(slots * p.rows() * 2);
  k.poison();  // NaN in every slot that is not written
  v.poison();
  const dim3 tokens(static_cast<unsigned>(longest), static_cast<unsigned>(p.batch));
  fill_values<<<64, 256>>>(q.data(), rows * p.head_dim, seed, 2, p.fp8_query);
  fill_tokens<<<tokens, 128>>>(p, k.data(), table.data(), lengths.data(), seed + 1);
  fill_tokens<<<tokens, 128>>>(p, v.data(), table.data(), lengths.data(), seed + 2);
  for (DeviceArray<float>* scale : {&q_scale, &k_scale, &v_scale, &sinks}) {
    fill_uniform<<<64, 256>>>(scale->data(), scale->size(), seed + 3);
  }
  const float* const used_sinks = c.sinks ? sinks.data() : nullptr;
  reference_rows<<<static_cast<int>(rows), 128>>>({p, q.data(), k.data(), v.data(), table.data(),
                                                   lengths.data(), q_scale.data(), k_scale.data(),
                                                   v_scale.data(), used_sinks, want.data(),
                                                   want_lse.data(), weights.data(), longest});
  require(cudaDeviceSynchronize(), "reference");

  const jax_hpc::decode_schedule::Problem plan{
      p.batch, p.kv_heads, p.q_len, p.window, std::max(c.cut.num_ctas, 1), task_cost(p.fp8_cache)};
  DeviceSchedule schedule(plan.num_ctas);
  Buffers buffers{
      q.data(),   k.data(),   v.data(),           table.data(),        lengths.data(), nullptr,
      nullptr,    nullptr,    q_scale.data(),     k_scale.data(),      v_scale.data(), used_sinks,
      out.data(), lse.data(), partial_out.data(), partial_state.data()};
  schedule.set(buffers);
  const auto run = [&](bool overlapped) {
    for (DeviceArray<float>* array : {&lse, &partial_out, &partial_state}) array->poison();
    out.poison();
    require(jax_hpc::decode_schedule::launch(plan, lengths.data(), schedule.pair.data(),
                                             schedule.tile.data(), schedule.last.data(), nullptr),
            "schedule");
    require(jax_hpc::decode_attention::launch(p, choose(p), c.cut, buffers, {true, overlapped},
                                              nullptr),
            "launch");
    require(cudaDeviceSynchronize(), "kernel");
  };
  run(true);
  const std::vector<uint16_t> got = out.host();
  const std::vector<float> got_lse = lse.host();
  if (!is_same(schedule, schedule_on_host(plan, c.lengths, {}))) return "schedule differs";
  for (const bool overlapped : {false, true}) {
    run(overlapped);
    if (out.host() != got || std::memcmp(lse.host().data(), got_lse.data(), 4 * rows) != 0) {
      return "a second run gives other bits";
    }
  }

  // The output's own rounding is the yardstick.
  const std::vector<double> truth = want.host();
  const std::vector<double> truth_lse = want_lse.host();
  double rounding = 1e-6;
  double worst = 0;
  size_t where = 0;
  const auto value_of = [](uint16_t bits) {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return double{value};
  };
  for (size_t i = 0; i < truth.size(); ++i) {
    const __nv_bfloat16 nearest = __float2bfloat16(static_cast<float>(truth[i]));
    rounding = std::max(rounding, std::abs(double{__bfloat162float(nearest)} - truth[i]));
    double error = std::abs(value_of(got[i]) - truth[i]);
    if (std::isnan(error)) error = INFINITY;
    if (error > worst) worst = error, where = i;
  }
  char message[200];
  if (worst > 1.5 * rounding) {
    std::snprintf(message, sizeof message,
                  "row %zu dim %zu: got %g, want %g; error %.2f x rounding", where / p.head_dim,
                  where % p.head_dim, value_of(got[where]), truth[where], worst / rounding);
    return message;
  }
  for (size_t i = 0; i < rows; ++i) {
    const bool right = std::isinf(truth_lse[i]) ? got_lse[i] == -INFINITY
                                                : std::abs(got_lse[i] - truth_lse[i]) < 1e-4;
    if (right) continue;
    std::snprintf(message, sizeof message, "lse of row %zu: got %g, want %g", i, got_lse[i],
                  truth_lse[i]);
    return message;
  }
  return "";
}

std::string name_of(const Case& c) {
  char text[240];
  std::snprintf(text, sizeof text,
                "B %d S %d G %d Hkv %d D %d N %d %s window %d cap %g scales %d %d sinks %d "
                "ctas %d splits %d",
                c.p.batch, c.p.q_len, c.p.group, c.p.kv_heads, c.p.head_dim, c.p.page_size,
                c.p.fp8_query   ? "fp8/fp8"
                : c.p.fp8_cache ? "bf16/fp8"
                                : "bf16",
                c.p.window, c.p.cap, static_cast<int>(c.p.k_scale), static_cast<int>(c.p.v_scale),
                c.sinks, c.cut.num_ctas, c.cut.splits);
  return text;
}

Case random_case(std::mt19937& random, bool small) {
  const auto pick = [&](std::initializer_list<int> values) {
    return values.begin()[random() % values.size()];
  };
  const bool fp8 = random() % 2 == 0;
  Case c{};
  c.p = make_problem(small ? pick({1, 2, 3}) : pick({1, 2, 3, 5, 33}), pick({1, 1, 1, 2, 3, 5, 8}),
                     pick({1, 4, 5, 6, 7, 8, 12, 16}), pick({1, 2}), pick({64, 128}),
                     pick({16, 32, 64, 128}), fp8);
  c.p.fp8_query = fp8 && random() % 2 == 0;
  c.p.window = pick({0, 0, 1, 100, 1000});
  c.p.cap = static_cast<float>(pick({0, 0, 3}));
  if (fp8) {
    c.p.k_scale = static_cast<ScaleKind>(random() % 4);
    c.p.v_scale = static_cast<ScaleKind>(random() % 3);
  }
  c.sinks = random() % 4 == 0;
  c.holes = random() % 3 == 0;
  c.cut = {small ? pick({1, 7}) : pick({1, 7, 132, 264}), pick({0, 0, 0, 1, 3, 16}), pick({1, 8})};
  for (int b = 0; b < c.p.batch; ++b) {
    const int most = small ? pick({3, 70, 300}) : pick({3, 70, 600, 3000});
    c.lengths.push_back(static_cast<int>(random() % (most + 1)) - 1);
  }
  return c;
}

// Enough tiles for every CTA that its ring comes round many times while the memory is busy: copies
// then end out of order, and warps drift apart.
Case long_case(std::mt19937& random, int number) {
  Case c{};
  const bool fp8 = number % 2 == 0;
  c.p = make_problem(64, 1, number % 3 == 2 ? 16 : 8, number % 4 < 2 ? 1 : 4,
                     number % 5 == 4 ? 64 : 128, 64, fp8);
  c.p.fp8_query = fp8;
  c.cut = {132, 0, 1};
  for (int b = 0; b < c.p.batch; ++b) c.lengths.push_back(static_cast<int>(random() % 4000) + 2000);
  return c;
}

// One pair of so many pieces that several CTAs share its rows: 4, 2 and 1 at 20000, 12000 and 7000
// tokens.
Case heavy_case(std::mt19937& random, int number) {
  Case c{};
  const bool fp8 = number % 2 == 0;
  c.p = make_problem(3, number % 3 == 2 ? 2 : 1, number % 3 == 2 ? 5 : 8, 1,
                     number / 2 % 2 == 0 ? 64 : 128, 64, fp8);
  c.p.fp8_query = fp8;
  c.sinks = number % 3 == 1;
  c.cut = {132, 0, 1};
  const auto shorter = [&] { return static_cast<int>(random() % 400); };
  c.lengths = {shorter(), number % 3 == 0 ? 20000 : number % 3 == 1 ? 12000 : 7000, shorter()};
  return c;
}

int check(const std::string& which) {
  constexpr int kRandom = 150;
  constexpr int kLong = 10;
  constexpr int kHeavy = 12;
  const int count = which.empty() ? kRandom + kLong + kHeavy : which == "races" ? 12 : 8;
  std::mt19937 random(1);
  int failures = 0;
  for (int i = 0; i < count; ++i) {
    Case c = i < kRandom           ? random_case(random, !which.empty())
             : i < kRandom + kLong ? long_case(random, i)
                                   : heavy_case(random, i);
    while (which == "races" && reuses_memory(c.p, c.cut, c.lengths)) c = random_case(random, true);
    const std::string failure = failure_of(c, static_cast<uint32_t>(i) * 16 + 1);
    if (failure.empty()) continue;
    if (++failures <= 12)
      std::cout << "case " << i << ": " << name_of(c) << ": " << failure << "\n";
  }
  int checked = count;
  if (which.empty()) {
    for (const std::string& failure : balance_failures()) {
      ++checked;
      if (failure.empty()) continue;
      ++failures;
      std::cout << failure << "\n";
    }
  }
  std::cout << checked - failures << " passed, " << failures << " failed" << std::endl;
  return failures == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  const std::string option = argc > 2 ? argv[2] : "";
  if (command == "check") return check(option);
  if (command == "time") {
    time_schedule();
    time_all({{"us"}}, option != "tp8");
    return 0;
  }
  if (command == "sweep") {
    time_sweep();
    return 0;
  }
  if (command == "splits") {
    time_all({{"whole", {}, {0, 1, 1}},
              {"8", {}, {0, 8, 1}},
              {"4 of 4096", {}, {0, 4, 64}},
              {"16 of 512", {}, {0, 16, 8}}},
             option != "tp8");
    return 0;
  }
  if (command == "tune") {
    time_all({{"us"},
              {"ring 64/64", {}, {}, 64, 64},
              {"ring 128/32", {}, {}, 128, 32},
              {"ring 128/128", {}, {}, 128, 128},
              {"task 16", {.task = 16}},
              {"task 32", {.task = 32}},
              {"floor 32", {.floor = 32}},
              {"floor 16", {.floor = 16}},
              {"floor 20", {.floor = 20}},
              {"split 1", {}, {0, 1, 1}}},
             option != "tp8");
    return 0;
  }
  std::cerr
      << "usage: decode_attention check [small | races] | time | splits | sweep | tune [tp8]\n";
  return 2;
}
