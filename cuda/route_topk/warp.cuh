// The choice of experts by one warp a token, with the least work for each of many tokens.
#pragma once

#include "common/ptx.cuh"
#include "route_topk/columns.cuh"
#include "route_topk/heuristics.h"

namespace jax_hpc::route_topk {

// Value i of a lane belongs to expert i * 32 + lane.
template <int Values>
__device__ __forceinline__ void load(float (&values)[Values], const float* from, int experts,
                                     int lane, float otherwise) {
  from += lane;
#pragma unroll
  for (int i = 0; i < Values; ++i) {
    values[i] = i * kWarpSize + lane < experts ? from[i * kWarpSize] : otherwise;
  }
}

// Logits to scores in place. The sum of softmax is added up as the warps of the CTA kernel do it.
template <int Values>
__device__ __forceinline__ void score_all(Scorer& scorer, float (&values)[Values]) {
  if (scorer.scoring == Scoring::kSigmoid) {
#pragma unroll
    for (int i = 0; i < Values; ++i) values[i] = Scorer::sigmoid(values[i]);
    return;
  }
  float largest = values[0];
#pragma unroll
  for (int i = 1; i < Values; ++i) largest = fmaxf(largest, values[i]);
  largest = fminf(fmaxf(largest, -INFINITY), FLT_MAX);
  scorer.largest = from_ordered(__reduce_max_sync(kWholeWarp, to_ordered(largest)));
  float parts[kMostWarpsOfToken] = {};
#pragma unroll
  for (int i = 0; i < Values; ++i) {
    values[i] = scorer.exponential(values[i]);
    float& part = parts[i % kMostWarpsOfToken];
    part = __fadd_rn(part, values[i]);
  }
#pragma unroll
  for (int i = 0; i < kMostWarpsOfToken && i < Values; ++i) parts[i] = warp_sum(parts[i]);
#pragma unroll
  for (int half = kMostWarpsOfToken / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) parts[i] = __fadd_rn(parts[i], parts[i + half]);
  }
  scorer.inverse_sum = reciprocal(parts[0]);
#pragma unroll
  for (int i = 0; i < Values; ++i) values[i] = scorer.softmax(values[i]);
}

template <int Values>
__global__ void __launch_bounds__(kMostTokensOfCta* kWarpSize, Values <= 24 ? 8 : 6)
    topk_warp_kernel(const __grid_constant__ Problem p, const __grid_constant__ Arrays arrays) {
  __shared__ Columns<Values> columns_of_warps[kMostTokensOfCta];
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int token = static_cast<int>(blockIdx.x * (blockDim.x / kWarpSize)) + warp;
  wait_for_previous_kernel();
  if (token >= p.tokens) return;
  const Row row(p, arrays, token);
  Columns<Values>& columns = columns_of_warps[warp];
  float scores[Values];  // logits at first
  load<Values>(scores, row.logits, p.experts, lane, -INFINITY);
  Scorer scorer{p.options.scoring, 0.0f, 0.0f};
  score_all<Values>(scorer, scores);
  // Not asked for sooner: with half the registers twice the warps run, and they share it in L1.
  asm volatile("" ::: "memory");
  const bool has_bias = row.bias != nullptr;
  float bias[Values];
  load<Values>(bias, has_bias ? row.bias : row.logits, has_bias ? p.experts : 0, lane, 0.0f);
  uint32_t best = kNoExpert;
#pragma unroll
  for (int i = 0; i < Values; ++i) {
    const bool exists = i * kWarpSize + lane < p.experts;
    const uint32_t key = exists ? selection_key(scores[i], bias[i]) : kNoExpert;
    columns.keys[i * (kWarpSize + 1) + lane] = key;
    best = max(best, key);
  }
  __syncwarp();
  const int rows = ceil_div(p.experts, kWarpSize);
  if (p.options.topk_groups < p.options.num_groups) [[unlikely]] {
    mask_groups_by_warp(p, columns.keys, columns.strengths);
    best = best_of_column(columns.keys, rows, lane);
  }
  const int k = p.options.k;
  if (k > kWarpSize) {
    choose_any(p, arrays, token, scorer.largest, scorer.inverse_sum, columns.keys);
    return;
  }
  Chosen chosen{0, 0.0f};
  choose_from_columns(columns.keys, rows, best, k, lane, [&](int turn, int id) {
    if (lane == turn) chosen.id = id;
  });
  if (lane < k) chosen.score = scorer.score(row.logits[chosen.id]);
  const bool is_alive = __any_sync(kWholeWarp, chosen.score > 0.0f);
  if (is_alive || !is_dead_row(p, arrays, token)) finish_lanes(p, row, lane, chosen);
}

}  // namespace jax_hpc::route_topk
