// What the kernels get: pointers to whole arrays, sizes, and what follows from them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "decode_attention/config.h"
#include "decode_attention/instructions.cuh"

namespace jax_hpc::decode_attention {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// The base of a row that has met no key: below every score, and not infinite, so that differences
// of bases are no NaN.
constexpr float kNoBase = -1e30f;

struct Arguments {
  Problem problem;
  Cut cut;
  Divisor by_heads;   // of pairs by KV heads
  Divisor by_group;   // of rows by query heads of a KV head
  Divisor by_rows;    // of all pairs' rows by those of one
  Divisor by_splits;  // of pieces by splits
  float cap_unit;     // what makes a score over the cap the argument of tanh's exponential of 2
  int column_tiles;
  int row_groups;
  int team_warps;
  int slots;
  int long_slots;
  int page_bits;  // page_size = 2^page_bits
  const void* q;
  const int* page_table;
  const int* kv_lens;
  const int* span_pair;
  const int* span_tile;
  const int* merge_last;
  const float* q_scale;
  const float* k_scale;
  const float* v_scale;
  const float* sinks;
  __nv_bfloat16* out;
  float* lse;  // null where it is not asked for
  float* partial_out;
  float2* partial_state;
};

// Whether all tokens of a head have the same scale.
__device__ __forceinline__ bool is_common(ScaleKind kind) {
  return kind == ScaleKind::kTensor || kind == ScaleKind::kHead;
}

// How a row ends: its sum of values times `weight`. A row that saw no key has none, whose
// log-sum-exp is not finite.
struct Closing {
  float weight;
  float base;
  float total;

  __device__ __forceinline__ float log_sum_exp() const {
    return total == 0 ? -INFINITY : (base + log2f(total)) * kLn2;
  }
};

// What an attention sink adds to a row's sum, as a power of 2; none where there is no sink.
__device__ __forceinline__ float sink_power(const float* sinks, int q_head) {
  return sinks == nullptr ? -INFINITY : sinks[q_head] * kLog2E;
}

// Probabilities are powers of 2 relative to `base`, and `total` is their sum.
__device__ __forceinline__ Closing close_row(float base, float total, float sink) {
  if (total == 0) return {0, base, 0};
  const float top = fmaxf(base, sink);
  const float own = power_of_2(base - top);
  total = fmaf(total, own, power_of_2(sink - top));
  return {__fdividef(own, total), top, total};
}

__device__ __forceinline__ float value_scale(const Arguments& a, int head) {
  if (!is_common(a.problem.v_scale)) return 1;
  return a.v_scale[a.problem.v_scale == ScaleKind::kHead ? head : 0];
}

// Index of a pair's row in [B, S, Hq].
__device__ __forceinline__ int64_t output_row(const Arguments& a, int sequence, int head, int row) {
  const Problem& p = a.problem;
  const int token = a.by_group.divide(row);
  return (int64_t{sequence} * p.q_len + token) * (p.kv_heads * p.group) + head * p.group +
         (row - token * p.group);
}

}  // namespace jax_hpc::decode_attention
