// The choice of experts in the registers of one warp, made for the latency of a decode step.
#pragma once

#include "common/ptx.cuh"
#include "route_topk/heuristics.h"
#include "route_topk/select.cuh"

namespace jax_hpc::route_topk {

// Value i of a lane belongs to this expert; within a lane ids rise with i.
template <int Width>
__device__ __forceinline__ int expert_of(int i, int lane) {
  return i / Width * (kWarpSize * Width) + lane * Width + i % Width;
}

template <int Values, int Width>
__device__ __forceinline__ void load(float (&values)[Values], const float* from, int experts,
                                     int lane, float otherwise) {
  from += lane * Width;
#pragma unroll
  for (int i = 0; i < Values; i += Width) {
    const bool exists = expert_of<Width>(i, lane) < experts;
    const float* place = from + i * kWarpSize;
    if constexpr (Width == 4) {
      float4 v = {otherwise, otherwise, otherwise, otherwise};
      if (exists) v = *reinterpret_cast<const float4*>(place);
      values[i] = v.x;
      values[i + 1] = v.y;
      values[i + 2] = v.z;
      values[i + 3] = v.w;
    } else {
      values[i] = exists ? *place : otherwise;
    }
  }
}

// Room of one warp in shared memory. An entry of `candidates` is an expert in the order of the
// choice: its key, and below it the complement of its id, so that ties go to the lower id. What is
// no candidate goes to places of the lanes' own after them.
template <int Values>
struct alignas(16) WarpShared {
  uint64_t candidates[2 * kWarpSize];
  float scores[2 * kWarpSize];
  uint32_t largest[kWarpSize];
  uint32_t keys[kWarpSize * Values];
  float strengths[kWarpSize * Values / 2];
};

// Adds one to the count where other > mine, that is where other + ~mine carries.
__device__ __forceinline__ void count_above(uint32_t& count, uint32_t other, uint32_t not_mine) {
  asm("{\n"
      ".reg .b32 sum;\n"
      "add.cc.u32 sum, %1, %2;\n"
      "addc.u32 %0, %0, 0;\n"
      "}"
      : "+r"(count)
      : "r"(other), "r"(not_mine));
}
__device__ __forceinline__ void count_above(uint32_t& count, uint64_t other, uint64_t not_mine) {
  asm("{\n"
      ".reg .b32 sum, low, high, not_low, not_high;\n"
      "mov.b64 {low, high}, %1;\n"
      "mov.b64 {not_low, not_high}, %2;\n"
      "add.cc.u32 sum, low, not_low;\n"
      "addc.cc.u32 sum, high, not_high;\n"
      "addc.u32 %0, %0, 0;\n"
      "}"
      : "+r"(count)
      : "l"(other), "l"(not_mine));
}

// The k-th largest of the lanes' largest keys: at least k experts are there or above.
__device__ __forceinline__ uint32_t lower_bound(const uint32_t* largest, uint32_t mine, int k) {
  uint32_t above[4] = {};
#pragma unroll
  for (int i = 0; i < kWarpSize; i += 4) {
    const uint4 others = *reinterpret_cast<const uint4*>(largest + i);
    count_above(above[0], others.x, ~mine);
    count_above(above[1], others.y, ~mine);
    count_above(above[2], others.z, ~mine);
    count_above(above[3], others.w, ~mine);
  }
  const auto rank = static_cast<int>(above[0] + above[1] + above[2] + above[3]);
  return max(kOutsideGroups, __reduce_min_sync(kWholeWarp, rank < k ? mine : UINT32_MAX));
}

// How many of the candidates come before mine; entries beyond the count are zero.
__device__ __forceinline__ int rank_of(const uint64_t* candidates, int count, uint64_t mine) {
  uint32_t before[4] = {};
#pragma unroll 1
  for (int i = 0; i < count; i += 8) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const auto pair = *reinterpret_cast<const ulonglong2*>(candidates + i + j);
      count_above(before[j % 4], uint64_t{pair.x}, ~mine);
      count_above(before[j % 4 + 1], uint64_t{pair.y}, ~mine);
    }
  }
  return static_cast<int>(before[0] + before[1] + before[2] + before[3]);
}

// Puts the experts from the bound on side by side, one a lane, and returns how many there are;
// those beyond the lanes are left out. Every value is stored somewhere, or the compiler makes a
// branch of each.
template <int Values, int Width>
__device__ __forceinline__ int collect(WarpShared<Values>& shared, const uint32_t (&keys)[Values],
                                       const float (&scores)[Values], uint32_t bound, int lane) {
  const uint32_t lanes_below = (1u << lane) - 1;
  int count = 0;
#pragma unroll
  for (int i = 0; i < Values; ++i) {
    const bool is_candidate = keys[i] >= bound;
    const uint32_t found = __ballot_sync(kWholeWarp, is_candidate);
    const int next = count + __popc(found & lanes_below);
    const int place = is_candidate && next < kWarpSize ? next : kWarpSize + lane;
    const auto id = static_cast<uint32_t>(expert_of<Width>(i, lane));
    shared.candidates[place] = uint64_t{keys[i]} << 32 | ~id;
    shared.scores[place] = scores[i];
    count += __popc(found);
  }
  return count;
}

// Results of a token whose chosen experts lie one a lane.
__device__ __forceinline__ void finish_lanes(const Problem& p, const Row& row, int lane,
                                             bool is_chosen, int rank, int id, float score) {
  const Options& o = p.options;
  float weight = is_chosen ? score : 0.0f;
  if (o.renormalize) weight = weight / (warp_sum(weight) + kRenormalizeEps);
  weight *= o.scale;
  float identity = 0.0f;
  if (o.num_zero_experts > 0) {
    const bool is_zero = id >= p.experts - o.num_zero_experts;
    identity = warp_sum(is_zero ? weight : 0.0f);
    if (is_zero) weight = 0.0f;
    if (is_zero) id = -1;
  }
  if (is_chosen) {
    row.ids[rank] = id;
    row.weights[rank] = weight;
  }
  if (lane == 0) *row.identity_weight = identity;
}

// Each warp takes one token. The k best of its experts are among those that reach the k-th largest
// of the lanes' own largest keys. For k up to 16 they are few enough for one a lane, where each
// counts the ones before it; else the experts are chosen one by one.
template <int Values, int Width>
__global__ void __launch_bounds__(kMostTokensOfCta* kWarpSize, Values <= 16 ? 8 : 4)
    topk_warp_kernel(Problem p, Arrays arrays) {
  __shared__ WarpShared<Values> room[kMostTokensOfCta];
  wait_for_previous_kernel();
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int token = static_cast<int>(blockIdx.x * (blockDim.x / kWarpSize)) + warp;
  if (token >= p.tokens) return;
  const Row row(p, arrays, token);
  WarpShared<Values>& shared = room[warp];
  WarpTeam team;

  float scores[Values];  // logits at first
  load<Values, Width>(scores, row.logits, p.experts, lane, -INFINITY);
  // Without a branch, or the compiler waits for the logits before it asks for the bias.
  float bias[Values];
  const bool has_bias = row.bias != nullptr;
  load<Values, Width>(bias, has_bias ? row.bias : row.logits, has_bias ? p.experts : 0, lane, 0.0f);
  shared.candidates[lane] = 0;

  Scorer scorer{p.options.scoring, -INFINITY, 0.0f};
#pragma unroll
  for (int i = 0; i < Values; ++i) {
    scores[i] = clean_logit(scores[i]);
    scorer.largest = fmaxf(scorer.largest, scores[i]);
  }
  scorer.largest = from_ordered(team.max(to_ordered(scorer.largest)));
  if (scorer.largest == -INFINITY) {
    write_dead_row(team, p, row);
    return;
  }
  if (scorer.scoring == Scoring::kSoftmax) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Values; ++i) sum += scores[i] = scorer.exponential(scores[i]);
    scorer.inverse_sum = reciprocal(warp_sum(sum));
#pragma unroll
    for (int i = 0; i < Values; ++i) scores[i] = scorer.softmax(scores[i]);
  } else {
#pragma unroll
    for (int i = 0; i < Values; ++i) scores[i] = Scorer::sigmoid(scores[i]);
  }

  uint32_t keys[Values];
#pragma unroll
  for (int i = 0; i < Values; ++i) {
    const bool exists = expert_of<Width>(i, lane) < p.experts;
    keys[i] = exists ? selection_key(scores[i], bias[i]) : kNoExpert;
  }
  const auto share_keys = [&] {
#pragma unroll
    for (int i = 0; i < Values; ++i) shared.keys[expert_of<Width>(i, lane)] = keys[i];
    __syncwarp();
  };
  if (p.options.topk_groups < p.options.num_groups) {
    share_keys();
    mask_groups(team, p, shared.keys, shared.strengths);
#pragma unroll
    for (int i = 0; i < Values; ++i) keys[i] = shared.keys[expert_of<Width>(i, lane)];
  }

  uint32_t largest = kNoExpert;
#pragma unroll
  for (int i = 0; i < Values; ++i) largest = max(largest, keys[i]);
  shared.largest[lane] = largest;
  __syncwarp();
  const uint32_t bound = lower_bound(shared.largest, largest, p.options.k);
  const int count = collect<Values, Width>(shared, keys, scores, bound, lane);
  if (count > kWarpSize || p.options.k > kWarpSize) {
    share_keys();
    choose_one_by_one(team, p, scorer, shared.keys, row);
    finish_written(team, p, row);
    return;
  }
  __syncwarp();
  const uint64_t mine = shared.candidates[lane];
  const int rank = rank_of(shared.candidates, count, mine);
  const bool is_chosen = lane < count && rank < p.options.k;
  const int id = static_cast<int>(~static_cast<uint32_t>(mine));
  finish_lanes(p, row, lane, is_chosen, rank, id, shared.scores[lane]);
}

}  // namespace jax_hpc::route_topk
