// The merge of cut pairs: pieces' sums of values, by log-sum-exp, in the order of the pieces.
#pragma once

#include "decode_attention/arguments.cuh"
#include "decode_attention/tasks.cuh"

namespace jax_hpc::decode_attention {

constexpr int kCombineWarps = 8;
constexpr int kCombineThreads = kCombineWarps * kWarpSize;
constexpr int kCombineRegisters = 104;  // what a CTA of the attention leaves free of an SM's
constexpr int kPiecesAtOnce = 6;
// A row of more pieces than a warp reads at once takes all warps of a CTA, or of several CTAs that
// share out its columns. A cut pair has one CTA's span for each piece but the first, so there are
// at most a sixth as many of them.
constexpr int kMostShares = 4;
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

// A lane's share of a row's merged values: kValues from some column on.
template <int D>
struct Merged {
  static constexpr int kValues = D / kWarpSize;
  float base = kNoBase;
  float total = 0;
  float values[kValues] = {};

  // Others (base, total) and their values, all relative to the largest base of all.
  template <int Count>
  __device__ __forceinline__ void add(const float2 (&states)[Count],
                                      const float (&others)[Count][kValues]) {
    float top = base;
#pragma unroll
    for (int i = 0; i < Count; ++i) top = fmaxf(top, states[i].x);
    const float own = power_of_2(base - top);
    total *= own;
#pragma unroll
    for (int j = 0; j < kValues; ++j) values[j] *= own;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      const float its = power_of_2(states[i].x - top);
      total = fmaf(its, states[i].y, total);
#pragma unroll
      for (int j = 0; j < kValues; ++j) values[j] = fmaf(its, others[i][j], values[j]);
    }
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

  // Takes in what the lane `distance` away has.
  __device__ __forceinline__ void add_lane(int distance) {
    float2 state[1];
    float other[1][kValues];
    for (int i = 0; i < kValues; ++i) other[0][i] = __shfl_xor_sync(~0u, values[i], distance);
    state[0].x = __shfl_xor_sync(~0u, base, distance);
    state[0].y = __shfl_xor_sync(~0u, total, distance);
    add(state, other);
  }

  // Pieces `first`, `first` + stride, ... of a row; several are under way at once.
  __device__ __forceinline__ void add_pieces(const Arguments& a, const CutPair& pair, int row,
                                             int first, int stride, int column) {
    const int rows = a.problem.rows();
#pragma unroll 1
    for (int begin = first; begin < pair.pieces; begin += kPiecesAtOnce * stride) {
      int64_t at = int64_t{pair.slot(begin)} * rows + row;
      int64_t hop = int64_t{pair.slot(begin + stride) - pair.slot(begin)} * rows;
      float2 states[kPiecesAtOnce];
      float sums[kPiecesAtOnce][kValues] = {};
#pragma unroll
      for (int i = 0; i < kPiecesAtOnce; ++i) {
        states[i] = {kNoBase, 0};
        if (begin + i * stride < pair.pieces) {
          states[i] = a.partial_state[at];
          load(sums[i], a.partial_out + at * D + column);
        }
        at += hop;
        if (i == 0) hop = int64_t{stride} * pair.step * rows;
      }
      add(states, sums);
    }
  }

  __device__ __forceinline__ void write(const Arguments& a, int pair, int row, int column,
                                        float value_scale) const {
    const Problem& p = a.problem;
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
    __nv_bfloat16* const to = a.out + at * D + column;
    if constexpr (kValues == 4) {
      *reinterpret_cast<uint2*>(to) = {packed[0], packed[1]};
    } else {
      *reinterpret_cast<uint32_t*>(to) = packed[0];
    }
    if (column == 0 && a.lse != nullptr) a.lse[at] = closing.lse;
  }
};

// Heavy cut pairs, and the most pieces of one.
struct Heavy {
  int pairs = 0;
  int pieces = 0;
};

// Lists them in order, by all warps.
__device__ __forceinline__ Heavy find_heavy(const Arguments& a, int* heavy, int* counts) {
  const int size = candidates(a);
  if (a.cut.splits > 0 || size > kMostSearched) return {};
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  int found = 0;
  int most = 0;
#pragma unroll 1
  for (int begin = 0; begin < size; begin += kCombineThreads) {
    const int i = begin + threadIdx.x;
    const int pieces = i < size ? a.merge_last[i] - i + 1 : 0;
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
        heavy_(find_heavy(a, memory.heavy, memory.counts)) {}

  __device__ __forceinline__ void run() {
    const int heavy_rows = heavy_.pairs * a_.problem.rows();
    const int shares = count_shares(heavy_rows);
#pragma unroll 1
    for (int i = blockIdx.x; i < heavy_rows * shares; i += gridDim.x) {
      merge_heavy(place_of(a_, i / shares), i % shares, shares);
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
  // So many that all pieces are read at once, if each finds a CTA: the first CTAs have no other
  // work, for the pairs that their index stands for are spans within the heavy ones.
  __device__ __forceinline__ int count_shares(int heavy_rows) const {
    int shares = 1;
    while (shares < kMostShares && shares * kCombineWarps * kPiecesAtOnce < heavy_.pieces &&
           2 * shares * heavy_rows <= static_cast<int>(gridDim.x)) {
      shares *= 2;
    }
    return shares;
  }

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

  // Columns of one of `shares` by all warps: of each warp 32 / shares lanes take a piece, so that
  // it reads as many at once.
  __device__ __forceinline__ void merge_heavy(RowOfPair place, int share, int shares) {
    constexpr int kValues = Merged<D>::kValues;
    const CutPair pair = cut_pair(a_, memory_.heavy[place.index]);
    const float scale = value_scale(a_, head_of(pair));
    const int lanes = kWarpSize / shares;
    const int own = lane_ % lanes * kValues;
    const int column = share * lanes * kValues + own;
    Merged<D> part;
    part.add_pieces(a_, pair, place.row, warp_ * shares + lane_ / lanes, kCombineWarps * shares,
                    column);
    for (int distance = lanes; distance < kWarpSize; distance *= 2) part.add_lane(distance);
    if (lane_ == 0) memory_.states[warp_] = {part.base, part.total};
    if (lane_ < lanes) {
      for (int j = 0; j < kValues; ++j) memory_.sums[warp_][own + j] = part.values[j];
    }
    __syncthreads();
    if (warp_ == 0 && lane_ < lanes) {
      float2 states[kCombineWarps];
      float sums[kCombineWarps][kValues];
#pragma unroll
      for (int w = 0; w < kCombineWarps; ++w) {
        states[w] = memory_.states[w];
        Merged<D>::load(sums[w], memory_.sums[w] + own);
      }
      Merged<D> whole;
      whole.add(states, sums);
      whole.write(a_, pair.pair, place.row, column, scale);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void merge_light() const {
    if (pair_.pieces < 2 || (heavy_.pairs > 0 && pair_.pieces > kPiecesAtOnce)) return;
    const float scale = value_scale(a_, head_of(pair_));  // on its way beside the pieces
    const int column = lane_ * Merged<D>::kValues;
    Merged<D> whole;
    whole.add_pieces(a_, pair_, place_.row, 0, 1, column);
    whole.write(a_, pair_.pair, place_.row, column, scale);
  }

  const Arguments& a_;
  Memory& memory_;
  int warp_;
  int lane_;
  RowOfPair stride_;
  RowOfPair place_;
  CutPair pair_;
  CutPair next_;
  Heavy heavy_;
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
