// Choosing from keys in shared memory by a team of threads: groups, experts one by one, weights.
// Its loops stay rolled: a decode step finds the code of a kernel in no cache, so that a small one
// starts sooner.
#pragma once

#include "route_topk/launch.h"
#include "route_topk/score.cuh"
#include "route_topk/team.cuh"

namespace jax_hpc::route_topk {

constexpr float kRenormalizeEps = 1e-20f;

// The arrays at one token.
struct Row {
  const float* logits;
  const float* bias;
  int32_t* ids;
  float* weights;
  float* identity_weight;

  __device__ Row(const Problem& p, const Arrays& a, int token)
      : logits(a.logits + static_cast<int64_t>(token) * p.experts),
        bias(a.bias),
        ids(a.ids + static_cast<int64_t>(token) * p.options.k),
        weights(a.weights + static_cast<int64_t>(token) * p.options.k),
        identity_weight(a.identity_weight + token) {}
};

// Of a row without a finite logit: the first experts, with no weight.
template <class Team>
__device__ __forceinline__ void write_dead_row(Team& team, const Problem& p, const Row& row) {
  const int first_zero = p.experts - p.options.num_zero_experts;
#pragma unroll 1
  for (int i = team.rank(); i < p.options.k; i += Team::kSize) {
    row.ids[i] = i < first_zero ? i : -1;
    row.weights[i] = 0.0f;
  }
  if (team.rank() == 0) *row.identity_weight = 0.0f;
}

// Sets the keys of experts outside the best groups to kOutsideGroups. strengths: room for one float
// a group.
template <class Team>
__device__ void mask_groups(Team& team, const Problem& p, uint32_t* keys, float* strengths) {
  const int groups = p.options.num_groups;
  const int size = p.experts / groups;
  // Threads of a group: a power of two within a warp, so that shuffles join what they found.
  int log_threads = 5;
  while (log_threads > 0 && groups << log_threads > Team::kSize) --log_threads;
  const int threads = 1 << log_threads;
  const int part = team.rank() & (threads - 1);
  const int step = Team::kSize >> log_threads;
#pragma unroll 1
  for (int first = 0; first < groups; first += step) {
    const int group = first + (team.rank() >> log_threads);
    uint32_t best = kNoExpert;
    uint32_t second = kNoExpert;
    if (group < groups) {
#pragma unroll 1
      for (int i = part; i < size; i += threads) {
        const uint32_t key = keys[group * size + i];
        second = max(second, min(best, key));
        best = max(best, key);
      }
    }
#pragma unroll 1
    for (int offset = threads / 2; offset > 0; offset /= 2) {
      const uint32_t other_best = __shfl_xor_sync(kWholeWarp, best, offset);
      const uint32_t other_second = __shfl_xor_sync(kWholeWarp, second, offset);
      second = max(max(second, other_second), min(best, other_best));
      best = max(best, other_best);
    }
    if (group < groups && part == 0) {
      strengths[group] = __fadd_rn(from_ordered(best), from_ordered(second));
    }
  }
  team.sync();
#pragma unroll 1
  for (int group = team.rank() >> log_threads; group < groups; group += step) {
    const float strength = strengths[group];
    int better = 0;
#pragma unroll 1
    for (int other = 0; other < groups; ++other) {
      better += strengths[other] > strength || (strengths[other] == strength && other < group);
    }
    if (better < p.options.topk_groups) continue;
#pragma unroll 1
    for (int i = part; i < size; i += threads) keys[group * size + i] = kOutsideGroups;
  }
  team.sync();
}

// Writes the k best ids and their plain scores, best first. Every turn looks for the best of what
// comes after the expert before it, in the order of keys and then of ids.
template <class Team>
__device__ void choose_one_by_one(Team& team, const Problem& p, const Scorer& scorer,
                                  const uint32_t* keys, const Row& row) {
  uint32_t last_key = UINT32_MAX;
  int last_id = -1;
#pragma unroll 1
  for (int turn = 0; turn < p.options.k; ++turn) {
    uint32_t best = kNoExpert;
    int best_id = INT32_MAX;
#pragma unroll 1
    for (int id = team.rank(); id < p.experts; id += Team::kSize) {
      const uint32_t key = keys[id];
      const bool is_left = key < last_key || (key == last_key && id > last_id);
      if (is_left && key > best) {
        best = key;
        best_id = id;
      }
    }
    last_key = team.max(best);
    last_id =
        static_cast<int>(team.min(best == last_key ? static_cast<uint32_t>(best_id) : UINT32_MAX));
    if (team.rank() == 0) {
      row.ids[turn] = last_id;
      row.weights[turn] = scorer.score(clean_logit(row.logits[last_id]));
    }
  }
}

// From the chosen ids and plain scores in the outputs to the results. One warp does it, so that any
// number of them adds up alike.
template <class Team>
__device__ void finish_written(Team& team, const Problem& p, const Row& row) {
  const Options& o = p.options;
  team.sync();
  const int end = team.rank() < kWarpSize ? o.k : 0;
  float divisor = 1.0f;
  if (o.renormalize) {
    float sum = 0.0f;
#pragma unroll 1
    for (int i = team.rank(); i < end; i += kWarpSize) sum += row.weights[i];
    divisor = team.sum(sum) + kRenormalizeEps;
  }
  float identity = 0.0f;
#pragma unroll 1
  for (int i = team.rank(); i < end; i += kWarpSize) {
    const float weight = __fmul_rn(row.weights[i] / divisor, o.scale);
    if (row.ids[i] < p.experts - o.num_zero_experts) {
      row.weights[i] = weight;
    } else {
      row.ids[i] = -1;
      row.weights[i] = 0.0f;
      identity += weight;
    }
  }
  identity = team.sum(identity);
  if (team.rank() == 0) *row.identity_weight = identity;
}

}  // namespace jax_hpc::route_topk
