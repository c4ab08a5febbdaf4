// The choice of experts in shared memory by one CTA a token, for more experts than registers hold.
#pragma once

#include "common/ptx.cuh"
#include "route_topk/select.cuh"

namespace jax_hpc::route_topk {

constexpr int kSharedWarps = 8;

// Dynamic shared memory: a key for each expert, then a float for each group.
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
    scorer.largest = fmaxf(scorer.largest, clean_logit(row.logits[i]));
  }
  scorer.largest = from_ordered(team.max(to_ordered(scorer.largest)));
  if (scorer.largest == -INFINITY) {
    write_dead_row(team, p, row);
    return;
  }
  if (scorer.scoring == Scoring::kSoftmax) {
    float sum = 0.0f;
    for (int i = team.rank(); i < p.experts; i += Team::kSize) {
      sum = __fadd_rn(sum, scorer.exponential(clean_logit(row.logits[i])));
    }
    scorer.inverse_sum = reciprocal(team.sum(sum));
  }
  for (int i = team.rank(); i < p.experts; i += Team::kSize) {
    const float bias = row.bias == nullptr ? 0.0f : row.bias[i];
    keys[i] = selection_key(scorer.score(clean_logit(row.logits[i])), bias);
  }
  team.sync();
  if (p.options.topk_groups < p.options.num_groups) {
    mask_groups(team, p, keys, reinterpret_cast<float*>(keys + p.experts));
  }
  choose_one_by_one(team, p, scorer, keys, row);
  finish_written(team, p, row);
}

}  // namespace jax_hpc::route_topk
