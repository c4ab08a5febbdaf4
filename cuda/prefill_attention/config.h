// What a prefill attention is, and how a CTA holds it: plain structs.
#pragma once

#include <cstdint>

#include "common/launch.h"

namespace jax_hpc::prefill_attention {

// Which values a scale of an fp8 cache has.
enum class ScaleKind : int { kNone, kTensor, kHead, kToken };

struct Problem {
  int tokens;  // T, rows of q
  int batch;
  int max_q_len;
  int group;  // G, query heads of a KV head
  int kv_heads;
  int head_dim;  // 64 or 128
  int pages;
  int page_size;    // 16, 32, 64 or 128
  int table_width;  // pages of a sequence at most
  bool fp8_cache;
  bool fp8_query;  // only with an fp8 cache
  float scale;     // of q . k, above 0
  int window;      // 0: none
  float cap;       // 0: none
  ScaleKind k_scale;
  ScaleKind v_scale;

  __host__ __device__ int q_heads() const { return kv_heads * group; }
};

constexpr int kMostGroup = 128;

// A CTA works on tiles of 128 rows, heads of one KV head and neighbouring tokens, and 128 keys.
constexpr int kTileRows = 128;
constexpr int kTileTokens = 128;
constexpr int kConsumers = 2;  // warpgroups, 64 rows each
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;

// A tile of rows, as the plan lists it. Row r of it is query head (first_head + r) % G of a KV head
// and token (first_head + r) / G after the first. Not more than the first `rows` rows exist; none
// of the tile after the last.
struct RowTile {
  int sequence;
  int first_q;     // row of q of the first token
  int first_head;  // of its query heads
  int rows;
  int first_position;  // of the first token, may be negative
  int last_position;   // of the last token
  int first_tile;      // of keys that some row sees; at least one tile
  int last_tile;
};
constexpr int kRowTileInts = sizeof(RowTile) / sizeof(int);

// The plan of a call: a header, then row tiles, those with most keys first. Tasks are all row tiles
// of the first few KV heads, then of the next.
struct PlanHeader {
  int taken;  // tasks that CTAs have, or have asked for
  int count;  // of row tiles
  int heads;  // KV heads that are worked on at a time, so that their keys and values stay in L2
  int unused[5];
};
static_assert(sizeof(PlanHeader) == sizeof(RowTile));

// Row tiles of any lengths.
inline int64_t most_row_tiles(int64_t tokens, int64_t batch, int64_t group) {
  return tokens * group / kTileRows + batch;
}
inline int64_t plan_ints(int64_t tokens, int64_t batch, int64_t group) {
  return (1 + most_row_tiles(tokens, batch, group)) * kRowTileInts;
}

}  // namespace jax_hpc::prefill_attention
