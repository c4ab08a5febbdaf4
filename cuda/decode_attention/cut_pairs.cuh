// The cut pairs that the merge goes through, and which of them are heavy.
#pragma once

#include "decode_attention/arguments.cuh"
#include "decode_attention/tasks.cuh"

namespace jax_hpc::decode_attention {

constexpr int kCombineWarps = 8;
constexpr int kCombineThreads = kCombineWarps * kWarpSize;
constexpr int kPiecesAtOnce = 6;
// A row of more pieces than a warp reads at once takes all warps of a CTA, or of several CTAs that
// share out its columns. A cut pair has one CTA's span for each piece but the first, so there are
// at most a sixth as many of them.
constexpr int kMostSearched = 4096;
constexpr int kMostHeavy = kMostSearched / kPiecesAtOnce + 1;

// Cut pairs by index: of a schedule, the CTAs that start one; of splits, all pairs.
struct CutPair {
  int pair;
  int pieces;  // fewer than two: nothing to merge
  int first_slot;
  int step;  // from one slot to the next, from the second on; the second is beside the first

  __device__ int slot(int piece) const { return first_slot + max(piece * step - step + 1, 0); }
};

template <bool kBySchedule>
__device__ __forceinline__ int candidates(const Arguments& a) {
  return kBySchedule ? a.cut.num_ctas : a.problem.batch * a.problem.kv_heads;
}

// None for an index beyond the last. Read before the wait, so from L2: the cache of an SM may hold
// what an earlier step's schedule left there.
template <bool kBySchedule>
__device__ __forceinline__ CutPair cut_pair(const Arguments& a, int index) {
  if (index >= candidates<kBySchedule>(a)) return {};
  if constexpr (kBySchedule) {
    const int last = __ldcg(a.merge_last + index);
    return {__ldcg(a.span_pair + index + 1), last < 0 ? 0 : last - index + 1, 2 * index + 1, 2};
  } else {
    const Problem& p = a.problem;
    const int length = max(a.kv_lens[a.by_heads.divide(index)], 0);
    const Pieces pieces(count_tiles(length, p.q_len, p.window), a);
    return {index, pieces.count, index * a.cut.splits, 1};
  }
}

// Heavy cut pairs, and the most pieces of one.
struct Heavy {
  int pairs = 0;
  int pieces = 0;
};

// Lists a schedule's in order, by all warps.
__device__ __forceinline__ Heavy find_heavy(const Arguments& a, int* heavy, int* counts) {
  const int size = a.cut.num_ctas;
  if (size > kMostSearched) return {};
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  int found = 0;
  int most = 0;
#pragma unroll 1
  for (int begin = 0; begin < size; begin += kCombineThreads) {
    const int i = begin + threadIdx.x;
    const int pieces = i < size ? __ldcg(a.merge_last + i) - i + 1 : 0;
    const bool is_heavy = pieces > kPiecesAtOnce;
    most = max(most, pieces);
    const uint32_t mask = __ballot_sync(~0u, is_heavy);
    if (lane == 0) counts[warp] = __popc(mask);
    __syncthreads();
    int place = found + __popc(mask & ((1u << lane) - 1));
    for (int w = 0; w < kCombineWarps; ++w) {
      if (w < warp) place += counts[w];
      found += counts[w];
    }
    if (is_heavy) heavy[place] = i;
    __syncthreads();
  }
  if (found == 0) return {};
  most = __reduce_max_sync(~0u, most);
  if (lane == 0) counts[warp] = most;
  __syncthreads();
  for (int w = 0; w < kCombineWarps; ++w) most = max(most, counts[w]);
  return {found, most};
}

// A row of a cut pair, counted over all of them.
struct RowOfPair {
  int index;
  int row;
};

__device__ __forceinline__ RowOfPair place_of(const Arguments& a, int count) {
  const int index = a.by_rows.divide(count);
  return {index, count - index * a.problem.rows()};
}

}  // namespace jax_hpc::decode_attention
