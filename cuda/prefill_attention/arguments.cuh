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
  bool query_boxes;           // tiles of rows are boxes for the copy engine
  const void* q;
  const int* page_table;
  int* plan;
  const float* sinks;  // null where there are none
  const float* q_scale;
  const float* k_scale;
  const float* v_scale;
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
};

// The tiles of keys of which all rows of a task see all tokens.
struct FullTiles {
  int first;
  int last;
  __device__ __forceinline__ FullTiles(const Problem& p, const RowTile& rows)
      : first(p.window > 0 ? ceil_div(max(rows.last_position - p.window + 1, 0), kTileTokens) : 0),
        last((rows.first_position + 1 >> log2_of(kTileTokens)) - 1) {}
  __device__ __forceinline__ bool hold(int tile) const { return tile >= first && tile <= last; }
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
