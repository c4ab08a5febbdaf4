// The merge of cut pairs: pieces' sums of values, by log-sum-exp, in the order of the pieces.
#pragma once

#include "decode_attention/arguments.cuh"
#include "decode_attention/tasks.cuh"

namespace jax_hpc::decode_attention {

constexpr int kCombineWarps = 8;
constexpr int kCombineThreads = kCombineWarps * kWarpSize;
constexpr int kCombineRegisters = 104;  // what a CTA of the attention leaves free of an SM's
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

// None for an index beyond the last.
__device__ __forceinline__ CutPair cut_pair(const Arguments& a, int index) {
  if (index >= candidates(a)) return {};
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

  __device__ __forceinline__ void write(const Arguments& a, int pair, int row,
                                        float value_scale) const {
    const Problem& p = a.problem;
    const int lane = threadIdx.x % kWarpSize;
    const int sequence = a.by_heads.divide(pair);
    const int head = pair - sequence * p.kv_heads;
    const Closing closing =
        close_row(base, total, a.sinks, head * p.group + row - a.by_group.divide(row) * p.group);
    const float weight = closing.weight * value_scale;
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

// The heavy cut pairs in order, found by all warps; their number.
__device__ __forceinline__ int find_heavy(const Arguments& a, int* heavy, int* counts) {
  const int size = candidates(a);
  if (a.cut.splits > 0 || size > kMostSearched) return 0;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  int found = 0;
#pragma unroll 1
  for (int begin = 0; begin < size; begin += kCombineThreads) {
    const int i = begin + threadIdx.x;
    const bool is_heavy = i < size && a.merge_last[i] - i >= kPiecesAtOnce;
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
  return found;
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

// A CTA's rows.
template <int D>
class Merge {
 public:
  struct Memory {
    int heavy[kMostHeavy];
    int counts[kCombineWarps];
    float2 states[kCombineWarps];
    alignas(16) float sums[kCombineWarps][D];
  };

  __device__ __forceinline__ Merge(const Arguments& a, Memory& memory)
      : a_(a),
        memory_(memory),
        warp_(threadIdx.x / kWarpSize),
        lane_(threadIdx.x % kWarpSize),
        stride_(place_of(a, static_cast<int>(gridDim.x) * kCombineWarps)),
        place_(place_of(a, static_cast<int>(blockIdx.x) * kCombineWarps + warp_)),
        pair_(cut_pair(a, place_.index)),
        next_(cut_pair(a, after(place_).index)),
        heavy_pairs_(find_heavy(a, memory.heavy, memory.counts)) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int i = blockIdx.x; i < heavy_pairs_ * a_.problem.rows(); i += gridDim.x) {
      merge_heavy(place_of(a_, i));
    }
#pragma unroll 1
    while (place_.index < candidates(a_)) {
      merge_light();
      place_ = after(place_);
      pair_ = next_;
      next_ = cut_pair(a_, after(place_).index);
    }
  }

 private:
  // A warp's rows, of all pairs' in order, lie a stride apart.
  __device__ __forceinline__ RowOfPair after(RowOfPair place) const {
    const int rows = a_.problem.rows();
    place.index += stride_.index;
    place.row += stride_.row;
    return place.row < rows ? place : RowOfPair{place.index + 1, place.row - rows};
  }

  __device__ __forceinline__ int head_of(const CutPair& pair) const {
    return pair.pair - a_.by_heads.divide(pair.pair) * a_.problem.kv_heads;
  }

  // By all warps.
  __device__ __forceinline__ void merge_heavy(RowOfPair place) {
    const CutPair pair = cut_pair(a_, memory_.heavy[place.index]);
    const float scale = value_scale(a_, head_of(pair));
    Merged<D> part;
    part.add_pieces(a_, pair, place.row, warp_, kCombineWarps);
    if (lane_ == 0) memory_.states[warp_] = {part.base, part.total};
    for (int j = 0; j < Merged<D>::kValues; ++j) {
      memory_.sums[warp_][lane_ * Merged<D>::kValues + j] = part.values[j];
    }
    __syncthreads();
    if (warp_ == 0) {
#pragma unroll 1
      for (int w = 1; w < kCombineWarps; ++w) {
        float other[Merged<D>::kValues];
        Merged<D>::load(other, memory_.sums[w] + lane_ * Merged<D>::kValues);
        part.add(memory_.states[w].x, memory_.states[w].y, other);
      }
      part.write(a_, pair.pair, place.row, scale);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void merge_light() const {
    if (pair_.pieces < 2 || (heavy_pairs_ > 0 && pair_.pieces > kPiecesAtOnce)) return;
    const float scale = value_scale(a_, head_of(pair_));  // on its way beside the pieces
    Merged<D> whole;
    whole.add_pieces(a_, pair_, place_.row, 0, 1);
    whole.write(a_, pair_.pair, place_.row, scale);
  }

  const Arguments& a_;
  Memory& memory_;
  int warp_;
  int lane_;
  RowOfPair stride_;
  RowOfPair place_;
  CutPair pair_;
  CutPair next_;
  int heavy_pairs_;
};

template <int D>
__global__ void __maxnreg__(kCombineRegisters) combine_kernel(const __grid_constant__ Arguments a) {
  __shared__ typename Merge<D>::Memory memory;
  static_assert(sizeof memory <= (kMergeKib - 1) * 1024);
  // Before the wait: what kernels before the attention have written, and no other.
  if (threadIdx.x == 0) prefetch_scales(a);
  Merge<D> merge(a, memory);
  wait_for_previous_kernel();
  merge.run();
}

}  // namespace jax_hpc::decode_attention
