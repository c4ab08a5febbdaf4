// The merge of cut pairs: pieces' sums of values, by log-sum-exp, in the order of the pieces.
#pragma once

#include "decode_attention/cut_pairs.cuh"
#include "decode_attention/merged.cuh"

namespace jax_hpc::decode_attention {

// What a CTA of the attention leaves free of an SM's with up to 8 rows; with more rows those of the
// merge find room when it ends.
constexpr int kCombineRegisters = 104;
constexpr int kMostLog2Shares = 2;

// The rows of a warp: first the CTA's share of heavy pairs, by all warps together, then its own of
// the others.
template <int D, bool kBySchedule>
class Merge {
  static constexpr int kValues = Merged<D>::kValues;

 public:
  struct Memory {
    int heavy[kMostHeavy];
    int counts[kCombineWarps];
    float2 states[kCombineWarps];
    alignas(16) float values[kCombineWarps][D];
  };

  __device__ __forceinline__ Merge(const Arguments& a, Memory& memory)
      : a_(a),
        memory_(memory),
        warp_(threadIdx.x / kWarpSize),
        lane_(threadIdx.x % kWarpSize),
        stride_(place_of(a, static_cast<int>(gridDim.x) * kCombineWarps)),
        place_(place_of(a, static_cast<int>(blockIdx.x) * kCombineWarps + warp_)),
        pair_(cut_pair<kBySchedule>(a, place_.index)),
        next_(cut_pair<kBySchedule>(a, after(place_).index)),
        share_(blockIdx.x) {
    if constexpr (kBySchedule) heavy_ = find_heavy(a, memory.heavy, memory.counts);
    log2_shares_ = count_log2_shares();
    find_light();
  }

  // Waits for the attention's end once all of the first row is known that can be. What comes behind
  // the wait is short: no cache near the SM holds its code, 40 cycles each 128 bytes. (All of it
  // gone through beforehand pushes the attention's own code out: 0.2 to 1 us slower.)
  __device__ __forceinline__ void run() {
    bool is_heavy = has_heavy();
    Item item = is_heavy ? take_heavy() : take_light();
    item.keep();
    wait_for_previous_kernel();
#pragma unroll 1
    for (;;) {
      Merged<D> row;
      row.add_strand(item.strand);
      if (is_heavy) add_warps(row);
      if (item.is_written) row.write(item.target);
      if (has_heavy()) {
        __syncthreads();  // what the warps have left has been read
        item = take_heavy();
        continue;
      }
      is_heavy = false;
      if (!has_light()) return;
      item = take_light();
    }
  }

 private:
  struct Item {
    Strand strand;
    Target target;
    bool is_written;  // by this lane

    __device__ __forceinline__ void keep() {
      keep_in_register(strand.state);
      keep_in_register(strand.values);
      keep_in_register(strand.first_hop);
      keep_in_register(strand.hop);
      keep_in_register(strand.count);
      keep_in_register(strand.most);
      keep_in_register(target.out);
      keep_in_register(target.lse);
      keep_in_register(target.scale);
      keep_in_register(target.sink);
    }
  };

  // So many that all pieces are read at once, if each finds a CTA: the first CTAs have no other
  // work, for the pairs that their index stands for are spans within the heavy ones.
  __device__ __forceinline__ int count_log2_shares() const {
    const int heavy_rows = heavy_.pairs * a_.problem.rows();
    int log2 = 0;
    while (log2 < kMostLog2Shares && (kCombineWarps * kPiecesAtOnce << log2) < heavy_.pieces &&
           2 * heavy_rows << log2 <= static_cast<int>(gridDim.x)) {
      ++log2;
    }
    return log2;
  }

  __device__ __forceinline__ bool has_heavy() const {
    return kBySchedule && share_ < heavy_.pairs * a_.problem.rows() << log2_shares_;
  }
  __device__ __forceinline__ bool has_light() const {
    return place_.index < candidates<kBySchedule>(a_);
  }
  __device__ __forceinline__ bool is_light(const CutPair& pair) const {
    return pair.pieces > 1 && (heavy_.pairs == 0 || pair.pieces <= kPiecesAtOnce);
  }

  // A warp's rows, of all pairs' in order, lie a stride apart.
  __device__ __forceinline__ RowOfPair after(RowOfPair place) const {
    const int rows = a_.problem.rows();
    place.index += stride_.index;
    place.row += stride_.row;
    return place.row < rows ? place : RowOfPair{place.index + 1, place.row - rows};
  }
  __device__ __forceinline__ void move_on() {
    place_ = after(place_);
    pair_ = next_;
    next_ = cut_pair<kBySchedule>(a_, after(place_).index);
  }
  // To the first row from here on that is this warp's to merge.
  __device__ __forceinline__ void find_light() {
#pragma unroll 1
    while (has_light() && !is_light(pair_)) move_on();
  }

  __device__ __forceinline__ Item take_light() {
    Item item{};
    if (!has_light()) return item;
    item.strand = strand_of(pair_, place_.row, 0, 0, 0, lane_ * kValues);
    item.target = target_of(pair_.pair, place_.row, lane_ * kValues);
    item.is_written = true;
    move_on();
    find_light();
    return item;
  }

  // Columns of one of the shares by all warps: of each warp 32 / shares lanes take a piece, so that
  // it reads as many at once.
  __device__ __forceinline__ Item take_heavy() {
    const int index = share_ >> log2_shares_;
    const RowOfPair place = place_of(a_, index);
    const CutPair pair = cut_pair<kBySchedule>(a_, memory_.heavy[place.index]);
    const int lanes = kWarpSize >> log2_shares_;
    const int part = lane_ & (lanes - 1);
    const int column = ((share_ - (index << log2_shares_)) * lanes + part) * kValues;
    Item item{};
    const int first = warp_ << log2_shares_;
    item.strand = strand_of(pair, place.row, first + (lane_ >> (5 - log2_shares_)), first,
                            log2_shares_ + log2_of(kCombineWarps), column);
    item.target = target_of(pair.pair, place.row, column);
    item.is_written = warp_ == 0 && lane_ < lanes;
    share_ += static_cast<int>(gridDim.x);
    return item;
  }

  // Pieces `first`, `first` + stride, ... of a row; the warp's first one is `first_of_warp`.
  __device__ __forceinline__ Strand strand_of(const CutPair& pair, int row, int first,
                                              int first_of_warp, int log2_stride,
                                              int column) const {
    const int rows = a_.problem.rows();
    const int stride = 1 << log2_stride;
    const int64_t at = int64_t{pair.slot(first)} * rows + row;
    const int64_t first_hop = int64_t{pair.slot(first + stride) - pair.slot(first)} * rows;
    return {a_.partial_state + at,
            a_.partial_out + at * D + column,
            first_hop,
            int64_t{pair.step} * rows << log2_stride,
            (pair.pieces - first + stride - 1) >> log2_stride,
            (pair.pieces - first_of_warp + stride - 1) >> log2_stride};
  }

  __device__ __forceinline__ Target target_of(int pair, int row, int column) const {
    const Problem& p = a_.problem;
    const int sequence = a_.by_heads.divide(pair);
    const int head = pair - sequence * p.kv_heads;
    const int64_t at = output_row(a_, sequence, head, row);
    const int q_head = head * p.group + row - a_.by_group.divide(row) * p.group;
    return {a_.out + at * D + column, column == 0 && a_.lse != nullptr ? a_.lse + at : nullptr,
            value_scale(a_, head), sink_power(a_.sinks, q_head)};
  }

  // What all lanes and warps have of a row, for those that write it.
  __device__ __forceinline__ void add_warps(Merged<D>& row) const {
    const int lanes = kWarpSize >> log2_shares_;
    const int own = (lane_ & (lanes - 1)) * kValues;
#pragma unroll 1
    for (int distance = lanes; distance < kWarpSize; distance *= 2) row.add_lane(distance);
    if (lane_ == 0) memory_.states[warp_] = {row.base, row.total};
    if (lane_ < lanes) {
#pragma unroll
      for (int j = 0; j < kValues; ++j) memory_.values[warp_][own + j] = row.values[j];
    }
    __syncthreads();
    float2 states[kCombineWarps];
    float others[kCombineWarps][kValues];
#pragma unroll
    for (int w = 0; w < kCombineWarps; ++w) {
      states[w] = memory_.states[w];
      Merged<D>::load_shared(others[w], memory_.values[w] + own);
    }
    row = {};
    row.add(states, others);
  }

  const Arguments& a_;
  Memory& memory_;
  int warp_;
  int lane_;
  RowOfPair stride_;
  RowOfPair place_;  // of the next row that is this warp's alone
  CutPair pair_;
  CutPair next_;
  Heavy heavy_;
  int log2_shares_ = 0;  // of the columns of a heavy pair's row
  int share_;            // the next one that is this CTA's
};

template <int D, bool kBySchedule>
__global__ void __maxnreg__(kCombineRegisters) combine_kernel(const __grid_constant__ Arguments a) {
  __shared__ typename Merge<D, kBySchedule>::Memory memory;
  static_assert(sizeof memory <= (kMergeKib - 1) * 1024);
  // Before the wait: what kernels before the attention have written, and no other.
  Merge<D, kBySchedule>(a, memory).run();
}

}  // namespace jax_hpc::decode_attention
