// The choice of experts by one CTA a token, made for the latency of a decode step. A step finds the
// code of a kernel in no cache, and reads it at four to six cycles an instruction: the path is
// short, and takes for granted that no two experts have the same key. Ties leave one of the k
// places empty; then, and for what is rare, one warp chooses again.
#pragma once

#include "common/ptx.cuh"
#include "route_topk/columns.cuh"
#include "route_topk/heuristics.h"

namespace jax_hpc::route_topk {

constexpr int kMostThreads = kMostWarpsOfToken * kWarpSize;

// A column of experts is those of one lane in all warps. Candidates are the experts that may be
// among the k best, in any order.
template <int Values>
struct alignas(16) CtaShared {
  uint32_t best_of_columns[kWarpSize];
  uint32_t keys_of_candidates[kWarpSize];
  Chosen candidates[kWarpSize];
  Chosen chosen[kWarpSize];
  int num_candidates;
  uint32_t parts[2][kMostWarpsOfToken];
  Columns<Values * kMostWarpsOfToken> columns;

  // By one warp.
  __device__ __forceinline__ void clear(int lane) {
    best_of_columns[lane] = kNoExpert;
    keys_of_candidates[lane] = kNoExpert;
    chosen[lane].id = -1;
    num_candidates = 0;
  }
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

// Place of a key among others, the largest 1, itself and equal ones counted. Eights of keys.
__device__ __forceinline__ int rank_among(const uint32_t* keys, int eights, uint32_t mine) {
  uint32_t counts[2] = {};
  const auto* fours = reinterpret_cast<const uint4*>(keys);
#pragma unroll 1
  do {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 others = *fours++;
      count_from(counts[0], others.x, -mine);
      count_from(counts[1], others.y, -mine);
      count_from(counts[0], others.z, -mine);
      count_from(counts[1], others.w, -mine);
    }
  } while (--eights > 0);
  return static_cast<int>(counts[0] + counts[1]);
}

// Adds one and returns what was there. From an addition of one, C++ or PTX, the compiler makes
// twenty instructions that count the lanes first; the few lanes that come here may queue instead.
__device__ __forceinline__ int take_place(int& count) {
  int place;
  asm volatile("atom.shared.inc.u32 %0, [%1], 0x7fffffff;"
               : "=r"(place)
               : "r"(shared_address(&count))
               : "memory");
  return place;
}

// The k best are among those from the k-th largest of the columns' best keys on. They are few for
// k up to 16; more than 32 of them, like ties, leave places of shared.chosen empty.
template <int Values>
__device__ __forceinline__ void collect(CtaShared<Values>& shared, const uint32_t (&keys)[Values],
                                        const float (&scores)[Values], int k, const Place& at) {
  uint32_t largest = keys[0];
#pragma unroll
  for (int i = 1; i < Values; ++i) largest = max(largest, keys[i]);
  atomicMax(&shared.best_of_columns[at.lane], largest);
  __syncthreads();
  const uint32_t best = shared.best_of_columns[at.lane];
  const int rank = rank_among(shared.best_of_columns, kWarpSize / 8, best);
  const uint32_t bound = __reduce_min_sync(kWholeWarp, rank <= k ? best : UINT32_MAX);
#pragma unroll
  for (int i = 0; i < Values; ++i) {
    if (keys[i] < bound) continue;
    const int place = take_place(shared.num_candidates);
    if (place >= kWarpSize) continue;
    shared.keys_of_candidates[place] = keys[i];
    shared.candidates[place] = {at.expert(i), scores[i]};
  }
  __syncthreads();
}

// By one warp: candidate to place, best first.
template <int Values>
__device__ __forceinline__ Chosen choose_candidate(CtaShared<Values>& shared, int k, int lane) {
  const int count = shared.num_candidates;
  const uint32_t mine = shared.keys_of_candidates[lane];
  const Chosen candidate = shared.candidates[lane];
  const int rank = rank_among(shared.keys_of_candidates, (min(count, kWarpSize) + 7) >> 3, mine);
  if (count <= kWarpSize && lane < count && rank <= k) shared.chosen[rank - 1] = candidate;
  __syncwarp();
  return shared.chosen[lane];
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
  if (at.warp == 0) shared.clear(at.lane);
  wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; i < Values; ++i) {
    const int expert = at.expert(i);
    logits[i] = expert < p.experts ? row.logits[expert] : -INFINITY;
    bias[i] = has_bias && expert < p.experts ? row.bias[expert] : 0.0f;
  }
  __syncthreads();  // while the loads are under way
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
    collect<Values>(shared, keys, scores, k, at);
    if (at.warp > 0) return;
    const Chosen chosen = choose_candidate<Values>(shared, k, at.lane);
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
