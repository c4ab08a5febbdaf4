// Keys of a token in shared memory, and which groups of them may be chosen from.
#pragma once

#include "route_topk/score.cuh"
#include "route_topk/team.cuh"

namespace jax_hpc::route_topk {

// Where an expert's key lies: rows of 32 in 33 places, so that a warp reads a row or a column of
// them without two lanes at one bank.
__host__ __device__ constexpr int place_of(int expert) { return expert + (expert >> 5); }

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
        const uint32_t key = keys[place_of(group * size + i)];
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
    for (int i = part; i < size; i += threads) keys[place_of(group * size + i)] = kOutsideGroups;
  }
  team.sync();
}

// The same by one warp, as a call: rare code lies beside the path of a kernel, not on it.
__device__ __noinline__ void mask_groups_by_warp(const Problem& p, uint32_t* keys,
                                                 float* strengths) {
  WarpTeam team;
  mask_groups(team, p, keys, strengths);
}

}  // namespace jax_hpc::route_topk
