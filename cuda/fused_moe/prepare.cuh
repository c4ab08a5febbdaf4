// Before the products: the pairs are sorted by expert, and meanwhile x is quantised for experts in
// fp8. Up to kPairsOfCta pairs
// are one CTA's work, within the launch that quantises. More take two launches: one counts the
// pairs of every CTA, the other places them.
#pragma once

#include "common/ptx.cuh"
#include "fused_moe/index.cuh"
#include "fused_moe/launch.h"
#include "fused_moe/quantize.cuh"

namespace jax_hpc::fused_moe {

constexpr int kSmallWarps = kScanWarps;
constexpr int kSmallRounds = 4;
constexpr int kLargeWarps = 32;
constexpr int kLargeRounds = kPairsOfCta / (kLargeWarps * kWarpSize);

// CTA 0 indexes, the others quantise.
template <int kWarps, int kRounds, bool kPerGroup>
__global__ __launch_bounds__(kWarps* kWarpSize) void prepare_kernel(
    const __grid_constant__ Problem p, const __grid_constant__ Plan plan,
    const __grid_constant__ Arrays a) {
  __shared__ IndexShared<kWarps> shared;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (blockIdx.x > 0) {
    quantize<kPerGroup>(p, a, static_cast<int>(blockIdx.x) - 1);
    return;
  }
  clear_arrivals(plan, a.workspace);
  if (plan.pairs <= kWarpSize) {
    if (warp_index() == 0) index_few(plan, a);
    return;
  }
  const Segment segment(plan);
  Ranks<kRounds> ranks;
  read_experts(plan, a, segment, ranks);
  rank_pairs(plan, segment, shared.counts[warp_index()], ranks);
  __syncthreads();
  const int word = static_cast<int>(threadIdx.x);
  Counts counts{};
  if (word < plan.words) counts = unpacked(sum_warps(shared, word));
  place_experts(plan, a.workspace, shared, counts);
  write_rows(plan, a.workspace, shared, segment, ranks);
}

// The first plan.ctas count their pairs, the others quantise.
template <bool kPerGroup>
__global__ __launch_bounds__(kLargeWarps* kWarpSize) void count_kernel(
    const __grid_constant__ Problem p, const __grid_constant__ Plan plan,
    const __grid_constant__ Arrays a) {
  __shared__ uint32_t counts[kWords];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int cta = static_cast<int>(blockIdx.x);
  if (cta >= plan.ctas) {
    quantize<kPerGroup>(p, a, cta - plan.ctas);
    return;
  }
  clear_arrivals(plan, a.workspace);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < plan.words) counts[thread] = 0;
  __syncthreads();
  const int begin = cta * kPairsOfCta;
  const int end = min(begin + kPairsOfCta, plan.pairs);
  const int offset = *a.expert_offset;
  for (int pair = begin + thread; pair < end; pair += kLargeWarps * kWarpSize) {
    const int expert = local_expert(plan, a.topk_ids[pair], offset);
    if (expert >= 0) atomicAdd(&counts[expert / 2], expert % 2 == 0 ? 1u : 1u << 16);
  }
  __syncthreads();
  if (thread < plan.words) {
    a.workspace.counts[int64_t{cta} * plan.words + thread] = counts[thread];
  }
}

// Each CTA places its own pairs, after it has added up the counts of all.
__global__ __launch_bounds__(kLargeWarps* kWarpSize) void place_kernel(
    const __grid_constant__ Plan plan, const __grid_constant__ Arrays a) {
  __shared__ IndexShared<kLargeWarps> shared;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Segment segment(plan);
  Ranks<kLargeRounds> ranks;
  read_experts(plan, a, segment, ranks);
  rank_pairs(plan, segment, shared.counts[warp_index()], ranks);
  __syncthreads();
  const int word = static_cast<int>(threadIdx.x);
  Counts counts{};
  if (word < plan.words) {
    sum_warps(shared, word);
#pragma unroll 8
    for (int cta = 0; cta < plan.ctas; ++cta) {
      const Counts theirs = unpacked(a.workspace.counts[int64_t{cta} * plan.words + word]);
      for (int i = 0; i < 2; ++i) {
        counts.all[i] += theirs.all[i];
        if (cta < static_cast<int>(blockIdx.x)) counts.before[i] += theirs.all[i];
      }
    }
  }
  place_experts(plan, a.workspace, shared, counts);
  write_rows(plan, a.workspace, shared, segment, ranks);
}

}  // namespace jax_hpc::fused_moe
