// Sorts the (token, choice) pairs by expert: rows of one expert lie together, in the order of their
// pairs. Each warp ranks pairs that follow each other, counting in a row of its own in shared
// memory; sums over the warps and a scan over the experts turn counts into rows.
//
// A step finds this code in no cache: loops are short or rolled, and divisions were done before.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "common/ptx.cuh"
#include "fused_moe/few_pairs.cuh"
#include "fused_moe/launch.h"

namespace jax_hpc::fused_moe {

constexpr int kWords = kMostExperts / 2;  // two counts of 16 bits each
constexpr int kScanWarps = kWords / kWarpSize;
static_assert(kPairsOfOne < 1 << 16 && kPairsOfCluster < 1 << 16 && kPairsOfSegment < 1 << 16);
static_assert(kPairsOfCluster % (kSortingCluster * kWarpSize) == 0);
static_assert(kMostExperts <= 1 << kExpertBits);

// Of a tile, no power of two.
constexpr int kMostUnevenRows = kMostTileRows - 1;

constexpr int sorting_ctas(const Problem& p) {
  if (sorting_of(p) == Sorting::kSegments) return num_segments(p);
  return sorting_of(p) == Sorting::kCluster ? kSortingCluster : 1;
}
// Pairs of each of them. Those of a cluster have whole rounds of a warp, the last ones maybe none.
constexpr int share_of(const Problem& p) {
  if (sorting_of(p) == Sorting::kSegments) return segment_tokens(p) * p.top_k;
  const auto pairs = static_cast<int>(num_pairs(p));
  if (sorting_of(p) == Sorting::kOne) return pairs;
  return blocks_of(pairs, kSortingCluster * kWarpSize) * kWarpSize;
}

// What the kernels of the index need to know, as the host works it out.
struct Plan {
  int pairs;
  int words;  // of counts: half of the experts
  int experts;
  int ctas;
  int pairs_of_cta;
  int rounds;  // pairs of a thread
  int tile_rows;
  uint32_t tile_reciprocal;   // times 2^32, rounded up: exact for kMostPairs rows; a power of two's
  int64_t arrivals;           // of Workspace, to be zeroed
  uint32_t top_k_reciprocal;  // times 2^31, rounded up: exact for kMostPairs pairs, kMostTopK

  Plan(const Problem& p, const Config& config, int threads)
      : pairs(static_cast<int>(num_pairs(p))),
        words(blocks_of(p.experts, 2)),
        experts(p.experts),
        ctas(sorting_ctas(p)),
        pairs_of_cta(share_of(p)),
        rounds(blocks_of(pairs_of_cta, threads)),
        tile_rows(config.tile_rows),
        tile_reciprocal(static_cast<uint32_t>(((int64_t{1} << 32) + tile_rows - 1) / tile_rows)),
        arrivals(p.format == Format::kBlock && !config.is_wide
                     ? max_tiles(p, config) * blocks_of(p.inter, kBlock)
                     : 0),
        top_k_reciprocal(static_cast<uint32_t>(((int64_t{1} << 31) + p.top_k - 1) / p.top_k)) {}

  __device__ int token_of(int pair) const {
    return static_cast<int>((uint64_t{static_cast<uint32_t>(pair)} * top_k_reciprocal) >> 31);
  }
  __device__ int tiles_of(int rows) const {
    return static_cast<int>(__umulhi(static_cast<uint32_t>(rows + tile_rows - 1), tile_reciprocal));
  }
};
static_assert(kMostPairs * kMostTopK <= int64_t{1} << 31);
static_assert((kMostPairs + kMostUnevenRows) * kMostUnevenRows <= int64_t{1} << 32);

__device__ __forceinline__ int warp_index() { return static_cast<int>(threadIdx.x) / kWarpSize; }
__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % kWarpSize; }

// By the CTAs that index.
__device__ __forceinline__ void clear_arrivals(const Plan& plan, const Workspace& to) {
  const int threads = static_cast<int>(blockDim.x);
#pragma unroll 1
  for (int64_t i = static_cast<int>(blockIdx.x) * threads + static_cast<int>(threadIdx.x);
       i < plan.arrivals; i += plan.ctas * threads) {
    to.rows.arrivals[i] = 0;
  }
}

struct Span {
  int rows;
  int tiles;
};
__device__ __forceinline__ Span plus(Span a, Span b) {
  return {a.rows + b.rows, a.tiles + b.tiles};
}

// Tiles of one expert, a share of them by each CTA.
__device__ __forceinline__ void write_tiles(const Plan& plan, const Workspace& to, int expert,
                                            Span first, int rows) {
  const int tiles = plan.tiles_of(rows);
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x); i < tiles; i += plan.ctas) {
    const int begin = i * plan.tile_rows;
    reinterpret_cast<int4*>(to.tiles)[first.tiles + i] =
        int4{expert, first.rows + begin, min(plan.tile_rows, rows - begin), 0};
  }
}

__device__ __forceinline__ void write_pair(const Plan& plan, const Workspace& to, int pair,
                                           int expert, int row) {
  to.pair_row[pair] = expert >= 0 ? row : -1;
  if (expert >= 0) to.row_token[row] = plan.token_of(pair);
}

__device__ __forceinline__ void write_header(const Workspace& to, Span all) {
  *reinterpret_cast<int2*>(to.header) = int2{all.tiles, all.rows};
}

// No more pairs than one warp has lanes, each of which sorts one.
__device__ __forceinline__ void index_few(const Plan& plan, const Arrays& a) {
  const int lane = lane_index();
  const FewOrder few =
      order_few(plan.pairs, plan.experts, plan.tile_rows, a.topk_ids, a.expert_offset, lane);
  if (few.tile >= 0) {
    reinterpret_cast<int4*>(a.workspace.tiles)[few.tile] =
        int4{few.expert, few.row, few.tile_rows, 0};
  }
  if (lane < plan.pairs) write_pair(plan, a.workspace, lane, few.expert, few.row);
  if (lane == 0) write_header(a.workspace, {few.num_rows, few.num_tiles});
}

template <int kWarps>
struct IndexShared {
  uint32_t counts[kWarps][kWords];  // of experts 2i and 2i + 1, then what earlier warps have
  int first_row[kMostExperts];      // of this CTA's pairs
  Span totals[kScanWarps];
};

// Pairs of one thread: one in each round. Expert, -1 where it is none of this call's, times 2^16,
// and the rank among the warp's pairs of that expert: one register.
template <int kRounds>
struct Ranks {
  int packed[kRounds];

  __device__ __forceinline__ void set_expert(int round, int expert) {
    packed[round] = expert * (1 << 16);
  }
  __device__ __forceinline__ void set_rank(int round, int rank) { packed[round] += rank; }
  __device__ __forceinline__ int expert(int round) const { return packed[round] >> 16; }
  __device__ __forceinline__ int rank(int round) const { return packed[round] & 0xffff; }
};

// Pairs of one CTA, which warps share by whole rounds.
struct Segment {
  int rounds;  // of the plan
  int end;
  int first;  // of the thread

  __device__ explicit Segment(const Plan& plan) : rounds(plan.rounds) {
    const int begin = static_cast<int>(blockIdx.x) * plan.pairs_of_cta;
    end = min(begin + plan.pairs_of_cta, plan.pairs);
    first = begin + warp_index() * plan.rounds * kWarpSize + lane_index();
  }
  __device__ int pair(int round) const { return first + round * kWarpSize; }
  // Whether the thread's warp has pairs.
  __device__ bool has(int round) const {
    return round < rounds && pair(round) - lane_index() < end;
  }
};

// Past an L1 that may hold an earlier call's: place_kernel has not waited yet.
template <int kRounds>
__device__ __forceinline__ void read_experts(const Plan& plan, const Arrays& a,
                                             const Segment& segment, Ranks<kRounds>& ranks) {
  const int offset = __ldcg(a.expert_offset);
  int ids[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    ids[round] = 0;
    if (!segment.has(round)) break;
    if (segment.pair(round) < segment.end) ids[round] = __ldcg(a.topk_ids + segment.pair(round));
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    ranks.set_expert(round, -1);
    if (!segment.has(round)) break;
    if (segment.pair(round) < segment.end) {
      ranks.set_expert(round, local_expert(plan.experts, ids[round], offset));
    }
  }
}

// Ranks a warp's pairs and leaves its counts in its row.
template <int kRounds>
__device__ __forceinline__ void rank_pairs(const Plan& plan, const Segment& segment, uint32_t* row,
                                           Ranks<kRounds>& ranks) {
  const int lane = lane_index();
#pragma unroll 2
  for (int i = 0; i < plan.words; i += kWarpSize) row[i + lane] = 0;
  __syncwarp();
  auto* counts = reinterpret_cast<uint16_t*>(row);
  const unsigned below = (1u << lane) - 1;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    if (!segment.has(round)) break;
    const int expert = ranks.expert(round);
    const unsigned same = __match_any_sync(kWholeWarp, expert);
    const int before = expert >= 0 ? counts[expert] : 0;
    __syncwarp();
    ranks.set_rank(round, before + __popc(same & below));
    if (expert >= 0 && (same & below) == 0) {
      counts[expert] = static_cast<uint16_t>(before + __popc(same));
    }
    __syncwarp();
  }
}

// Of one word: the counts of all warps; each warp's is left with the sum over the warps before.
// Warps without a pair have cleared theirs too.
template <int kWarps>
__device__ __forceinline__ uint32_t sum_warps(IndexShared<kWarps>& shared, int word) {
  uint32_t sum = 0;
#pragma unroll 8
  for (int warp = 0; warp < kWarps; ++warp) {
    const uint32_t count = shared.counts[warp][word];
    shared.counts[warp][word] = sum;
    sum += count;
  }
  return sum;
}

// The sum over the threads before, and that over all. Threads beyond kWords have nothing.
struct Scan {
  Span before;
  Span all;
};
__device__ __forceinline__ Scan scan_threads(Span value, Span (&totals)[kScanWarps]) {
  const int warp = warp_index();
  const int lane = lane_index();
  Span sum = value;
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const Span below = {__shfl_up_sync(kWholeWarp, sum.rows, step),
                        __shfl_up_sync(kWholeWarp, sum.tiles, step)};
    if (lane >= step) sum = plus(sum, below);
  }
  if (lane == kWarpSize - 1 && warp < kScanWarps) totals[warp] = sum;
  __syncthreads();
  Scan scan = {{sum.rows - value.rows, sum.tiles - value.tiles}, {0, 0}};
#pragma unroll
  for (int other = 0; other < kScanWarps; ++other) {
    const Span total = totals[other];
    if (other < warp) scan.before = plus(scan.before, total);
    scan.all = plus(scan.all, total);
  }
  return scan;
}

// What one thread knows of its two experts: pairs of all CTAs, and of those before this one.
struct Counts {
  int all[2];
  int before[2];
};

__device__ __forceinline__ Counts unpacked(uint32_t counts) {
  return {{static_cast<int>(counts & 0xffff), static_cast<int>(counts >> 16)}, {0, 0}};
}

// From counts to rows: the whole CTA calls it. Leaves where the CTA's rows of each expert begin in
// shared memory, and writes the tiles.
template <int kWarps>
__device__ __forceinline__ void place_experts(const Plan& plan, const Workspace& to,
                                              IndexShared<kWarps>& shared, const Counts& counts) {
  const int word = static_cast<int>(threadIdx.x);
  const Span sizes[2] = {{counts.all[0], plan.tiles_of(counts.all[0])},
                         {counts.all[1], plan.tiles_of(counts.all[1])}};
  const Scan scan = scan_threads(plus(sizes[0], sizes[1]), shared.totals);
  if (word < plan.words) {
    const Span middle = plus(scan.before, sizes[0]);
    shared.first_row[2 * word] = scan.before.rows + counts.before[0];
    shared.first_row[2 * word + 1] = middle.rows + counts.before[1];
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      write_tiles(plan, to, 2 * word + i, i == 0 ? scan.before : middle,
                  i == 0 ? counts.all[0] : counts.all[1]);
    }
  }
  if (blockIdx.x == 0 && word == 0) write_header(to, scan.all);
  __syncthreads();
}

// Calls visit(pair, expert, row) for the thread's pairs.
template <int kWarps, int kRounds, class Visit>
__device__ __forceinline__ void each_row(const IndexShared<kWarps>& shared, const Segment& segment,
                                         const Ranks<kRounds>& ranks, const Visit& visit) {
  const auto* before = reinterpret_cast<const uint16_t*>(shared.counts[warp_index()]);
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    if (!segment.has(round)) break;
    const int pair = segment.pair(round);
    const int expert = ranks.expert(round);
    const int place = max(expert, 0);
    const int row = shared.first_row[place] + before[place] + ranks.rank(round);
    if (pair < segment.end) visit(pair, expert, row);
  }
}

}  // namespace jax_hpc::fused_moe
