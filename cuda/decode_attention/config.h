// What a decode attention is, and how a CTA holds it: plain structs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "decode_schedule/config.h"

namespace jax_hpc::decode_attention {

using decode_schedule::count_tiles;
using decode_schedule::first_tile;
using decode_schedule::kTileTokens;

// Which values a scale of an fp8 cache has.
enum class ScaleKind : int { kNone, kTensor, kHead, kToken };

struct Problem {
  int batch;
  int q_len;  // S, query tokens of a sequence
  int group;  // G, query heads of a KV head
  int kv_heads;
  int head_dim;  // 64 or 128
  int pages;
  int page_size;    // 16, 32, 64 or 128
  int table_width;  // pages of a sequence at most
  bool fp8_cache;
  bool fp8_query;  // only with an fp8 cache
  float scale;     // of q . k
  int window;      // 0: none
  float cap;       // 0: none
  ScaleKind k_scale;
  ScaleKind v_scale;

  __host__ __device__ int rows() const { return q_len * group; }
};

// Division by a number that the host knows: a product, where the device's own division is 25
// instructions that no cache holds yet.
struct Divisor {
  int value;
  uint32_t multiplier;
  int shift;

  static Divisor of(int value) {
    int shift = 0;
    while (int64_t{1} << shift < value) ++shift;
    const uint64_t power = uint64_t{1} << (31 + shift);
    return {value, static_cast<uint32_t>((power + value - 1) / value), shift};
  }
#ifdef __CUDACC__
  // floor(n / value) of 0 <= n < 2^31.
  __device__ int divide(int n) const {
    return static_cast<int>(__umulhi(2 * static_cast<uint32_t>(n), multiplier) >> shift);
  }
#endif
};

// How the keys are cut. Either a schedule of `num_ctas` spans, or `splits` pieces of each pair
// (sequence, KV head) by its own length alone, each of `min_split_tiles` tiles at least.
struct Cut {
  int num_ctas;
  int splits;  // 0: by the schedule
  int min_split_tiles;
};

// Tiles that a pair has at most: those of the page table's tokens, or of what a window shows.
inline int64_t most_tiles(const Problem& p) {
  const int64_t tokens = int64_t{p.table_width} * p.page_size;
  const int64_t held = (tokens + kTileTokens - 1) / kTileTokens;
  if (p.window <= 0) return held;
  const int64_t shown = int64_t{p.q_len} + p.window - 1;
  return std::min(held, (shown + kTileTokens - 2) / kTileTokens + 1);
}

// Whether there may be a pair that is cut, and so something to merge.
inline bool may_cut(const Problem& p, const Cut& cut) {
  const int whole = cut.splits > 0 ? cut.min_split_tiles : decode_schedule::kWholeTiles;
  return cut.splits != 1 && most_tiles(p) > whole;
}

constexpr int kMostRows = 128;
constexpr int kMostSlots = 24;
constexpr int kWarps = 8;  // consumers of a CTA, which has an SM of its own
constexpr int kThreads = (kWarps + 1) * 32;
constexpr int kShortTask = 8;  // tiles
constexpr int kMergeKib = 8;   // shared memory of a CTA of the merge, of which 1 is the system's

// Query rows are the columns of the tensor cores' products. A consumer warp holds `column_tiles`
// times eight of them, and the warps of a CTA share out `row_groups` such blocks; warps of one
// group share out the tokens: those of a team a tile's, two teams tile by tile. A producer warp
// comes on top.
struct Config {
  int column_tiles;
  int row_groups;
  int team_warps;  // a multiple of row_groups; all or half of kWarps
  int slots;       // of the ring: half tiles (64 tokens of K or of V)
  int long_slots;  // of them in use by tasks of more than kShortTask tiles
  int shared_bytes;

  __host__ __device__ int row_tile() const { return 8 * column_tiles * row_groups; }
};

// Where things lie in a CTA's shared memory, in bytes: what has a fixed place, then the ring, then
// the rest.
struct Layout {
  static constexpr int kFull = 0;  // barriers
  static constexpr int kEmpty = kFull + kMostSlots * 8;
  static constexpr int kQueryFull = kEmpty + kMostSlots * 8;
  static constexpr int kQueryEmpty = kQueryFull + 2 * 8;
  static constexpr int kLive = kQueryEmpty + 2 * 8;
  static constexpr int kTasks = kLive + kMostSlots * 4;
  static constexpr int kScales = kTasks + 4 * 32;
  static constexpr int kState = 1024;
  static constexpr int kStateBytes = kWarps * 2 * 8 * 8;
  static constexpr int kQueryScale = kState + 2 * kStateBytes;
  static constexpr int kRing = kQueryScale + 2 * kMostRows * 4;
  static_assert(kScales + 4 * 8 <= kState && kRing % 1024 == 0);

  int merge;
  int query;
  int query_stride;  // of one row; 16 bytes more than the row keep its loads free of conflicts
  int token_scale;
  int end;

  // Where the warps' sums lie at the end of a task: with one column tile, of two tasks by turns.
  __host__ __device__ static constexpr int merge_places(int column_tiles) {
    return column_tiles == 1 ? 2 : 1;
  }

  __host__ __device__ static Layout of(int head_dim, int cache_bytes, int query_bytes,
                                       int column_tiles, int row_tile, int slots,
                                       bool token_scales) {
    Layout l{};
    l.merge = kRing + slots * kTileTokens * head_dim * cache_bytes;
    l.query = l.merge + merge_places(column_tiles) * kWarps * 8 * (head_dim + 4) * 4;
    l.query_stride = head_dim * query_bytes + 16;
    l.token_scale = l.query + 2 * row_tile * l.query_stride;
    l.end = l.token_scale + (token_scales ? slots * kTileTokens * 4 : 0);
    return l;
  }
};

inline Config choose(const Problem& p) {
  // Bytes of a CTA. An SM's 228 KiB, of which each CTA costs one more, leave a CTA of the merge
  // room beside it: so it starts while this one still runs.
  constexpr int kShared = (228 - kMergeKib) * 1024 - 1024;
  // A short task is over sooner with all of it under way at once, and a long one is 1 to 2 % faster
  // than with 64 KiB.
  constexpr int kRing = 128 * 1024;
  constexpr int kLongRing = 128 * 1024;
  Config c{};
  const int rows = p.rows();
  c.column_tiles = rows <= 8 ? 1 : 2;
  c.row_groups = rows <= 16 ? 1 : rows <= 32 ? 2 : rows <= 64 ? 4 : 8;
  c.team_warps = rows <= 64 ? kWarps / 2 : kWarps;
  const int slot_bytes = kTileTokens * p.head_dim * (p.fp8_cache ? 1 : 2);
  // Tiles alternate between teams, and both the slot that a tile takes and the one whose release
  // it waits for are its own team's: of the other team, which may be some tiles behind, it would
  // take a phase for another, and what it has released says nothing about older slots.
  const int step = c.team_warps < kWarps ? 4 : 1;
  const int most = std::min(kMostSlots, kRing / slot_bytes) / step * step;
  for (c.slots = most; c.slots > step; c.slots -= step) {
    c.shared_bytes =
        Layout::of(p.head_dim, p.fp8_cache ? 1 : 2, p.fp8_query ? 1 : 2, c.column_tiles,
                   c.row_tile(), c.slots, p.k_scale == ScaleKind::kToken)
            .end;
    if (c.shared_bytes <= kShared) break;
  }
  c.long_slots = std::min(c.slots, kLongRing / slot_bytes / step * step);
  return c;
}

// Pieces of a cut pair leave their results in slots of one workspace: sums of values
// [slots, rows, head_dim] and (base, total) [slots, rows, 2], float32.
inline int64_t workspace_slots(const Problem& p, const Cut& cut) {
  return cut.splits > 0 ? int64_t{p.batch} * p.kv_heads * cut.splits : 2 * int64_t{cut.num_ctas};
}

}  // namespace jax_hpc::decode_attention
