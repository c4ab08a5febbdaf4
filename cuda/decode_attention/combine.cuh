// The merge of cut pairs: pieces' sums of values, by log-sum-exp, in the order of the pieces.
#pragma once

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
  int64_t first_slot;
  int64_t second_slot;
  int step;  // from one slot to the next, from the second on

  __device__ int64_t slot(int piece) const {
    return piece == 0 ? first_slot : second_slot + int64_t{piece - 1} * step;
  }
};

__device__ __forceinline__ int candidates(const Arguments& a) {
  return a.cut.splits > 0 ? a.problem.batch * a.problem.kv_heads : a.cut.num_ctas;
}

__device__ __forceinline__ CutPair cut_pair(const Arguments& a, int index) {
  if (a.cut.splits > 0) {
    const Problem& p = a.problem;
    const int length = max(a.kv_lens[index / p.kv_heads], 0);
    const Pieces pieces(count_tiles(length, p.q_len, p.window), a);
    const int64_t first = int64_t{index} * a.cut.splits;
    return {index, pieces.count, first, first + 1, 1};
  }
  const int last = a.merge_last[index];
  const int64_t cta = index;
  return {a.span_pair[index + 1], last < 0 ? 0 : last - index + 1, 2 * cta + 1, 2 * cta + 2, 2};
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
    for (int begin = first; begin < pair.pieces; begin += kPiecesAtOnce * stride) {
      float2 states[kPiecesAtOnce];
      float sums[kPiecesAtOnce][kValues];
#pragma unroll
      for (int i = 0; i < kPiecesAtOnce; ++i) {
        const int piece = begin + i * stride;
        if (piece >= pair.pieces) continue;
        const int64_t at = pair.slot(piece) * a.problem.rows() + row;
        states[i] = a.partial_state[at];
        load(sums[i], a.partial_out + at * D + lane * kValues);
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
    const int sequence = pair / p.kv_heads;
    const int head = pair - sequence * p.kv_heads;
    const Closing closing = close_row(base, total, a.sinks, head * p.group + row % p.group);
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

template <int D>
__global__ void __launch_bounds__(kCombineThreads, 3)
    combine_kernel(const __grid_constant__ Arguments a) {
  __shared__ int heavy[kMostHeavy];
  __shared__ int num_heavy;
  __shared__ float2 states[kCombineWarps];
  __shared__ float sums[kCombineWarps][D];
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int rows = a.problem.rows();
  // Before the wait: what kernels before the attention have written, and no other.
  if (threadIdx.x == 0) prefetch_scales(a);
  const int heavy_pairs = find_heavy(a, heavy, &num_heavy);
  const int64_t stride = int64_t{gridDim.x} * kCombineWarps;
  const int64_t items = int64_t{candidates(a)} * rows;
  const int64_t first = int64_t{blockIdx.x} * kCombineWarps + warp;
  CutPair pair{};
  if (first < items) pair = cut_pair(a, static_cast<int>(first / rows));
  wait_for_previous_kernel();
  for (int i = blockIdx.x; i < heavy_pairs * rows; i += gridDim.x) {
    const CutPair whole = cut_pair(a, heavy[i / rows]);
    const int row = i % rows;
    Merged<D> part;
    part.add_pieces(a, whole, row, warp, kCombineWarps);
    if (lane == 0) states[warp] = {part.base, part.total};
    for (int j = 0; j < Merged<D>::kValues; ++j) {
      sums[warp][lane * Merged<D>::kValues + j] = part.values[j];
    }
    __syncthreads();
    if (warp == 0) {
      for (int w = 1; w < kCombineWarps; ++w) {
        float other[Merged<D>::kValues];
        for (int j = 0; j < Merged<D>::kValues; ++j) {
          other[j] = sums[w][lane * Merged<D>::kValues + j];
        }
        part.add(states[w].x, states[w].y, other);
      }
      part.write(a, whole.pair, row);
    }
    __syncthreads();
  }
  const bool skips_heavy = heavy_pairs > 0;
  for (int64_t item = first; item < items; item += stride) {
    const int index = static_cast<int>(item / rows);
    const int row = static_cast<int>(item - int64_t{index} * rows);
    if (item != first) pair = cut_pair(a, index);
    if (pair.pieces < 2 || (skips_heavy && pair.pieces > kPiecesAtOnce)) continue;
    Merged<D> whole;
    whole.add_pieces(a, pair, row, 0, 1);
    whole.write(a, pair.pair, row);
  }
}

}  // namespace jax_hpc::decode_attention
