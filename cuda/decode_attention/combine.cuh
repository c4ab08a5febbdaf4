// The merge of cut pairs: pieces' sums of values, by log-sum-exp, in the order of the pieces.
#pragma once

#include <climits>

#include "decode_attention/arguments.cuh"
#include "decode_attention/tasks.cuh"

namespace jax_hpc::decode_attention {

constexpr int kCombineWarps = 8;
constexpr int kCombineThreads = kCombineWarps * kWarpSize;
constexpr int kPiecesAtOnce = 6;
// A row of more pieces than a warp reads at once takes all warps of a CTA. A cut pair has one
// CTA's span for each piece but the first, so there are at most a sixth as many of them.
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

__device__ __forceinline__ int candidates(const Arguments& a) {
  return a.cut.splits > 0 ? a.problem.batch * a.problem.kv_heads : a.cut.num_ctas;
}

__device__ __forceinline__ CutPair cut_pair(const Arguments& a, int index) {
  if (a.cut.splits > 0) {
    const Problem& p = a.problem;
    const int length = max(a.kv_lens[a.by_heads.divide(index)], 0);
    const Pieces pieces(count_tiles(length, p.q_len, p.window), a);
    return {index, pieces.count, index * a.cut.splits, 1};
  }
  const int last = a.merge_last[index];
  return {a.span_pair[index + 1], last < 0 ? 0 : last - index + 1, 2 * index + 1, 2};
}

// A lane's share of a row's merged values.
template <int D>
struct Merged {
  static constexpr int kValues = D / kWarpSize;
  float base = kNoBase;
  float total = 0;
  float values[kValues] = {};

  __device__ __forceinline__ void add(float other_base, float other_total,
                                      const float (&other)[kValues]) {
    const float top = fmaxf(base, other_base);
    const float own = power_of_2(base - top);
    const float its = power_of_2(other_base - top);
    total = total * own + other_total * its;
    for (int i = 0; i < kValues; ++i) values[i] = values[i] * own + other[i] * its;
    base = top;
  }

  __device__ __forceinline__ static void load(float (&to)[kValues], const float* from) {
    if constexpr (kValues == 4) {
      const float4 v = *reinterpret_cast<const float4*>(from);
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else {
      const float2 v = *reinterpret_cast<const float2*>(from);
      to[0] = v.x, to[1] = v.y;
    }
  }

  // Pieces `first`, `first` + stride, ... of a row; several are under way at once.
  __device__ __forceinline__ void add_pieces(const Arguments& a, const CutPair& pair, int row,
                                             int first, int stride) {
    const int lane = threadIdx.x % kWarpSize;
    const int rows = a.problem.rows();
#pragma unroll 1
    for (int begin = first; begin < pair.pieces; begin += kPiecesAtOnce * stride) {
      int64_t at = int64_t{pair.slot(begin)} * rows + row;
      int64_t hop = int64_t{pair.slot(begin + stride) - pair.slot(begin)} * rows;
      float2 states[kPiecesAtOnce];
      float sums[kPiecesAtOnce][kValues];
#pragma unroll
      for (int i = 0; i < kPiecesAtOnce; ++i) {
        if (begin + i * stride < pair.pieces) {
          states[i] = a.partial_state[at];
          load(sums[i], a.partial_out + at * D + lane * kValues);
        }
        at += hop;
        if (i == 0) hop = int64_t{stride} * pair.step * rows;
      }
#pragma unroll
      for (int i = 0; i < kPiecesAtOnce; ++i) {
        if (begin + i * stride < pair.pieces) add(states[i].x, states[i].y, sums[i]);
      }
    }
  }

  __device__ __forceinline__ void write(const Arguments& a, int pair, int row) const {
    const Problem& p = a.problem;
    const int lane = threadIdx.x % kWarpSize;
    const int sequence = a.by_heads.divide(pair);
    const int head = pair - sequence * p.kv_heads;
    const Closing closing =
        close_row(base, total, a.sinks, head * p.group + row - a.by_group.divide(row) * p.group);
    const float weight = closing.weight * value_scale(a, head);
    const int64_t at = output_row(a, sequence, head, row);
    uint32_t packed[kValues / 2];
    for (int i = 0; i < kValues / 2; ++i) {
      packed[i] = pack_bf16(values[2 * i] * weight, values[2 * i + 1] * weight);
    }
    __nv_bfloat16* const to = a.out + at * D + lane * kValues;
    if constexpr (kValues == 4) {
      *reinterpret_cast<uint2*>(to) = {packed[0], packed[1]};
    } else {
      *reinterpret_cast<uint32_t*>(to) = packed[0];
    }
    if (lane == 0 && a.lse != nullptr) a.lse[at] = closing.lse;
  }
};

// The heavy cut pairs in order, found by warp 0; their number.
__device__ __forceinline__ int find_heavy(const Arguments& a, int* heavy, int* count) {
  const int size = candidates(a);
  if (threadIdx.x < kWarpSize) {
    const int lane = threadIdx.x;
    int found = 0;
    const bool search = a.cut.splits == 0 && size <= kMostSearched;
#pragma unroll 1
    for (int i = lane; search && i - lane < size; i += kWarpSize) {
      const bool is_heavy = i < size && cut_pair(a, i).pieces > kPiecesAtOnce;
      const uint32_t mask = __ballot_sync(~0u, is_heavy);
      if (is_heavy) heavy[found + __popc(mask & ((1u << lane) - 1))] = i;
      found += __popc(mask);
    }
    if (lane == 0) *count = found;
  }
  __syncthreads();
  return *count;
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

template <int D>
__global__ void __launch_bounds__(kCombineThreads, 3)
    combine_kernel(const __grid_constant__ Arguments a) {
  __shared__ int heavy[kMostHeavy];
  __shared__ int num_heavy;
  __shared__ float2 states[kCombineWarps];
  __align__(16) __shared__ float sums[kCombineWarps][D];
  static_assert(sizeof heavy + sizeof states + sizeof sums + 16 <= (kMergeKib - 1) * 1024);
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int rows = a.problem.rows();
  // Before the wait: what kernels before the attention have written, and no other.
  if (threadIdx.x == 0) prefetch_scales(a);
  const int heavy_pairs = find_heavy(a, heavy, &num_heavy);
  // A warp's rows, of all pairs' in order, lie this far apart.
  const int stride = static_cast<int>(gridDim.x) * kCombineWarps;
  const RowOfPair stride_of = place_of(a, stride);
  RowOfPair place = place_of(a, static_cast<int>(blockIdx.x) * kCombineWarps + warp);
  CutPair pair{};
  if (place.index < candidates(a)) pair = cut_pair(a, place.index);
  wait_for_previous_kernel();
#pragma unroll 1
  for (int i = blockIdx.x; i < heavy_pairs * rows; i += gridDim.x) {
    const RowOfPair at = place_of(a, i);
    const CutPair whole = cut_pair(a, heavy[at.index]);
    Merged<D> part;
    part.add_pieces(a, whole, at.row, warp, kCombineWarps);
    if (lane == 0) states[warp] = {part.base, part.total};
    for (int j = 0; j < Merged<D>::kValues; ++j) {
      sums[warp][lane * Merged<D>::kValues + j] = part.values[j];
    }
    __syncthreads();
    if (warp == 0) {
#pragma unroll 1
      for (int w = 1; w < kCombineWarps; ++w) {
        float other[Merged<D>::kValues];
        Merged<D>::load(other, sums[w] + lane * Merged<D>::kValues);
        part.add(states[w].x, states[w].y, other);
      }
      part.write(a, whole.pair, at.row);
    }
    __syncthreads();
  }
  const int most = heavy_pairs > 0 ? kPiecesAtOnce : INT_MAX;
#pragma unroll 1
  while (place.index < candidates(a)) {
    if (pair.pieces >= 2 && pair.pieces <= most) {
      Merged<D> whole;
      whole.add_pieces(a, pair, place.row, 0, 1);
      whole.write(a, pair.pair, place.row);
    }
    place.index += stride_of.index;
    place.row += stride_of.row;
    if (place.row >= rows) place = {place.index + 1, place.row - rows};
    if (place.index < candidates(a)) pair = cut_pair(a, place.index);
  }
}

}  // namespace jax_hpc::decode_attention
