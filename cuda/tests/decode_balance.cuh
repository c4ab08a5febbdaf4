// How a cut by splits loads the CTAs: the walk over tasks by itself, counted.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "decode_attention/tasks.cuh"
#include "decode_problem.cuh"

namespace jax_hpc::tests {

// One warp a CTA. Of each, its tiles; of all, how often each tile of a pair is met.
static __global__ void walk_tasks(const __grid_constant__ decode_attention::Arguments a, int* load,
                                  int* met, int most_tiles) {
  decode_attention::TaskWalk walk(a, static_cast<int>(threadIdx.x));
  for (;;) {
    walk.find();
    const decode_attention::Task task = walk.next();
    if (task.tiles < 0) return;
    if (threadIdx.x != 0) continue;
    load[blockIdx.x] += task.tiles;
    const int pair = task.sequence * a.problem.kv_heads + task.head;
    const int first = task.first_token / decode_attention::kTileTokens;
    for (int i = 0; i < task.tiles; ++i) {
      atomicAdd(met + int64_t{pair} * most_tiles + first + i, 1);
    }
  }
}

// Pieces in any order, each given to the CTA that has least, leave none with more than the mean
// and one piece. Of a mix's lengths: why the walk does worse; empty where it does not.
inline std::string balance_failure(const Mix& mix, int kv_heads, const decode_attention::Cut& cut,
                                   int num_ctas) {
  using decode_attention::Divisor;
  std::vector<int> host_lengths;
  for (const auto& [count, length] : mix.groups) {
    host_lengths.insert(host_lengths.end(), count, length);
  }
  DeviceArray<int> lengths(host_lengths);
  decode_attention::Arguments a{};
  a.problem.batch = static_cast<int>(host_lengths.size());
  a.problem.kv_heads = kv_heads;
  a.problem.q_len = 1;
  a.cut = cut;
  a.by_heads = Divisor::of(kv_heads);
  a.by_splits = Divisor::of(cut.splits);
  a.kv_lens = lengths.data();
  int most_tiles = 0;
  int most_of_piece = 0;
  int64_t total = 0;
  for (const int length : host_lengths) {
    const int tiles = decode_schedule::count_tiles(length, 1, 0);
    most_tiles = std::max(most_tiles, tiles);
    total += int64_t{tiles} * kv_heads;
    most_of_piece = std::max(
        most_of_piece,
        std::min(tiles, std::max((tiles + cut.splits - 1) / cut.splits, cut.min_split_tiles)));
  }
  const int pairs = a.problem.batch * kv_heads;
  const std::vector<int> zeros(std::max(size_t(pairs) * most_tiles, size_t(num_ctas)));
  DeviceArray<int> load(zeros);
  DeviceArray<int> met(zeros);
  walk_tasks<<<num_ctas, 32>>>(a, load.data(), met.data(), most_tiles);
  require(cudaDeviceSynchronize(), "walk");
  const std::vector<int> loads = load.host();  // and zeros behind
  const std::vector<int> counts = met.host();
  for (int pair = 0; pair < pairs; ++pair) {
    const int tiles = decode_schedule::count_tiles(host_lengths[pair / kv_heads], 1, 0);
    for (int i = 0; i < most_tiles; ++i) {
      if (counts[size_t(pair) * most_tiles + i] != (i < tiles ? 1 : 0)) return "a tile is missed";
    }
  }
  const int most = *std::max_element(loads.begin(), loads.end());
  const double mean = static_cast<double>(total) / num_ctas;
  if (most <= mean + most_of_piece) return "";
  char message[160];
  std::snprintf(message, sizeof message,
                "%s Hkv %d splits %d: a CTA has %d tiles, the mean is %.1f", mix.name, kv_heads,
                cut.splits, most, mean);
  return message;
}

// Of all mixes, cut statically and into eight.
inline std::vector<std::string> balance_failures() {
  constexpr int kCtas = 132;
  std::vector<std::string> all;
  for (const Mix& mix : mixes()) {
    int batch = 0;
    for (const auto& group : mix.groups) batch += group.first;
    const decode_attention::Cut by_batch =
        batch <= 32 ? decode_attention::Cut{0, 16, 8} : decode_attention::Cut{0, 4, 64};
    for (const int kv_heads : {1, 8}) {
      for (const decode_attention::Cut& cut : {by_batch, decode_attention::Cut{0, 8, 1}}) {
        all.push_back(balance_failure(mix, kv_heads, cut, kCtas));
      }
    }
  }
  return all;
}

}  // namespace jax_hpc::tests
