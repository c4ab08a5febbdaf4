// The index of up to 32 pairs, made by every CTA for itself: one that knows its expert before the
// first kernel of the chain has ended asks for weights meanwhile. A lane sorts one pair.
#pragma once

#include "common/launch.h"
#include "common/ptx.cuh"
#include "fused_moe/config.h"
#include "fused_moe/instructions.cuh"

namespace jax_hpc::fused_moe {

constexpr int kFewPairs = kWarpSize;

// In shared memory, instead of the arrays of Index.
struct FewPairs {
  Tile tiles[kFewPairs];
  int row_token[kFewPairs];
  int num_tiles;
  int unused[3];
};

// The lanes whose value is smaller, and those whose value is the same.
struct Order {
  uint32_t smaller;
  uint32_t same;
};

__device__ __forceinline__ Order order_lanes(uint32_t value) {
  constexpr int kBits = 9;  // of an expert
  constexpr uint32_t kAll = ~0u;
  Order order{0, kAll};
#pragma unroll
  for (int bit = kBits - 1; bit >= 0; --bit) {
    const bool is_set = value >> bit & 1;
    const uint32_t set = __ballot_sync(kAll, is_set);
    if (is_set) order.smaller |= order.same & ~set;
    order.same &= is_set ? set : ~set;
  }
  return order;
}

// By one warp. The same order as the index of all pairs has.
__device__ __forceinline__ void sort_few(const Problem& p, int tile_rows, const int* topk_ids,
                                         const int* expert_offset, int lane, FewPairs& to) {
  const int pairs = p.tokens * p.top_k;
  const int id = lane < pairs ? topk_ids[lane] : -1;
  const int offset = *expert_offset;
  const uint32_t expert = static_cast<uint32_t>(id) - static_cast<uint32_t>(offset);
  const bool is_here = lane < pairs && id >= offset && expert < static_cast<uint32_t>(p.experts);
  const uint32_t here = __ballot_sync(~0u, is_here);
  Order order = order_lanes(is_here ? expert : 0);
  order.smaller &= here;
  order.same &= here;
  const int rank = __popc(order.same & ((1u << lane) - 1));
  const int row = __popc(order.smaller) + rank;
  const int of_tile = rank & (tile_rows - 1);
  const bool starts_tile = is_here && of_tile == 0;
  const uint32_t starts = __ballot_sync(~0u, starts_tile);
  if (starts_tile) {
    // Of its own expert, the tiles before are those that lower lanes start.
    const int tile = __popc((order.smaller | (order.same & ((1u << lane) - 1))) & starts);
    to.tiles[tile] = {static_cast<int>(expert), row, min(tile_rows, __popc(order.same) - rank), 0};
  }
  if (is_here) to.row_token[row] = lane / p.top_k;
  if (lane == 0) to.num_tiles = __popc(starts);
}

}  // namespace jax_hpc::fused_moe
