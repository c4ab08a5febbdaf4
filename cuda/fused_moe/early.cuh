// Weights that come to the L2 cache while prepare still runs.
#pragma once

#include "common/launch.h"
#include "fused_moe/grouped.cuh"

namespace jax_hpc::fused_moe {

// Of an SM, what the memory gives in 3 us: 1 to 2 us of a call with 8 to 256 tokens. Twice as much
// is in the way of prepare, and gains less.
constexpr int kEarlyBytes = 96 * 1024;

__device__ __forceinline__ void prefetch_weights(const CUtensorMap* map, int x, int group,
                                                 int expert) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %2, %3, %4}];" ::"l"(map),
      "r"(x), "r"(0), "r"(group), "r"(expert)
      : "memory");
}

// Asks for gate-up's weights, before the index is there: of an expert that some token has chosen,
// the first of this rank's in 32 pairs, of each of its `parts` by another CTA. By one warp.
// `groups` lie between parts.
template <int CtasOfSm, int TurnBytes>
__device__ __forceinline__ void ask_early(const Problem& p, const Index& index, int turns,
                                          int parts, int groups, const CUtensorMap* map, int lane) {
  const auto cta = static_cast<int>(blockIdx.x);
  const int unit = cta / parts;
  const int units = ceil_div(static_cast<int>(gridDim.x), parts);
  const int64_t pair = unit * num_pairs(p) / units + lane;
  const int offset = __ldcg(index.expert_offset);
  const int own =
      pair < num_pairs(p) ? local_expert(p.experts, __ldcg(index.topk_ids + pair), offset) : -1;
  const unsigned here = __ballot_sync(kWholeWarp, own >= 0);
  if (here == 0) return;
  const int expert = __shfl_sync(kWholeWarp, own, __ffs(static_cast<int>(here)) - 1);
  if (!elect_one()) return;
  const int count = min(turns, kEarlyBytes / (CtasOfSm * TurnBytes));
#pragma unroll 1
  for (int turn = 0; turn < count; ++turn) {
    prefetch_weights(map, turn * kStageRow, (cta - unit * parts) * groups, expert);
  }
}

}  // namespace jax_hpc::fused_moe
