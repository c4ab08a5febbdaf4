// The choice of experts by one CTA a token, made for the latency of a decode step. A step finds the
// code of a kernel in no cache, and reads it at four to six cycles an instruction: the path is
// short, its loops are rolled, and it takes for granted that no two experts have the same key. Ties
// leave one of the k places empty; then, and for what is rare, one warp chooses again.
#pragma once

#include "common/ptx.cuh"
#include "route_topk/columns.cuh"
#include "route_topk/heuristics.h"

namespace jax_hpc::route_topk {

constexpr int kMostThreads = kMostWarpsOfToken * kWarpSize;

template <int Values>
struct alignas(16) CtaShared {
  uint32_t best[kMostThreads];  // keys of the warps' best
  Chosen candidates[kMostWarpsOfToken][kWarpSize];
  Chosen chosen[kWarpSize];
  uint32_t parts[2][kMostWarpsOfToken];
  Columns<Values * kMostWarpsOfToken> columns;
};

struct Place {
  int thread;
  int lane;
  int warp;
  int warps;

  __device__ Place()
      : thread(static_cast<int>(threadIdx.x)),
        lane(static_cast<int>(threadIdx.x % kWarpSize)),
        warp(static_cast<int>(threadIdx.x / kWarpSize)),
        warps(static_cast<int>(blockDim.x / kWarpSize)) {}
  // Value i of a thread belongs to this expert: loads of a warp are whole lines.
  __device__ __forceinline__ int expert(int i) const {
    return i * static_cast<int>(blockDim.x) + thread;
  }
};

// A part of every warp: that of warp lane % 8 in each lane.
__device__ __forceinline__ uint32_t exchange(uint32_t* parts, uint32_t mine, const Place& at) {
  if (at.lane == 0) parts[at.warp] = mine;
  __syncthreads();
  const int other = at.lane & (kMostWarpsOfToken - 1);
  return other < at.warps ? parts[other] : 0;
}

// Scores of softmax, and their scorer. The warp kernel adds up in the same order.
template <int Values>
__device__ __forceinline__ void find_softmax(Scorer& scorer, const float (&logits)[Values],
                                             float (&scores)[Values],
                                             uint32_t (&parts)[2][kMostWarpsOfToken],
                                             const Place& at) {
  float largest = logits[0];
#pragma unroll
  for (int i = 1; i < Values; ++i) largest = fmaxf(largest, logits[i]);
  largest = fminf(fmaxf(largest, -INFINITY), FLT_MAX);
  const uint32_t of_warp = __reduce_max_sync(kWholeWarp, to_ordered(largest));
  const uint32_t of_all = __reduce_max_sync(kWholeWarp, exchange(parts[0], of_warp, at));
  scorer.largest = from_ordered(of_all);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < Values; ++i) {
    scores[i] = scorer.exponential(logits[i]);
    sum = __fadd_rn(sum, scores[i]);
  }
  sum = __uint_as_float(exchange(parts[1], __float_as_uint(warp_sum(sum)), at));
#pragma unroll
  for (int offset = kMostWarpsOfToken / 2; offset > 0; offset /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(kWholeWarp, sum, offset));
  }
  scorer.inverse_sum = reciprocal(sum);
#pragma unroll
  for (int i = 0; i < Values; ++i) scores[i] = scorer.softmax(scores[i]);
}

template <int Values>
__device__ __forceinline__ void sort_descending(uint32_t (&keys)[Values]) {
#pragma unroll
  for (int round = 0; round < Values; ++round) {
#pragma unroll
    for (int i = round % 2; i + 1 < Values; i += 2) {
      const uint32_t larger = max(keys[i], keys[i + 1]);
      keys[i + 1] = min(keys[i], keys[i + 1]);
      keys[i] = larger;
    }
  }
}

// Adds one to the count where a == b; from C++ the compiler makes three instructions of it.
__device__ __forceinline__ void count_if_equal(uint32_t& count, uint32_t a, uint32_t b) {
  asm("{\n"
      ".reg .pred p;\n"
      "setp.eq.u32 p, %1, %2;\n"
      "@p add.u32 %0, %0, 1;\n"
      "}"
      : "+r"(count)
      : "r"(a), "r"(b));
}

// The k best of this warp, best first, into its candidates. A lane gets the key of the
// candidate of its turn. False if keys are equal.
template <int Values>
__device__ __forceinline__ bool choose_in_warp(const uint32_t (&keys)[Values],
                                               const float (&scores)[Values], Chosen* candidates,
                                               int k, int turn_of_lane, const Place& at,
                                               uint32_t* key_of_lane) {
  uint32_t sorted[Values];
#pragma unroll
  for (int i = 0; i < Values; ++i) sorted[i] = keys[i];
  sort_descending(sorted);
  uint32_t found = 0;
  *key_of_lane = kNoExpert;
  int turn = 0;
#pragma unroll 1
  do {
    const uint32_t best = __reduce_max_sync(kWholeWarp, sorted[0]);
    if constexpr (Values > 1) count_if_equal(found, sorted[1], best);
    count_if_equal(found, sorted[0], best);
    const bool is_here = sorted[0] == best;
#pragma unroll
    for (int i = 0; i < Values; ++i) {
      const uint32_t next = i + 1 < Values ? sorted[i + 1] : kNoExpert;
      sorted[i] = is_here ? next : sorted[i];
      if (keys[i] == best) candidates[turn] = {at.expert(i), scores[i]};
    }
    if (turn == turn_of_lane) *key_of_lane = best;
  } while (++turn < k);
  return __reduce_add_sync(kWholeWarp, found) == static_cast<uint32_t>(k);
}

// Adds one to the count where other >= mine, that is where other - mine carries.
__device__ __forceinline__ void count_from(uint32_t& count, uint32_t other, uint32_t minus_mine) {
  asm("{\n"
      ".reg .b32 sum;\n"
      "add.cc.u32 sum, %1, %2;\n"
      "addc.u32 %0, %0, 0;\n"
      "}"
      : "+r"(count)
      : "r"(other), "r"(minus_mine));
}

// How many of the keys are at or above mine; each of the lanes that share a candidate counts some.
__device__ __forceinline__ int rank_among(const uint32_t* keys, int chunks, uint32_t mine,
                                          int log_period, int lane) {
  const auto* all = reinterpret_cast<const uint4*>(keys);
  uint32_t counts[2] = {};
#pragma unroll 1
  for (int i = lane >> log_period; i < chunks; i += kWarpSize >> log_period) {
    const uint4 others = all[i];
    count_from(counts[0], others.x, -mine);
    count_from(counts[1], others.y, -mine);
    count_from(counts[0], others.z, -mine);
    count_from(counts[1], others.w, -mine);
  }
  uint32_t count = counts[0] + counts[1];
#pragma unroll 1
  for (int offset = kWarpSize >> 1; offset >> log_period > 0; offset >>= 1) {
    count += __shfl_xor_sync(kWholeWarp, count, offset);
  }
  return static_cast<int>(count);
}

// Puts the k best of the CTA in shared.chosen; an id of -1 where there were ties.
template <int Values>
__device__ __forceinline__ void choose_in_cta(CtaShared<Values>& shared,
                                              const uint32_t (&keys)[Values],
                                              const float (&scores)[Values], int k,
                                              const Place& at) {
  const int log_period = log_of_period(k);
  const int turn = at.lane & ((1 << log_period) - 1);
  Chosen* candidates = shared.candidates[at.warp];
  uint32_t mine;
  const bool is_clear = choose_in_warp<Values>(keys, scores, candidates, k, turn, at, &mine);
  shared.best[((at.lane >> 2) * at.warps + at.warp) * 4 + (at.lane & 3)] = mine;
  __syncthreads();
  const Chosen candidate = candidates[turn];
  const int chunks = ((k + 3) >> 2) * at.warps;
  const int count = rank_among(shared.best, chunks, mine, log_period, at.lane);
  if (is_clear && at.lane < k && count <= k) shared.chosen[count - 1] = candidate;
  __syncthreads();
}

template <int Values>
__global__ void __launch_bounds__(kMostThreads, 4)
    topk_cta_kernel(const __grid_constant__ Problem p, const __grid_constant__ Arrays arrays) {
  __shared__ CtaShared<Values> shared;
  const Place at;
  const auto token = static_cast<int>(blockIdx.x);
  const Row row(p, arrays, token);
  const bool has_bias = row.bias != nullptr;
  float logits[Values];
  float bias[Values];
  if (at.warp == 0) shared.chosen[at.lane].id = -1;
  wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; i < Values; ++i) {
    const int expert = at.expert(i);
    logits[i] = expert < p.experts ? row.logits[expert] : -INFINITY;
    bias[i] = has_bias && expert < p.experts ? row.bias[expert] : 0.0f;
  }
  Scorer scorer{p.options.scoring, 0.0f, 0.0f};
  float scores[Values];
  if (scorer.scoring == Scoring::kSigmoid) [[likely]] {
#pragma unroll
    for (int i = 0; i < Values; ++i) scores[i] = Scorer::sigmoid(logits[i]);
  } else {
    find_softmax<Values>(scorer, logits, scores, shared.parts, at);
  }
  uint32_t keys[Values];
#pragma unroll
  for (int i = 0; i < Values; ++i) {
    const uint32_t key = selection_key(scores[i], bias[i]);
    const int expert = at.expert(i);
    // What cannot be chosen has keys of its own too, below the others.
    keys[i] = expert < p.experts ? key : static_cast<uint32_t>(expert) + 1;
    shared.columns.keys[place_of(expert)] = expert < p.experts ? key : kNoExpert;
  }
  if (p.options.topk_groups < p.options.num_groups) [[unlikely]] {
    __syncthreads();
    if (at.warp == 0) mask_groups_by_warp(p, shared.columns.keys, shared.columns.strengths);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Values; ++i) {
      const uint32_t key = shared.columns.keys[place_of(at.expert(i))];
      keys[i] = key > kOutsideGroups ? key : static_cast<uint32_t>(at.expert(i)) + 1;
    }
  }
  const int k = p.options.k;
  if (k <= kWarpSize) {
    choose_in_cta<Values>(shared, keys, scores, k, at);
    if (at.warp > 0) return;
    const Chosen chosen = shared.chosen[at.lane];
    const bool is_full = __all_sync(kWholeWarp, at.lane >= k || chosen.id >= 0);
    const bool is_alive = __any_sync(kWholeWarp, at.lane < k && chosen.score > 0.0f);
    if (is_full && is_alive) {
      finish_lanes(p, row, at.lane, chosen);
      return;
    }
  } else {
    __syncthreads();
    if (at.warp > 0) return;
  }
  choose_any(p, arrays, token, scorer.largest, scorer.inverse_sum, shared.columns.keys);
}

}  // namespace jax_hpc::route_topk
