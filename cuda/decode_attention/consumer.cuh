// A consumer warp: scores, probabilities and sums of values of its tokens and rows. Warps meet
// only at the end of a task.
#pragma once

#include "decode_attention/ending.cuh"

namespace jax_hpc::decode_attention {

template <class Cache, int D, int N>
class Consumer {
  static constexpr int kSteps = D / 16;  // products over the head dimension
  static constexpr int kLoads = kSteps / Cache::kFragments;
  static constexpr int kChains = N == 1 ? 2 : 1;  // independent sums of products in a score
  static constexpr int kPairs = Rows<Cache, D, N>::kPairs;
  // Whether the next tile's keys are multiplied early. In bf16 a tile takes the memory more than
  // twice the time that it takes the warps, in fp8 about the same; with two column tiles there are
  // too few registers.
  static constexpr bool kGoesAhead = N == 1 && Cache::kBytes == 1;
  using Half = HalfTile<Cache, D>;

 public:
  __device__ Consumer(const Arguments& a, const Shared& shared, Thread thread)
      : a_(a),
        shared_(shared),
        thread_(thread),
        lane_(thread.lane),
        row_tokens_(a, (thread.warp & (a.row_groups - 1)) * 8 * N),
        token_warp_((thread.warp & (a.team_warps - 1)) >> log2(a.row_groups)),
        groups_(kTileTokens / kGroup * a.row_groups >> log2(a.team_warps)),
        teams_(kWarps >> log2(a.team_warps)),
        tile_(thread.warp < a.team_warps ? 0 : 1),
        key_offset_(Half::offset(lane_ % 16, lane_ / 16)),
        value_offset_(Half::offset(Cache::value_token(lane_), Cache::value_column(lane_))),
        part_tokens_(min(a.problem.page_size, kTileTokens)),
        ring_{2 * tile_} {}

  __device__ __forceinline__ void run() {
    if (thread_.warp == 0 && a_.sinks != nullptr) prefetch(a_.sinks);
    for (;;) {
      wait(shared_.query_full(turn_.stage()), turn_.parity());
      const Task& task = shared_.tasks[turn_.index];
      const int tiles = task.tiles;
      if (tiles < 0) return;
      query_.load(a_, shared_, turn_, row_tokens_.first, lane_);
      release(shared_.query_empty(turn_.stage()));
      rows_.reset();
      // As if the first team had the first tile: what a task's sums are added up to must not depend
      // on the tasks that its CTA had before.
      const bool in_place = (tile_ > 0) == (thread_.warp >= a_.team_warps);
      const int place = thread_.warp ^ (in_place ? 0 : a_.team_warps);
      take_tiles(Sight(a_.problem, task.length), task.first_token, tiles);
      Ending<Cache, D, N>(a_, shared_, task, turn_, {place, lane_}).run(rows_);
      turn_.advance();
    }
  }

 private:
  // Warps and their groups are powers of 2, and a division is 25 instructions.
  __device__ __forceinline__ static int log2(int power) { return 31 - __clz(power); }

  __device__ __forceinline__ void release(SharedAddress barrier) const {
    __syncwarp();
    if (lane_ == 0) arrive(barrier);
  }

  // A tile of this warp's team.
  struct Tile {
    int k;  // places in the ring
    int v;
    uint32_t k_parity;
    uint32_t v_parity;
    int token;      // the first
    uint32_t live;  // which groups of 16 lie on pages that exist; known once the keys are there
  };

  // With one column tile a team's four warps share out the four groups of a tile.
  __device__ __forceinline__ int groups() const { return N == 1 ? 1 : groups_; }

  __device__ __forceinline__ Tile tile_at(int token) const {
    Place v = ring_;
    v.advance(a_.slots);
    return {ring_.index(a_.slots),
            v.index(a_.slots),
            ring_.parity(a_.slots),
            v.parity(a_.slots),
            token,
            0};
  }

  // The team's, of a task's tiles.
  __device__ __forceinline__ void take_tiles(const Sight& sight, int first_token, int tiles) {
    Tile tile = tile_at(first_token + tile_ * kTileTokens);
    bool is_ahead = false;
    for (; tile_ < tiles; tile_ += teams_) {
      ring_.skip(2 * teams_, a_.slots);
      Tile next = tile_at(tile.token + teams_ * kTileTokens);
      for (int i = 0; i < groups(); ++i) {
        is_ahead = take_group(sight, tile, i, next, tile_ + teams_ < tiles, is_ahead);
      }
      tile = next;
    }
    tile_ -= tiles;
  }

  // Group `i` of this warp's, whose keys are multiplied already if `is_ahead`. Those of the next
  // tile, where they are there, are multiplied beside the values of this one: neither product waits
  // for the other. Returns whether they were.
  __device__ __forceinline__ bool take_group(const Sight& sight, Tile& tile, int i, Tile& next,
                                             bool has_next, bool is_ahead) {
    const int group = token_warp_ * groups() + i;
    const bool last = i + 1 == groups();
    const int token = tile.token + group * kGroup;
    if (!is_ahead) {
      if (i == 0) {
        wait(shared_.full(tile.k), tile.k_parity);
        tile.live = shared_.live[tile.k];
      }
      if (!is_seen(sight, tile, group)) {
        if (last) release(shared_.empty(tile.k));
        if (i == 0) wait(shared_.full(tile.v), tile.v_parity);
        if (last) release(shared_.empty(tile.v));
        return false;
      }
      clear_products();
      multiply_keys(group_address(tile.k, group));
      end_keys(tile, group, last);
    }
    float scores[N][4];
    take_scores(scores);
    const bool edge = !sight.all(token);
    const uint32_t visible = edge ? visible_scores(sight, token) : ~0u;
    uint32_t pairs[N][kPairs];
    rows_.weigh(query_, a_.problem.cap, edge, visible, lane_, scores, pairs);
    if (i == 0) wait(shared_.full(tile.v), tile.v_parity);
    const uint32_t values = group_address(tile.v, group);
    uint2 keep{~0u, ~0u};
    if (edge) keep = hide_not_finite(sight, token, values, pairs);
    is_ahead = false;
    if (__any_sync(~0u, (keep.x & keep.y) != ~0u)) {
      multiply_values<true>(values, pairs, keep);
    } else if (kGoesAhead && has_next && has_keys(next) && is_seen(sight, next, group)) {
      clear_products();
      multiply_both(values, pairs, group_address(next.k, group));
      end_keys(next, group, true);
      is_ahead = true;
    } else {
      multiply_values<false>(values, pairs, keep);
    }
    if (last) release(shared_.empty(tile.v));
    return is_ahead;
  }

  // Whether the keys of a tile are there, without waiting for them: their place's use before was
  // this warp's too.
  __device__ __forceinline__ bool has_keys(Tile& tile) const {
    if (!__all_sync(~0u, is_complete(shared_.full(tile.k), tile.k_parity))) return false;
    tile.live = shared_.live[tile.k];
    return true;
  }
  __device__ __forceinline__ bool is_seen(const Sight& sight, const Tile& tile, int group) const {
    return (tile.live >> group & 1) != 0 && sight.any(tile.token + group * kGroup);
  }

  __device__ __forceinline__ uint32_t group_address(int slot, int group) const {
    const int token = group * kGroup;
    const int in_part = token & (part_tokens_ - 1);
    return shared_.ring + slot * Half::kBytes + (token - in_part) * Half::kTokenBytes +
           in_part * Half::kRowBytes;
  }

  // Address of load j of a group, given that of load 0.
  __device__ __forceinline__ uint32_t load_address(uint32_t first, int j) const {
    return (first + j / 4 * part_tokens_ * 128) ^ (j % 4 * 32);
  }

  // Bit 4 n + i for scores[n][i].
  __device__ __forceinline__ uint32_t visible_scores(const Sight& sight, int token) const {
    uint32_t bits = 0;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int query_token = row_tokens_.of(8 * n + lane_ % 4 * 2 + i % 2);
        const bool sees = sight.sees(query_token, token + lane_ / 4 + i / 2 * 8);
        if (sees) bits |= 1u << (4 * n + i);
      }
    }
    return bits;
  }

  // Keys.

  __device__ __forceinline__ void clear_products() {
#pragma unroll
    for (int c = 0; c < kChains; ++c) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) products_[c][n][i] = 0;
      }
    }
  }

  // Keys of 16 tokens times all rows.
  __device__ __forceinline__ void multiply_keys(uint32_t address) {
    address += key_offset_;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) add_keys(address, j);
  }

  __device__ __forceinline__ void add_keys(uint32_t address, int j) {
    uint32_t loaded[4];
    load_matrices(loaded, load_address(address, j));
    uint32_t operand[Cache::kFragments][4];
    Cache::keys(operand, loaded);
#pragma unroll
    for (int f = 0; f < Cache::kFragments; ++f) {
      const int k = j * Cache::kFragments + f;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        Cache::multiply(products_[k % kChains][n], operand[f], query_.values[k][n][0],
                        query_.values[k][n][1]);
      }
    }
  }

  // What else is read of a tile's keys; with the last group their place is free.
  __device__ __forceinline__ void end_keys(const Tile& tile, int group, bool last) {
    if (a_.problem.k_scale == ScaleKind::kToken) {
      const float* const scales = shared_.token_scale + tile.k * kTileTokens + group * kGroup;
      token_scales_[0] = scales[lane_ / 4];
      token_scales_[1] = scales[lane_ / 4 + 8];
    }
    if (last) release(shared_.empty(tile.k));
  }

  __device__ __forceinline__ void take_scores(float (&scores)[N][4]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[n][i] = products_[0][n][i];
        if constexpr (kChains == 2) scores[n][i] += products_[1][n][i];
      }
    }
    if (a_.problem.k_scale != ScaleKind::kToken) return;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] *= token_scales_[i / 2];
    }
  }

  // Values.

  // A value that is not finite must reach no row that does not see its token, and 0 * NaN is NaN.
  // Tokens with one are masked out of the values (the result: masks of this lane's two pairs of
  // tokens), and the rows that see them get NaN for a probability.
  __device__ __forceinline__ uint2 hide_not_finite(const Sight& sight, int token, uint32_t address,
                                                   uint32_t (&pairs)[N][kPairs]) const {
    uint2 bad{0, 0};
    address += value_offset_;
#pragma unroll 1
    for (int j = 0; j < kLoads; ++j) {
      uint32_t operand[Cache::kFragments][4];
      load_values(load_address(address, j), operand);
#pragma unroll
      for (int f = 0; f < Cache::kFragments; ++f) {
        bad.x |= not_finite(operand[f][0]) | not_finite(operand[f][1]);
        bad.y |= not_finite(operand[f][2]) | not_finite(operand[f][3]);
      }
    }
    if (!__any_sync(~0u, (bad.x | bad.y) != 0)) return {~0u, ~0u};
#pragma unroll
    for (int step = 4; step < kWarpSize; step *= 2) {
      bad.x |= __shfl_xor_sync(~0u, bad.x, step);
      bad.y |= __shfl_xor_sync(~0u, bad.y, step);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int query_token = row_tokens_.of(8 * n + lane_ / 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t mask = 0xffffu << 16 * (i % 2);
        const bool is_bad = ((i < 2 ? bad.x : bad.y) & mask) != 0;
        if (is_bad && sight.sees(query_token, token + lane_ % 4 * 2 + i % 2 + i / 2 * 8)) {
          pairs[n][i / 2] |= mask & 0x7fff7fffu;
        }
      }
    }
    return {~bad.x, ~bad.y};
  }

  // All ones in each half that is not finite.
  __device__ __forceinline__ static uint32_t not_finite(uint32_t pair) {
    return __vcmpeq2(pair & Cache::kNotFinite, Cache::kNotFinite);
  }

  __device__ __forceinline__ static void load_values(uint32_t address,
                                                     uint32_t (&operand)[Cache::kFragments][4]) {
    uint32_t loaded[4];
    load_transposed(loaded, address);
    Cache::values(operand, loaded);
  }

  template <bool Masked>
  __device__ __forceinline__ void multiply_values(uint32_t address,
                                                  const uint32_t (&pairs)[N][kPairs], uint2 keep) {
    address += value_offset_;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) add_values<Masked>(address, j, pairs, keep);
  }

  // Values of one group and keys of another.
  __device__ __forceinline__ void multiply_both(uint32_t values, const uint32_t (&pairs)[N][kPairs],
                                                uint32_t keys) {
    values += value_offset_;
    keys += key_offset_;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      add_keys(keys, j);
      add_values<false>(values, j, pairs, {});
    }
  }

  template <bool Masked>
  __device__ __forceinline__ void add_values(uint32_t address, int j,
                                             const uint32_t (&pairs)[N][kPairs], uint2 keep) {
    uint32_t operand[Cache::kFragments][4];
    load_values(load_address(address, j), operand);
#pragma unroll
    for (int f = 0; f < Cache::kFragments; ++f) {
      if constexpr (Masked) {
#pragma unroll
        for (int i = 0; i < 4; ++i) operand[f][i] &= i < 2 ? keep.x : keep.y;
      }
#pragma unroll
      for (int i = 0; i < kPairs; i += 2) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          Cache::multiply(rows_.sum[j * Cache::kFragments + f][n], operand[f], pairs[n][i],
                          pairs[n][i + 1]);
        }
      }
    }
  }

  const Arguments& a_;
  const Shared& shared_;
  Thread thread_;
  int lane_;
  RowTokens row_tokens_;
  int token_warp_;  // among the warps of a team that share out the tokens
  int groups_;      // of 16 tokens, of this warp in a tile
  int teams_;       // that take tiles by turns
  int tile_;        // of the task, the next one that is this team's
  int key_offset_;
  int value_offset_;
  int part_tokens_;
  Place ring_;  // of the team's next tile, its keys
  Turn turn_;
  float products_[kChains][N][4];  // of keys, in independent sums
  float token_scales_[2] = {};
  Query<Cache, D, N> query_;
  Rows<Cache, D, N> rows_;
};

}  // namespace jax_hpc::decode_attention
