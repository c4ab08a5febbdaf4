// What the attention kernel gets, and small things that all its warps compute alike.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "prefill_attention/config.h"
#include "prefill_attention/instructions.cuh"

namespace jax_hpc::prefill_attention {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// The largest score of a row that has met no key: below every score, and not infinite, so that
// differences are no NaN.
constexpr float kNoScore = -1e30f;

struct Arguments {
  Problem problem;
  uint32_t group_reciprocal;  // see token_of
  int page_bits;              // page_size = 2^page_bits
  const __nv_bfloat16* q;
  const int* page_table;
  int* plan;
  const float* sinks;  // null where there are none
  __nv_bfloat16* out;
  float* lse;  // null where it is not asked for
};

// row / group for rows of a tile: exact while row * group is below 2^16, and rows are below 256.
inline uint32_t group_reciprocal(int group) { return (1u << 16) / group + 1; }
__device__ __forceinline__ int token_of(const Arguments& a, int row) {
  return static_cast<int>(static_cast<uint32_t>(row) * a.group_reciprocal >> 16);
}

// What a CTA does next: a tile of rows of one KV head. No rows: nothing is left.
struct Task {
  RowTile tile;
  int kv_head;

  // Whether some row of the tile does not see some token of a tile of keys.
  __device__ __forceinline__ bool hides(const Problem& p, int tile_of_keys) const {
    const int first = tile_of_keys * kTileTokens;
    if (first + kTileTokens - 1 > tile.first_position) return true;
    return p.window > 0 && first <= tile.last_position - p.window;
  }
};

// Which keys a row at `position` sees: those from `lowest` on up to itself.
struct Sight {
  int lowest;
  int position;
  __device__ __forceinline__ Sight(const Problem& p, int position)
      : lowest(p.window > 0 ? position - p.window + 1 : 0), position(position) {}
  __device__ __forceinline__ bool sees(int token) const {
    return token >= lowest && token <= position;
  }
};

}  // namespace jax_hpc::prefill_attention
