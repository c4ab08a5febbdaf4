// The tasks of a CTA, in order: consecutive tiles of one pair (sequence, KV head) each.
#pragma once

#include "common/launch.h"
#include "decode_attention/arguments.cuh"

namespace jax_hpc::decode_attention {

struct Task {
  int sequence;
  int head;
  int first_token;  // of the first tile
  int tiles;        // negative: there are no more tasks
  int length;       // of the sequence
  int slot;         // of the workspace; negative: the whole pair, whose output is final
};

// Pieces of a pair that is cut by its own length.
struct Pieces {
  int tiles;  // of a piece
  int count;
  __device__ Pieces(int pair_tiles, const Arguments& a)
      : tiles(max(a.by_splits.divide(pair_tiles + a.cut.splits - 1), a.cut.min_split_tiles)),
        count(max((pair_tiles + tiles - 1) / tiles, 1)) {}
};

// Used by a whole warp. Lengths are read 32 at a time.
class TaskWalk {
 public:
  __device__ TaskWalk(const Arguments& a, int lane) : a_(a), lane_(lane) {
    const int cta = static_cast<int>(blockIdx.x);
    if (a.cut.splits > 0) {
      piece_ = cta;
    } else {
      const int pair = a.span_pair[cta];
      tile_ = a.span_tile[cta];
      take_pair(pair);
      pairs_left_ = a.span_pair[cta + 1] - pair;
      last_tile_ = a.span_tile[cta + 1];
    }
  }

  // The next task's first tile and its sequence, as far as they are known without the sequence's
  // length: -1 where they are not.
  __device__ int likely_tile() const {
    return a_.cut.splits > 0 || a_.problem.window > 0 ? -1 : tile_;
  }
  __device__ int likely_sequence() const { return min(sequence_, a_.problem.batch - 1); }

  __device__ Task next() { return a_.cut.splits > 0 ? next_piece() : next_of_span(); }

 private:
  __device__ Task next_of_span() {
    if (pairs_left_ < 0 || (pairs_left_ == 0 && tile_ >= last_tile_)) return end();
    const int length = length_of(sequence_);
    const int tiles = tiles_of(length);
    const int stop = min(pairs_left_ == 0 ? last_tile_ : tiles, tiles);
    const int start = min(tile_, stop);
    const bool whole = start == 0 && stop == tiles;
    const int cta = static_cast<int>(blockIdx.x);
    const Task task = make(length, start, stop - start, whole ? -1 : 2 * cta + (start == 0));
    tile_ = 0;
    --pairs_left_;
    if (++head_ == a_.problem.kv_heads) {
      head_ = 0;
      ++sequence_;
    }
    return task;
  }

  __device__ Task next_piece() {
    const int pieces = a_.problem.batch * a_.problem.kv_heads * a_.cut.splits;
#pragma unroll 1
    for (; piece_ < pieces; piece_ += static_cast<int>(gridDim.x)) {
      const int pair = a_.by_splits.divide(piece_);
      const int index = piece_ - pair * a_.cut.splits;
      take_pair(pair);
      const int length = length_of(sequence_);
      const int tiles = tiles_of(length);
      const Pieces cut(tiles, a_);
      if (index >= cut.count) continue;
      const int start = index * cut.tiles;
      const int slot = cut.count == 1 ? -1 : piece_;
      piece_ += static_cast<int>(gridDim.x);
      return make(length, start, min(tiles - start, cut.tiles), slot);
    }
    return end();
  }

  __device__ void take_pair(int pair) {
    sequence_ = a_.by_heads.divide(pair);
    head_ = pair - sequence_ * a_.problem.kv_heads;
  }

  __device__ static Task end() { return {0, 0, 0, -1, 0, 0}; }

  __device__ Task make(int length, int start, int tiles, int slot) const {
    const int first = first_tile(length, a_.problem.q_len, a_.problem.window);
    return {sequence_, head_, (first + start) * kTileTokens, tiles, length, slot};
  }

  __device__ int tiles_of(int length) const {
    return count_tiles(length, a_.problem.q_len, a_.problem.window);
  }

  __device__ int length_of(int sequence) {
    if (sequence < cached_ || sequence >= cached_ + kWarpSize) {
      cached_ = sequence;
      lengths_ = a_.kv_lens[min(sequence + lane_, a_.problem.batch - 1)];
    }
    return max(__shfl_sync(~0u, lengths_, sequence - cached_), 0);
  }

  const Arguments& a_;
  int lane_;
  int sequence_ = 0;
  int head_ = 0;
  int tile_ = 0;        // where the next task starts
  int pairs_left_ = 0;  // after the current one, up to the span's end
  int last_tile_ = 0;   // where the span ends in its last pair
  int piece_ = 0;
  int cached_ = -kWarpSize;  // sequence of lane 0's length
  int lengths_ = 0;
};

}  // namespace jax_hpc::decode_attention
