// The index of up to 32 pairs, made by every CTA for itself: one that knows its expert before the
// first kernel of the chain has ended asks for weights meanwhile. A lane sorts one pair.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "fused_moe/config.h"

namespace jax_hpc::fused_moe {

constexpr int kFewPairs = kWarpSize;

// In shared memory, instead of the arrays of Index.
struct FewPairs {
  Tile tiles[kFewPairs];
  int row_token[kFewPairs];
  int num_tiles;
  int unused[3];
};

constexpr int kExpertBits = 9;

// Index of an id among a call's experts, -1 where it is not one of them. The difference is one of
// unsigned integers: no garbage wraps around into the range.
__device__ __forceinline__ int local_expert(int experts, int id, int offset) {
  const uint32_t local = static_cast<uint32_t>(id) - static_cast<uint32_t>(offset);
  return id >= offset && local < static_cast<uint32_t>(experts) ? static_cast<int>(local) : -1;
}

// The lanes whose value is smaller, and those whose value is the same.
struct Order {
  uint32_t smaller;
  uint32_t same;
};

__device__ __forceinline__ Order order_lanes(uint32_t value) {
  Order order{0, kWholeWarp};
#pragma unroll
  for (int bit = kExpertBits - 1; bit >= 0; --bit) {
    const bool is_set = value >> bit & 1;
    const uint32_t set = __ballot_sync(kWholeWarp, is_set);
    if (is_set) order.smaller |= order.same & ~set;
    order.same &= is_set ? set : ~set;
  }
  return order;
}

// What a lane knows of its pair, in the order of the index.
struct FewOrder {
  int expert;     // -1: none of this call's
  int row;        // of a pair that has an expert
  int tile;       // that the pair starts, -1: none
  int tile_rows;  // of that tile
  int num_rows;   // of all pairs
  int num_tiles;
};

// By one warp. `most_rows` of a tile are a power of two.
__device__ __forceinline__ FewOrder order_few(int pairs, int experts, int most_rows,
                                              const int* topk_ids, const int* expert_offset,
                                              int lane) {
  const int id = lane < pairs ? __ldcg(topk_ids + lane) : -1;
  const int offset = __ldcg(expert_offset);
  const int expert = lane < pairs ? local_expert(experts, id, offset) : -1;
  const uint32_t here = __ballot_sync(kWholeWarp, expert >= 0);
  Order order = order_lanes(static_cast<uint32_t>(max(expert, 0)));
  order.smaller &= here;
  order.same &= here;
  const uint32_t before = order.smaller | (order.same & ((1u << lane) - 1));
  const int row = __popc(before);
  const int rank = row - __popc(order.smaller);
  const bool starts_tile = expert >= 0 && (rank & (most_rows - 1)) == 0;
  const uint32_t starts = __ballot_sync(kWholeWarp, starts_tile);
  // Before a tile are those that lower experts' lanes start, and its own expert's lower lanes.
  return {expert,
          row,
          starts_tile ? __popc(before & starts) : -1,
          min(most_rows, __popc(order.same) - rank),
          __popc(here),
          __popc(starts)};
}

// By one warp.
__device__ __forceinline__ void sort_few(const Problem& p, int tile_rows, const Index& index,
                                         int lane, FewPairs& to) {
  const FewOrder few = order_few(p.tokens * p.top_k, p.experts, tile_rows, index.topk_ids,
                                 index.expert_offset, lane);
  if (few.tile >= 0) to.tiles[few.tile] = {few.expert, few.row, few.tile_rows, 0};
  if (few.expert >= 0) to.row_token[few.row] = lane / p.top_k;
  if (lane == 0) to.num_tiles = few.num_tiles;
}

}  // namespace jax_hpc::fused_moe
