// Scores of two rows of a thread become probabilities, relative to the largest so far.
#pragma once

#include "prefill_attention/arguments.cuh"

namespace jax_hpc::prefill_attention {

// The rows of a thread: `row` of the task's tile and the one eight below.
struct Rows {
  int position[2];
  int q_head[2];
  int64_t q_row[2];
  bool exists[2];

  __device__ __forceinline__ Rows(const Arguments& a, const Task& task, int row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head_row = task.tile.first_head + row + 8 * r;
      const int token = token_of(a, head_row);
      position[r] = task.tile.first_position + token;
      q_head[r] = task.kv_head * a.problem.group + head_row - token * a.problem.group;
      q_row[r] = int64_t{task.tile.first_q} + token;
      exists[r] = row + 8 * r < task.tile.rows;
    }
  }
};

// Hides what a row does not see; scores[4 j + 2 r + e] is of row r and token first + 8 j + e. Bit g
// of `live`: the tokens 16 g to 16 g + 16 are on a page that exists.
template <int Count>
__device__ __forceinline__ void mask(const Problem& p, const Rows& rows, int first, uint32_t live,
                                     float (&scores)[Count]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Sight sight(p, rows.position[r]);
    const int lowest = sight.lowest - first;
    const int highest = sight.position - first;
#pragma unroll
    for (int j = 0; j < Count / 4; ++j) {
      const bool exists = (live >> (j / 2) & 1) != 0;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = 8 * j + e;
        float& score = scores[4 * j + 2 * r + e];
        if (!exists || token < lowest || token > highest) score = -INFINITY;
      }
    }
  }
}

// How a row ends: its sum of values times `weight`, and its log-sum-exp.
struct Closing {
  float weight;
  float lse;
};

class Softmax {
 public:
  __device__ __forceinline__ explicit Softmax(const Problem& p) : cap_(p.cap > 0) {
    const float scale = p.scale * kLog2E;
    unit_ = cap_ ? p.cap * kLog2E : scale;
    inner_ = cap_ ? 2 * scale / p.cap : 0;
  }

  // With a cap, scores become tanh(scale * score / cap).
  template <int Count>
  __device__ __forceinline__ void cap(float (&scores)[Count]) const {
    if (!cap_) return;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      scores[i] = 1 - __fdividef(2.0f, 1 + power_of_2(scores[i] * inner_));
    }
  }

  // Scores become powers of 2 below 1; what was summed before has to shrink by the factors.
  template <int Count>
  __device__ __forceinline__ void weigh(float (&scores)[Count], float (&shrink)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = top_[r];
#pragma unroll
      for (int j = 0; j < Count / 4; ++j) {
        top = fmaxf(top, fmaxf(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
      }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      shrink[r] = power_of_2((top_[r] - top) * unit_);
      top_[r] = top;
      const float base = top * unit_;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < Count / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[4 * j + 2 * r + e];
          score = power_of_2(fmaf(score, unit_, -base));
          sum += score;
        }
      }
      total_[r] = fmaf(total_[r], shrink[r], sum);
    }
  }

  __device__ __forceinline__ void spoil(int r) { total_[r] = NAN; }

  // A row that saw no key has no sum. Four lanes share a row.
  __device__ __forceinline__ Closing close(int r, int q_head, const float* sinks) const {
    float total = total_[r];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (total == 0) return {0, -INFINITY};
    float base = top_[r] * unit_;
    float weight = 1;
    if (sinks != nullptr) {
      const float sink = sinks[q_head] * kLog2E;
      const float top = fmaxf(base, sink);
      weight = power_of_2(base - top);
      total = fmaf(total, weight, power_of_2(sink - top));
      base = top;
    }
    return {__fdividef(weight, total), (base + log2f(total)) * kLn2};
  }

 private:
  bool cap_;
  float unit_;   // what makes a score a power of 2
  float inner_;  // with a cap, before it
  float top_[2] = {kNoScore, kNoScore};
  float total_[2] = {};
};

}  // namespace jax_hpc::prefill_attention
