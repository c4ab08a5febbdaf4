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
//
// Pieces that exist are counted by sequence, then part, then head, and a CTA takes every
// gridDim-th. Numbers that stood for the most pieces of every pair would leave most CTAs without
// work where pairs are short: with 4 of them for one piece each, only every fourth CTA had some.
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

  // Finds the next task's pair, and asks for its length without waiting for it where the length
  // does not matter. What follows up to next() is about this task.
  __device__ void find() {
    if (a_.cut.splits > 0) {
      find_piece();
    } else {
      ask_length();
    }
  }
  __device__ bool exists() const {
    if (a_.cut.splits > 0) return piece_ < counted_;
    return pairs_left_ > 0 || (pairs_left_ == 0 && tile_ < last_tile_);
  }
  __device__ int sequence() const { return min(sequence_, a_.problem.batch - 1); }
  __device__ int head() const { return head_; }
  // Its first tile; -1 where the length decides it.
  __device__ int likely_tile() const {
    return a_.cut.splits > 0 || a_.problem.window > 0 ? -1 : tile_;
  }

  // The task itself; `tiles` is negative where there is none.
  __device__ Task next() {
    if (!exists()) return {0, 0, 0, -1, 0, 0};
    return a_.cut.splits > 0 ? next_piece() : next_of_span();
  }

 private:
  __device__ Task next_of_span() {
    const int length = asked_length();
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

  // Goes on to the sequences among which the next piece is; `piece_` stays at or above `counted_`
  // where there is none.
  __device__ void find_piece() {
#pragma unroll 1
    while (piece_ >= counted_ && cached_ + kWarpSize < a_.problem.batch) count_pieces();
    if (!exists()) return;
    const int own = __popc(__ballot_sync(~0u, ends_ <= piece_));  // lane of its sequence
    sequence_ = cached_ + own;
    const Pieces cut(tiles_of(asked_length()), a_);
    const int within = piece_ - __shfl_sync(~0u, ends_, own) + cut.count * a_.problem.kv_heads;
    part_ = a_.by_heads.divide(within);
    head_ = within - part_ * a_.problem.kv_heads;
  }
  // Of the next 32 sequences.
  __device__ void count_pieces() {
    cached_ += kWarpSize;
    read_lengths();
    const Pieces cut(tiles_of(max(lengths_, 0)), a_);
    int sum = cached_ + lane_ < a_.problem.batch ? cut.count * a_.problem.kv_heads : 0;
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
      const int below = __shfl_up_sync(~0u, sum, step);
      if (lane_ >= step) sum += below;
    }
    ends_ = counted_ + sum;
    counted_ = __shfl_sync(~0u, ends_, kWarpSize - 1);
  }
  __device__ Task next_piece() {
    const int length = asked_length();
    const int tiles = tiles_of(length);
    const Pieces cut(tiles, a_);
    const int start = part_ * cut.tiles;
    const int pair = sequence_ * a_.problem.kv_heads + head_;
    const int slot = cut.count == 1 ? -1 : pair * a_.cut.splits + part_;
    piece_ += static_cast<int>(gridDim.x);
    return make(length, start, min(tiles - start, cut.tiles), slot);
  }

  __device__ void take_pair(int pair) {
    sequence_ = a_.by_heads.divide(pair);
    head_ = pair - sequence_ * a_.problem.kv_heads;
  }

  __device__ Task make(int length, int start, int tiles, int slot) const {
    const int first = first_tile(length, a_.problem.q_len, a_.problem.window);
    return {sequence_, head_, (first + start) * kTileTokens, tiles, length, slot};
  }

  __device__ int tiles_of(int length) const {
    return count_tiles(length, a_.problem.q_len, a_.problem.window);
  }

  __device__ void ask_length() {
    if (sequence_ >= cached_ && sequence_ < cached_ + kWarpSize) return;
    cached_ = sequence_;
    read_lengths();
  }
  __device__ void read_lengths() {
    lengths_ = a_.kv_lens[min(cached_ + lane_, a_.problem.batch - 1)];
  }
  __device__ int asked_length() const {
    return max(__shfl_sync(~0u, lengths_, sequence_ - cached_), 0);
  }

  const Arguments& a_;
  int lane_;
  int sequence_ = 0;
  int head_ = 0;
  int tile_ = 0;             // where the next task starts
  int pairs_left_ = 0;       // after the current one, up to the span's end
  int last_tile_ = 0;        // where the span ends in its last pair
  int piece_ = 0;            // the next one, counted over all sequences
  int part_ = 0;             // of its pair
  int ends_ = 0;             // pieces up to this lane's sequence, with it
  int counted_ = 0;          // and up to lane 31's
  int cached_ = -kWarpSize;  // sequence of lane 0's length
  int lengths_ = 0;
};

}  // namespace jax_hpc::decode_attention
