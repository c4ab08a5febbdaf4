// Choosing one by one from keys in shared memory by one warp. Every lane keeps the best of a column
// of them; the warp finds the best column, and in it the expert.
#pragma once

#include "route_topk/groups.cuh"
#include "route_topk/results.cuh"

namespace jax_hpc::route_topk {

constexpr int kMostRows = kWarpSize;  // one a lane
constexpr int kMostColumnExperts = kMostRows * kWarpSize;

// Keys of one token in whole rows: kNoExpert beyond the last expert.
template <int Rows>
struct Columns {
  uint32_t keys[place_of(Rows * kWarpSize)];
  float strengths[Rows * kWarpSize / 2];  // of groups
};

__device__ __forceinline__ uint32_t best_of_column(const uint32_t* keys, int rows, int lane) {
  uint32_t best = kNoExpert;
#pragma unroll 1
  for (int row = 0; row < rows; ++row) best = max(best, keys[row * (kWarpSize + 1) + lane]);
  return best;
}

// Several columns have the best key: the one where it has the lowest id.
__device__ __forceinline__ int first_of_columns(const uint32_t* keys, uint32_t best, bool has_it,
                                                int lane) {
  uint32_t id = UINT32_MAX;
  __syncwarp();
  if (has_it) {
    int row = 0;
    while (keys[row * (kWarpSize + 1) + lane] != best) ++row;
    id = static_cast<uint32_t>(row * kWarpSize + lane);
  }
  return static_cast<int>(__reduce_min_sync(kWholeWarp, id) % kWarpSize);
}

// Calls found(turn, id) in every lane for the best experts in turn. mine: best of the lane's
// column. The keys of chosen experts are cleared.
template <class Found>
__device__ __forceinline__ void choose_from_columns(uint32_t* keys, int rows, uint32_t mine, int k,
                                                    int lane, const Found& found) {
#pragma unroll 1
  for (int turn = 0; turn < k; ++turn) {
    const uint32_t best = __reduce_max_sync(kWholeWarp, mine);
    const uint32_t owners = __ballot_sync(kWholeWarp, mine == best);
    int column = __ffs(static_cast<int>(owners)) - 1;
    if ((owners & (owners - 1)) != 0) [[unlikely]] {
      column = first_of_columns(keys, best, mine == best, lane);
    }
    uint32_t* place = keys + lane * (kWarpSize + 1) + column;
    uint32_t key = lane < rows ? *place : kNoExpert;
    const uint32_t hits = __ballot_sync(kWholeWarp, key == best);
    const int row = __ffs(static_cast<int>(hits)) - 1;
    if (lane == row) {
      key = kNoExpert;
      *place = key;
    }
    const uint32_t left = __reduce_max_sync(kWholeWarp, key);
    if (lane == column) mine = left;
    found(turn, row * kWarpSize + column);
  }
}

// True, and its results written, for a row without a finite logit.
__device__ __forceinline__ bool is_dead_row(const Problem& p, const Arrays& arrays, int token) {
  WarpTeam team;
  const Row row(p, arrays, token);
  bool is_alive = false;
#pragma unroll 1
  for (int i = team.rank(); i < p.experts; i += kWarpSize) is_alive |= row.logits[i] > -INFINITY;
  if (__any_sync(kWholeWarp, is_alive)) return false;
  write_dead_row(team, p, row);
  return true;
}

// The whole choice from keys, for any number of experts a token: what the fast paths leave.
__device__ __noinline__ void choose_any(const Problem& p, const Arrays& arrays, int token,
                                        float largest, float inverse_sum, uint32_t* keys) {
  if (is_dead_row(p, arrays, token)) return;
  const Scorer scorer{p.options.scoring, largest, inverse_sum};
  const Row row(p, arrays, token);
  WarpTeam team;
  const int lane = team.rank();
  const int rows = ceil_div(p.experts, kWarpSize);
  choose_from_columns(keys, rows, best_of_column(keys, rows, lane), p.options.k, lane,
                      [&](int turn, int id) {
                        if (lane > 0) return;
                        row.ids[turn] = id;
                        row.weights[turn] = scorer.score(row.logits[id]);
                      });
  finish_written(team, p, row);
}

}  // namespace jax_hpc::route_topk
