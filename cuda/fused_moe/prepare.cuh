// Before the products: the pairs are sorted by expert, and meanwhile x is quantised for experts in
// fp8. Few pairs are one CTA's work, more a cluster's, within the launch that quantises. Still more
// take two launches: one counts the pairs of every segment of the tokens, the other places them.
// For the wide products another one puts a row of x to each of its places (sort.cuh).
#pragma once

#include "common/ptx.cuh"
#include "fused_moe/index.cuh"
#include "fused_moe/instructions.cuh"
#include "fused_moe/launch.h"
#include "fused_moe/quantize.cuh"

namespace jax_hpc::fused_moe {

constexpr int kOneWarps = kScanWarps;
constexpr int kOneThreads = kOneWarps * kWarpSize;
constexpr int kOneRounds = ceil_div(kPairsOfOne, kOneThreads);
constexpr int kClusterWarps = 16;
constexpr int kClusterThreads = kClusterWarps * kWarpSize;
constexpr int kClusterRounds = kPairsOfCluster / (kSortingCluster * kClusterThreads);
constexpr int kClusterCtasOfSm = 4;  // most of the CTAs quantise, and then find room at once
constexpr int kCountThreads = 256;
constexpr int kPlaceWarps = 16;
constexpr int kPlaceThreads = kPlaceWarps * kWarpSize;
constexpr int kPlaceRounds = kPairsOfSegment / kPlaceThreads;
static_assert(kWords <= kClusterThreads && kWords <= kCountThreads && kWords <= kPlaceThreads);

// How every kernel that sorts begins: `shared` has each warp's counts then.
template <int kWarps, int kRounds>
__device__ __forceinline__ void rank_segment(const Plan& plan, const Arrays& a,
                                             const Segment& segment, IndexShared<kWarps>& shared,
                                             Ranks<kRounds>& ranks) {
  read_experts(plan, a, segment, ranks);
  rank_pairs(plan, segment, shared.counts[warp_index()], ranks);
  __syncthreads();
}

// And how it ends. `counts`: of the thread's word, if it has one.
template <int kWarps, int kRounds>
__device__ __forceinline__ void place_segment(const Plan& plan, const Arrays& a,
                                              const Segment& segment, const Counts& counts,
                                              IndexShared<kWarps>& shared,
                                              const Ranks<kRounds>& ranks) {
  place_experts(plan, a.workspace, shared, counts);
  each_row(shared, segment, ranks, [&](int pair, int expert, int row) {
    write_pair(plan, a.workspace, pair, expert, row);
  });
}

// CTA 0 indexes, the others quantise.
template <bool kPerGroup>
__global__ __launch_bounds__(kOneThreads) void prepare_kernel(const __grid_constant__ Problem p,
                                                              const __grid_constant__ Plan plan,
                                                              const __grid_constant__ Arrays a) {
  __shared__ IndexShared<kOneWarps> shared;
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
  Ranks<kOneRounds> ranks;
  rank_segment(plan, a, segment, shared, ranks);
  const int word = static_cast<int>(threadIdx.x);
  Counts counts{};
  if (word < plan.words) counts = unpacked(sum_warps(shared, word));
  place_segment(plan, a, segment, counts, shared, ranks);
}

// What the CTAs of a cluster send each other, and the barrier that their bytes count on.
struct ClusterCounts {
  uint32_t of_cta[kSortingCluster][kWords];
  uint64_t arrived;
};

// Of one word: to all CTAs of the cluster, this one among them.
__device__ __forceinline__ void send_counts(const ClusterCounts& counts, int word,
                                            uint32_t counted) {
  const SharedAddress place = shared_address(&counts.of_cta[blockIdx.x][word]);
  const SharedAddress arrived = shared_address(&counts.arrived);
#pragma unroll 2
  for (int cta = 0; cta < kSortingCluster; ++cta) {
    send_word(address_in_cluster(place, cta), counted, address_in_cluster(arrived, cta));
  }
}

// Of one word, once all have come. Sums of two experts at once: none has as many pairs as 2^16.
__device__ __forceinline__ Counts receive_counts(const ClusterCounts& counts, int word) {
  wait_for_cluster(shared_address(&counts.arrived), 0);
  uint32_t all = 0;
  uint32_t before = 0;
#pragma unroll
  for (int cta = 0; cta < kSortingCluster; ++cta) {
    const uint32_t theirs = counts.of_cta[cta][word];
    all += theirs;
    if (cta < static_cast<int>(blockIdx.x)) before += theirs;
  }
  Counts sum = unpacked(all);
  const Counts sum_before = unpacked(before);
  sum.before[0] = sum_before.all[0];
  sum.before[1] = sum_before.all[1];
  return sum;
}

// The first cluster sorts, the others quantise. Counts go from one CTA's shared memory to the
// others', so that no launch lies between counting and placing; a barrier of the cluster that
// releases them would wait for all stores under way (common/ptx.cuh).
template <bool kPerGroup>
__global__ __launch_bounds__(kClusterThreads, kClusterCtasOfSm) void prepare_cluster_kernel(
    const __grid_constant__ Problem p, const __grid_constant__ Plan plan,
    const __grid_constant__ Arrays a) {
  __shared__ IndexShared<kClusterWarps> shared;
  __shared__ ClusterCounts counts;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (blockIdx.x >= kSortingCluster) {
    quantize<kPerGroup>(p, a, static_cast<int>(blockIdx.x) - kSortingCluster);
    return;
  }
  if (threadIdx.x == 0) {
    const SharedAddress arrived = shared_address(&counts.arrived);
    init_barrier(arrived, 1);
    arrive_expecting(arrived, static_cast<uint32_t>(kSortingCluster * plan.words * 4));
    fence_barrier_init();
  }
  __syncwarp();
  cluster_arrive_relaxed();
  const Segment segment(plan);
  Ranks<kClusterRounds> ranks;
  rank_segment(plan, a, segment, shared, ranks);
  cluster_wait();
  const int word = static_cast<int>(threadIdx.x);
  if (word < plan.words) send_counts(counts, word, sum_warps(shared, word));
  clear_arrivals(plan, a.workspace);
  Counts counted{};
  if (word < plan.words) counted = receive_counts(counts, word);
  place_segment(plan, a, segment, counted, shared, ranks);
}

// The first plan.ctas count their pairs, the others quantise.
template <bool kPerGroup>
__global__ __launch_bounds__(kCountThreads) void count_kernel(const __grid_constant__ Problem p,
                                                              const __grid_constant__ Plan plan,
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
  const int begin = cta * plan.pairs_of_cta;
  const int end = min(begin + plan.pairs_of_cta, plan.pairs);
  const int offset = *a.expert_offset;
  for (int pair = begin + thread; pair < end; pair += kCountThreads) {
    const int expert = local_expert(plan.experts, a.topk_ids[pair], offset);
    if (expert >= 0) atomicAdd(&counts[expert / 2], expert % 2 == 0 ? 1u : 1u << 16);
  }
  __syncthreads();
  if (thread < plan.words) {
    a.workspace.counts[int64_t{cta} * plan.words + thread] = counts[thread];
  }
}

// Pairs of each expert, in all segments and in those before the CTA's.
struct SegmentSums {
  int all[kMostExperts];
  int before[kMostExperts];
};

// By the whole CTA: as many threads as there is room for share a word.
__device__ __forceinline__ void sum_segments(const Plan& plan, const uint32_t* counts,
                                             SegmentSums& sums) {
  const int thread = static_cast<int>(threadIdx.x);
  const int sharing = kPlaceThreads / plan.words;
  const int share = thread / plan.words;
  const int word = thread - share * plan.words;
  if (share >= sharing) return;
  Counts counted{};
#pragma unroll 8
  for (int cta = share; cta < plan.ctas; cta += sharing) {
    const Counts theirs = unpacked(__ldcg(counts + int64_t{cta} * plan.words + word));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      counted.all[i] += theirs.all[i];
      if (cta < static_cast<int>(blockIdx.x)) counted.before[i] += theirs.all[i];
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    atomicAdd(&sums.all[2 * word + i], counted.all[i]);
    atomicAdd(&sums.before[2 * word + i], counted.before[i]);
  }
}

// Each CTA places the pairs of its segment, after it has added up the counts of all. What the call
// is given was there before the last kernel, and is read before the wait for it.
__global__ __launch_bounds__(kPlaceThreads) void place_kernel(const __grid_constant__ Plan plan,
                                                              const __grid_constant__ Arrays a) {
  __shared__ IndexShared<kPlaceWarps> shared;
  __shared__ SegmentSums sums;
  const int word = static_cast<int>(threadIdx.x);
  for (int i = word; i < kMostExperts; i += kPlaceThreads) sums.all[i] = sums.before[i] = 0;
  const Segment segment(plan);
  Ranks<kPlaceRounds> ranks;
  rank_segment(plan, a, segment, shared, ranks);
  wait_for_previous_kernel();
  let_next_kernel_start();
  sum_segments(plan, a.workspace.counts, sums);
  __syncthreads();
  Counts counts{};
  if (word < plan.words) {
    sum_warps(shared, word);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      counts.all[i] = sums.all[2 * word + i];
      counts.before[i] = sums.before[2 * word + i];
    }
  }
  place_segment(plan, a, segment, counts, shared, ranks);
}

}  // namespace jax_hpc::fused_moe
