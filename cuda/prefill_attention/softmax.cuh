// Scores of two rows of a thread become probabilities, relative to the largest so far.
#pragma once

#include "prefill_attention/arguments.cuh"

namespace jax_hpc::prefill_attention {

// The positions of a thread's rows: `row` of the task's tile and the one eight below.
struct Positions {
  int of[2];

  __device__ __forceinline__ Positions(const Arguments& a, const Task& task, int row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      of[r] = task.tile.first_position + token_of(a, task.tile.first_head + row + 8 * r);
    }
  }
};

// Hides what a row does not see; scores[4 j + 2 r + e] is of row r and token first + 8 j + e. Bit g
// of `live`: the tokens 16 g to 16 g + 16 are on a page that exists.
template <int Count>
__device__ __forceinline__ void mask(const Problem& p, const Positions& positions, int first,
                                     uint32_t live, float (&scores)[Count]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Sight sight(p, positions.of[r]);
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

// Probabilities are 2^Bias at most, whichever the products take best.
template <class Cache>
class Softmax {
 public:
  // `scales`: of the two rows' scores, beside the problem's.
  __device__ __forceinline__ Softmax(const Problem& p, const float (&scales)[2]) : cap_(p.cap) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float scale = p.scale * kLog2E * scales[r];
      factor_[r] = cap_ > 0 ? 2 * scale / cap_ : scale;
    }
  }

  // With a cap, scores become tanh(scale * score / cap).
  template <int Count>
  __device__ __forceinline__ void cap(float (&scores)[Count]) const {
    if (cap_ == 0) return;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      scores[i] = 1 - __fdividef(2.0f, 1 + power_of_2(scores[i] * factor_[i / 2 % 2]));
    }
  }

  // Scores become powers of 2; what was summed before has to shrink by the factors. With some slack
  // most tiles shrink nothing: then it returns false.
  template <int Count>
  __device__ __forceinline__ bool weigh(float (&scores)[Count], float (&shrink)[2]) {
    float tops[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = top_[r];
#pragma unroll
      for (int j = 0; j < Count / 4; ++j) {
        top = fmaxf(top, fmaxf(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
      }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      tops[r] = top;
    }
    const bool raised = raise(tops, shrink);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float unit = unit_of(r);
      const float base = base_of(r);
      float sum = 0;
#pragma unroll
      for (int j = 0; j < Count / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[4 * j + 2 * r + e];
          score = power_of_2(fmaf(score, unit, -base));
          sum += score;
        }
      }
      total_[r] = fmaf(total_[r], shrink[r], sum);
    }
    return raised;
  }

  __device__ __forceinline__ void spoil(int r) { total_[r] = NAN; }

  // A row that saw no key has no sum. Four lanes share a row.
  __device__ __forceinline__ Closing close(int r, const float* sink_logit) const {
    float total = total_[r];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const bool saw_none = total == 0;
    float base = base_of(r);
    float weight = 1;
    if (sink_logit != nullptr) {
      const float sink = *sink_logit * kLog2E;
      const float top = fmaxf(base, sink);
      weight = power_of_2(base - top);
      total = fmaf(total, weight, power_of_2(sink - top));
      base = top;
    }
    const Closing closing{__fdividef(weight, total), (base + log2f(total)) * kLn2};
    return saw_none ? Closing{0, -INFINITY} : closing;
  }

 private:
  // Whether the warp's bases follow the largest scores.
  __device__ __forceinline__ bool raise(const float (&tops)[2], float (&shrink)[2]) {
    if constexpr (Cache::kSlack > 0) {
      bool passes = false;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        shrink[r] = 1;
        passes = passes || (tops[r] - top_[r]) * unit_of(r) > Cache::kSlack;
      }
      if (!__any_sync(~0u, passes)) return false;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      shrink[r] = power_of_2((top_[r] - tops[r]) * unit_of(r));
      top_[r] = tops[r];
    }
    return true;
  }

  // What makes a score a power of 2.
  __device__ __forceinline__ float unit_of(int r) const {
    return cap_ > 0 ? cap_ * kLog2E : factor_[r];
  }
  __device__ __forceinline__ float base_of(int r) const {
    return fmaf(top_[r], unit_of(r), -Cache::kBias);
  }

  const float& cap_;
  float factor_[2];  // of a score, with a cap before that
  float top_[2] = {kNoScore, kNoScore};
  float total_[2] = {};
};

}  // namespace jax_hpc::prefill_attention
