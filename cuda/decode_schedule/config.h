// How decode attention's work is measured and cut: the same numbers as the jax.numpy form
// (jax_hpc/ops/decode_attention/schedule/heuristics.py), whose results these give bit for bit.
#pragma once

#include <cstdint>

namespace jax_hpc::decode_schedule {

constexpr int kTileTokens = 64;
constexpr int kTileCost = 8;  // costs are eighths of a tile's time
constexpr int kTaskCost = 16;
constexpr int kTaskCostFp8 = 24;
constexpr int kMinCtaCost = 24;  // floor on the work of a CTA
constexpr int kEmptyCost = 1;
constexpr int kWholeTiles = 8;  // where no pair has more, none is cut
constexpr int kAxisBits = 30;
constexpr int kMaxCtas = 1 << 20;

struct Problem {
  int batch;
  int kv_heads;
  int q_len;
  int window;  // 0: none
  int num_ctas;
  int task_cost = kTaskCost;
};

// A task's start and end are more of fp8's tiles, which take half as long.
inline int task_cost(bool fp8_cache) { return fp8_cache ? kTaskCostFp8 : kTaskCost; }

// Tile of the first key that any query of a sequence sees.
__host__ __device__ inline int first_tile(int length, int q_len, int window) {
  if (window <= 0) return 0;
  const int64_t hidden = int64_t{length} - q_len - window + 1;
  return hidden > 0 ? static_cast<int>(hidden / kTileTokens) : 0;
}

// Tiles of each pair (sequence, KV head); `length` is not negative.
__host__ __device__ inline int count_tiles(int length, int q_len, int window) {
  const int end = length / kTileTokens + (length % kTileTokens != 0);
  return end - first_tile(length, q_len, window);
}

__host__ __device__ inline int pair_cost(int tiles, int task_cost) {
  return tiles > 0 ? tiles * kTileCost + task_cost : kEmptyCost;
}

}  // namespace jax_hpc::decode_schedule
