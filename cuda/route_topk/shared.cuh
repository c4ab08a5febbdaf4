// The choice of experts in shared memory by one CTA a token, for more experts than the other
// kernels have room for.
#pragma once

#include "common/ptx.cuh"
#include "route_topk/groups.cuh"
#include "route_topk/results.cuh"

namespace jax_hpc::route_topk {

constexpr int kSharedWarps = 8;

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
      const uint32_t key = keys[place_of(id)];
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
      row.weights[turn] = scorer.score(row.logits[last_id]);
    }
  }
}

// Dynamic shared memory: the places of the keys, then a float for each group.
__global__ void __launch_bounds__(kSharedWarps* kWarpSize)
    topk_shared_kernel(Problem p, Arrays arrays) {
  extern __shared__ uint32_t keys[];
  using Team = CtaTeam<kSharedWarps>;
  __shared__ Team::Shared exchange;
  wait_for_previous_kernel();
  Team team(exchange);
  const Row row(p, arrays, static_cast<int>(blockIdx.x));

  Scorer scorer{p.options.scoring, -INFINITY, 0.0f};
  for (int i = team.rank(); i < p.experts; i += Team::kSize) {
    scorer.largest = fmaxf(scorer.largest, row.logits[i]);
  }
  scorer.largest = from_ordered(team.max(to_ordered(fminf(scorer.largest, FLT_MAX))));
  if (scorer.largest == -INFINITY) {
    write_dead_row(team, p, row);
    return;
  }
  if (scorer.scoring == Scoring::kSoftmax) {
    float sum = 0.0f;
    for (int i = team.rank(); i < p.experts; i += Team::kSize) {
      sum = __fadd_rn(sum, scorer.exponential(row.logits[i]));
    }
    scorer.inverse_sum = reciprocal(team.sum(sum));
  }
  for (int i = team.rank(); i < p.experts; i += Team::kSize) {
    const float bias = row.bias == nullptr ? 0.0f : row.bias[i];
    keys[place_of(i)] = selection_key(scorer.score(row.logits[i]), bias);
  }
  team.sync();
  if (p.options.topk_groups < p.options.num_groups) {
    mask_groups(team, p, keys, reinterpret_cast<float*>(keys + place_of(p.experts)));
  }
  choose_one_by_one(team, p, scorer, keys, row);
  finish_written(team, p, row);
}

}  // namespace jax_hpc::route_topk
