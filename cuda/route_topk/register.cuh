// The choice of experts in registers, by one warp or a few, made for the latency of a decode step.
#pragma once

#include <type_traits>

#include "common/ptx.cuh"
#include "route_topk/heuristics.h"
#include "route_topk/select.cuh"

namespace jax_hpc::route_topk {

// Values of a token's threads. Value i of a thread belongs to expert i * kThreads + thread: loads
// of a warp are whole lines for any number of experts, and a lane's experts are the same ones
// however many warps share them.
template <int Values, int Warps>
struct RegisterShape {
  static constexpr int kThreads = Warps * kWarpSize;
  static constexpr int kMostExperts = Values * kThreads;
  static constexpr int kTokens = Warps == 1 ? kMostTokensOfCta : 1;  // most in a CTA
  using Team = std::conditional_t<Warps == 1, WarpTeam, CtaTeam<Warps>>;
  // Whether a row of this size may also be taken by several warps: the sums must be the same ones.
  static constexpr bool kIsOneOfTwo = Warps == 1 && Values > 8;
};

template <int Values, int Warps>
__device__ __forceinline__ void load(float (&values)[Values], const float* from, int experts,
                                     int thread, float otherwise) {
  constexpr int kThreads = RegisterShape<Values, Warps>::kThreads;
  from += thread;
#pragma unroll
  for (int i = 0; i < Values; ++i) {
    values[i] = i * kThreads + thread < experts ? from[i * kThreads] : otherwise;
  }
}

struct Chosen {
  int id;
  float score;
};

// Room of one token in shared memory. An entry of `candidates` is an expert in the order of the
// choice: its key, and below it the complement of its id, so that ties go to the lower id. What is
// no candidate goes to places of the threads' own after them.
template <int Values, int Warps>
struct alignas(16) RegisterShared {
  using Shape = RegisterShape<Values, Warps>;
  uint64_t candidates[kWarpSize + Shape::kThreads];
  float scores[kWarpSize + Shape::kThreads];
  uint32_t largest[Warps][kWarpSize];
  Chosen chosen[kWarpSize];
  uint32_t keys[Shape::kMostExperts];
  float strengths[Shape::kMostExperts / 2];
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

template <int Values>
__device__ __forceinline__ int count_from(const uint32_t (&keys)[Values], uint32_t bound) {
  int count = 0;
#pragma unroll
  for (int i = 0; i < Values; ++i) {
    count += __popc(__ballot_sync(kWholeWarp, keys[i] >= bound));
  }
  return count;
}

// Puts the experts from the bound on side by side, this warp's from place `next` on; those beyond
// the lanes are left out. Every value is stored somewhere, or the compiler makes a branch of each.
template <int Values, int Warps>
__device__ __forceinline__ void collect(RegisterShared<Values, Warps>& shared,
                                        const uint32_t (&keys)[Values],
                                        const float (&scores)[Values], uint32_t bound, int next,
                                        int thread) {
  const uint32_t lanes_below = (1u << thread % kWarpSize) - 1;
#pragma unroll
  for (int i = 0; i < Values; ++i) {
    const bool is_candidate = keys[i] >= bound;
    const uint32_t found = __ballot_sync(kWholeWarp, is_candidate);
    const int mine = next + __popc(found & lanes_below);
    const int place = is_candidate && mine < kWarpSize ? mine : kWarpSize + thread;
    const auto id = static_cast<uint32_t>(i * RegisterShape<Values, Warps>::kThreads + thread);
    shared.candidates[place] = uint64_t{keys[i]} << 32 | ~id;
    shared.scores[place] = scores[i];
    next += __popc(found);
  }
}

// Sum of the lanes that are below a power of two, in each of them.
__device__ __forceinline__ float sum_below(float value, int lanes) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    if (offset < lanes) value += __shfl_xor_sync(kWholeWarp, value, offset);
  }
  return value;
}

// Results of a token from its chosen experts, one a lane, best first.
__device__ __forceinline__ void finish_lanes(const Problem& p, const Row& row, int lane,
                                             Chosen chosen) {
  const Options& o = p.options;
  const bool is_chosen = lane < o.k;
  float weight = is_chosen ? chosen.score : 0.0f;
  if (o.renormalize) weight = weight / (sum_below(weight, o.k) + kRenormalizeEps);
  weight = __fmul_rn(weight, o.scale);
  float identity = 0.0f;
  if (o.num_zero_experts > 0) {
    const bool is_zero = is_chosen && chosen.id >= p.experts - o.num_zero_experts;
    identity = sum_below(is_zero ? weight : 0.0f, o.k);
    if (is_zero) weight = 0.0f;
    if (is_zero) chosen.id = -1;
  }
  if (is_chosen) {
    row.ids[lane] = chosen.id;
    row.weights[lane] = weight;
  }
  if (lane == 0) *row.identity_weight = identity;
}

// Logits to scores in place. The sum of an instance of one warp is added up as one of several warps
// adds it.
template <int Values, int Warps, class Team>
__device__ __forceinline__ void score_all(Team& team, Scorer& scorer, float (&values)[Values]) {
  if (scorer.scoring == Scoring::kSigmoid) {
#pragma unroll
    for (int i = 0; i < Values; ++i) values[i] = Scorer::sigmoid(values[i]);
    return;
  }
  constexpr int kParts = RegisterShape<Values, Warps>::kIsOneOfTwo ? kWarpsOfToken : 1;
  float parts[kParts] = {};
#pragma unroll
  for (int i = 0; i < Values; ++i) {
    values[i] = scorer.exponential(values[i]);
    parts[i % kParts] = __fadd_rn(parts[i % kParts], values[i]);
  }
  float sum = team.sum(parts[0]);
#pragma unroll
  for (int i = 1; i < kParts; ++i) sum += team.sum(parts[i]);
  scorer.inverse_sum = reciprocal(sum);
#pragma unroll
  for (int i = 0; i < Values; ++i) values[i] = scorer.softmax(values[i]);
}

// The k best of a token's experts are among those that reach the k-th largest of the lanes' own
// largest keys. For k up to 16 they are few enough for one a lane, where each counts the ones
// before it; else the experts are chosen one by one.
template <int Values, int Warps>
__device__ void choose_in_registers(typename RegisterShape<Values, Warps>::Team team,
                                    RegisterShared<Values, Warps>& shared, const Problem& p,
                                    const Row& row) {
  constexpr int kThreads = RegisterShape<Values, Warps>::kThreads;
  const int thread = team.rank();
  const int lane = thread % kWarpSize;
  const int warp = thread / kWarpSize;
  float scores[Values];  // logits at first
  load<Values, Warps>(scores, row.logits, p.experts, thread, -INFINITY);
  // Without a branch, or the compiler waits for the logits before it asks for the bias.
  float bias[Values];
  const bool has_bias = row.bias != nullptr;
  load<Values, Warps>(bias, has_bias ? row.bias : row.logits, has_bias ? p.experts : 0, thread,
                      0.0f);
  if (warp == 0) shared.candidates[lane] = 0;

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
  score_all<Values, Warps>(team, scorer, scores);

  uint32_t keys[Values];
#pragma unroll
  for (int i = 0; i < Values; ++i) {
    const bool exists = i * kThreads + thread < p.experts;
    keys[i] = exists ? selection_key(scores[i], bias[i]) : kNoExpert;
  }
  const auto share_keys = [&] {
#pragma unroll
    for (int i = 0; i < Values; ++i) shared.keys[i * kThreads + thread] = keys[i];
    team.sync();
  };
  if (p.options.topk_groups < p.options.num_groups) {
    share_keys();
    mask_groups(team, p, shared.keys, shared.strengths);
#pragma unroll
    for (int i = 0; i < Values; ++i) keys[i] = shared.keys[i * kThreads + thread];
  }

  uint32_t largest = kNoExpert;
#pragma unroll
  for (int i = 0; i < Values; ++i) largest = max(largest, keys[i]);
  largest = team.max_of_warps(largest);
  shared.largest[warp][lane] = largest;
  __syncwarp();
  const uint32_t bound = lower_bound(shared.largest[warp], largest, p.options.k);
  const Count count = team.count(count_from(keys, bound));
  if (count.all > kWarpSize || p.options.k > kWarpSize) {
    share_keys();
    choose_one_by_one(team, p, scorer, shared.keys, row);
    finish_written(team, p, row);
    return;
  }
  collect(shared, keys, scores, bound, count.before, thread);
  team.sync();
  if (warp > 0) return;
  const uint64_t mine = shared.candidates[lane];
  const int rank = rank_of(shared.candidates, count.all, mine);
  const Chosen chosen{static_cast<int>(~static_cast<uint32_t>(mine)), shared.scores[lane]};
  if (lane < count.all && rank < p.options.k) shared.chosen[rank] = chosen;
  __syncwarp();
  finish_lanes(p, row, lane, shared.chosen[lane]);
}

// One warp a token, or one CTA of several warps.
template <int Values, int Warps>
__global__ void __launch_bounds__(kMostTokensOfCta* kWarpSize, Values <= 16 ? 8 : 4)
    topk_register_kernel(Problem p, Arrays arrays) {
  using Shape = RegisterShape<Values, Warps>;
  __shared__ RegisterShared<Values, Warps> room[Shape::kTokens];
  wait_for_previous_kernel();
  if constexpr (Warps == 1) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int token = static_cast<int>(blockIdx.x * (blockDim.x / kWarpSize)) + warp;
    if (token >= p.tokens) return;
    choose_in_registers<Values, 1>(WarpTeam{}, room[warp], p, Row(p, arrays, token));
  } else {
    __shared__ typename Shape::Team::Shared exchange;
    choose_in_registers<Values, Warps>(CtaTeam<Warps>(exchange), room[0], p,
                                       Row(p, arrays, static_cast<int>(blockIdx.x)));
  }
}

}  // namespace jax_hpc::route_topk
