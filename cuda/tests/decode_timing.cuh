// How long decode attention takes: mixes of lengths on cold caches, cut in several ways.
#pragma once

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "decode_problem.cuh"

namespace jax_hpc::tests {

using decode_attention::Buffers;
using decode_attention::Cut;
using decode_schedule::task_cost;

struct Variant {
  std::string name;
  Costs costs = {};
  Cut split = {};  // instead of a schedule, where splits > 0
  int ring = 0;    // KiB, instead of what is chosen, for short tasks and for long ones
  int long_ring = 0;
};

inline decode_attention::Config with_ring(const Problem& p, decode_attention::Config config,
                                          int kibibytes, int long_kibibytes) {
  const int slot = 64 * p.head_dim * (p.fp8_cache ? 1 : 2);
  const int step = config.team_warps < decode_attention::kWarps ? 4 : 1;
  const auto count = [&](int kib) { return std::max(kib * 1024 / slot / step * step, step); };
  const int slots = std::min(count(kibibytes), decode_attention::kMostSlots);
  config.shared_bytes += (slots - config.slots) * slot;
  config.slots = slots;
  config.long_slots = std::min(slots, count(long_kibibytes));
  return config;
}

inline int num_sms() {
  int count = 0;
  require(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0), "device 0");
  return count;
}

// What a rank's attention is like beside its lengths.
struct Shape {
  int kv_heads = 1;
  bool fp8 = false;
  int q_len = 1;
  int group = 8;  // query heads of a KV head
  int head_dim = 128;
  int page_size = 64;
};

// Layers with caches of their own, more than 200 MB of them, and the time of one for each variant.
inline void time_mix(const std::string& name, const Mix& mix, const Shape& shape,
                     const std::vector<Variant>& variants) {
  const auto [kv_heads, fp8, q_len, group, head_dim, page_size] = shape;
  std::vector<int> host_lengths;
  size_t tokens = 0;
  for (const auto& [count, length] : mix.groups) {
    host_lengths.insert(host_lengths.end(), count, length);
    tokens += size_t(count) * length;
  }
  Problem p = make_problem(static_cast<int>(host_lengths.size()), q_len, group, kv_heads, head_dim,
                           page_size, fp8);
  p.fp8_query = fp8;
  if (fp8) p.k_scale = p.v_scale = ScaleKind::kTensor;
  std::mt19937 random(1);
  DeviceArray<int> table(make_table(p, host_lengths, false, random, 0));
  DeviceArray<int> lengths(host_lengths);
  const size_t rows = size_t(p.batch) * q_len * group * kv_heads;
  const size_t cache = size_t(p.pages) * kv_heads * p.page_size * p.head_dim;  // elements
  const double bytes = 2.0 * tokens * kv_heads * p.head_dim * (fp8 ? 1 : 2);
  const int layers = std::max(3, static_cast<int>(220e6 / bytes) + 1);
  DeviceArray<uint8_t> k(cache * layers * (fp8 ? 1 : 2));
  DeviceArray<uint8_t> v(k.size());
  DeviceArray<uint16_t> q(rows * p.head_dim * layers);
  DeviceArray<uint16_t> out(q.size());
  DeviceArray<float> scale(rows);
  fill_values<<<1024, 256>>>(k.data(), cache * layers, 1, 1, fp8);
  fill_values<<<1024, 256>>>(v.data(), cache * layers, 2, 1, fp8);
  fill_values<<<256, 256>>>(q.data(), q.size(), 3, 1, fp8);
  fill_uniform<<<64, 256>>>(scale.data(), rows, 4);
  const double floor = 4 + bytes / 4.5e6;
  std::printf("%-17s %-4s floor %7.2f |", name.c_str(), fp8 ? "fp8" : "bf16", floor);
  for (const Variant& variant : variants) {
    decode_attention::Config config = choose(p);
    if (variant.ring > 0) config = with_ring(p, config, variant.ring, variant.long_ring);
    const int ctas = num_sms();
    const decode_schedule::Problem plan{p.batch, kv_heads, q_len, 0, ctas, task_cost(fp8)};
    const DeviceSchedule schedule(schedule_on_host(plan, host_lengths, variant.costs));
    Cut cut = variant.split;
    if (cut.splits == 0) cut.num_ctas = ctas;
    const auto slots = static_cast<size_t>(decode_attention::workspace_slots(p, cut));
    DeviceArray<float> partial_out(slots * p.rows() * p.head_dim);
    DeviceArray<float> partial_state(slots * p.rows() * 2);
    const auto launch = [&](int layer, cudaStream_t stream) {
      const size_t at = cache * layer * (fp8 ? 1 : 2);
      const size_t query = rows * p.head_dim * layer;
      Buffers b{reinterpret_cast<const uint8_t*>(q.data()) + query * (fp8 ? 1 : 2),
                k.data() + at,
                v.data() + at,
                table.data(),
                lengths.data(),
                nullptr,
                nullptr,
                nullptr,
                scale.data(),
                scale.data(),
                scale.data(),
                nullptr,
                out.data() + query,
                nullptr,
                partial_out.data(),
                partial_state.data()};
      schedule.set(b);
      return decode_attention::launch(p, config, cut, b, {false, true}, stream);
    };
    const double us = time_in_graph(layers, launch);
    std::printf(" %s %.2f (%.2f)", variant.name.c_str(), us, us / floor);
  }
  std::printf("\n");
  std::fflush(stdout);
}

inline void time_schedule() {
  const int shapes[][2] = {{64, 8}, {64, 1}, {4096, 1}, {65536, 1}};
  for (const auto& [batch, heads] : shapes) {
    const decode_schedule::Problem plan{batch, heads, 1, 0, 264};
    DeviceArray<int> lengths(std::vector<int>(batch, 4000));
    DeviceSchedule s(plan.num_ctas);
    const auto launch = [&](int, cudaStream_t stream) {
      return decode_schedule::launch(plan, lengths.data(), s.pair.data(), s.tile.data(),
                                     s.last.data(), stream);
    };
    std::printf("schedule B %d Hkv %d: %.2f us\n", batch, heads, time_in_graph(20, launch));
  }
}

inline void time_all(const std::vector<Variant>& variants, bool all) {
  for (const int kv_heads : {1, 8}) {
    if (kv_heads > 1 && !all) break;
    for (const bool fp8 : {false, true}) {
      for (const Mix& mix : mixes()) {
        std::string name = kv_heads == 1 ? "tp8 " : "tp1 ";
        time_mix(name.append(mix.name), mix, {kv_heads, fp8}, variants);
      }
    }
  }
}

// 64 sequences of 4096 tokens, 8 query heads on one KV head of 128, pages of 64, one token of each;
// then with one of these another.
inline void time_sweep() {
  constexpr int kTokens = 4096;
  for (const bool fp8 : {false, true}) {
    const auto time_one = [&](const char* what, int value, int batch, const Shape& shape) {
      const Mix mix{"", {{batch, kTokens}}};
      std::string name = what;
      time_mix(name.append(" ").append(std::to_string(value)), mix, shape, {{"us"}});
    };
    for (const int group : {1, 4, 5, 6, 7, 8, 12, 16}) {
      time_one("G", group, 64, {.fp8 = fp8, .group = group});
    }
    for (const int dim : {64, 128}) time_one("D", dim, 64, {.fp8 = fp8, .head_dim = dim});
    for (const int tokens : {1, 2, 4, 8}) time_one("S", tokens, 64, {.fp8 = fp8, .q_len = tokens});
    for (const int size : {16, 32, 64, 128})
      time_one("N", size, 64, {.fp8 = fp8, .page_size = size});
    for (const int batch : {1, 4, 16, 64, 256, 1024}) time_one("B", batch, batch, {.fp8 = fp8});
  }
}

}  // namespace jax_hpc::tests
