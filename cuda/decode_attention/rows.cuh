// The online softmax of a warp: what its rows have met so far.
#pragma once

#include "decode_attention/query.cuh"
#include "decode_attention/visibility.cuh"

namespace jax_hpc::decode_attention {

// Registers of scores: [n][0, 1] of token lane / 4 of a group, [n][2, 3] eight on; columns as
// Query's. Probabilities are powers of 2 relative to a row's base: its largest score so far, or a
// little less, so that nothing need be rescaled at most times.
template <class Cache, int D, int N>
struct Rows {
  static constexpr int kSteps = D / 16;
  static constexpr int kPairs = 2 * Cache::kTerms;  // operands of probabilities

  float base[N][2];
  float total[N][2];        // of this lane's tokens only
  float sum[kSteps][N][4];  // of values, of all the warp's tokens

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        base[n][c] = kNoBase;
        total[n][c] = 0;
      }
#pragma unroll
      for (int m = 0; m < kSteps; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][n][i] = 0;
      }
    }
  }

  // Takes in the scores whose bit 4 n + i of `visible` is set, where `edge` says that some are
  // not: adds the probabilities to the totals and leaves them as the operand of the values'
  // product.
  __device__ __forceinline__ void weigh(const Query<Cache, D, N>& query, float cap, bool edge,
                                        uint32_t visible, int lane, float (&scores)[N][4],
                                        uint32_t (&pairs)[N][kPairs]) {
    if (cap > 0) cap_scores(query, cap, scores);
    float power[N][4];
    if (__any_sync(~0u, relate(query, cap, edge, visible, scores, power))) {
      float x[N][4];
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[n][i] = scores[n][i] * (cap > 0 ? 1.0f : query.factor(n, i % 2));
        }
      }
      if (edge) hide(visible, x);
      raise_bases(x, power, lane);
      relate(query, cap, edge, visible, scores, power);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        power[n][i] = power_of_2(power[n][i]);
        total[n][i % 2] += power[n][i];
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = power[n][2 * half];
        const float high = power[n][2 * half + 1];
        const uint32_t pair = Cache::pack(low, high);
        pairs[n][half] = transpose(pair);
        if constexpr (Cache::kTerms == 2) {
          const float rest_low = low - __uint_as_float(pair << 16);
          const float rest_high = high - __uint_as_float(pair & 0xffff0000u);
          pairs[n][2 + half] = transpose(Cache::pack(rest_low, rest_high));
        }
      }
    }
  }

 private:
  // Powers of 2 relative to the rows' bases; whether one is too large.
  __device__ __forceinline__ bool relate(const Query<Cache, D, N>& query, float cap, bool edge,
                                         uint32_t visible, const float (&scores)[N][4],
                                         float (&power)[N][4]) const {
    bool above = false;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float factor = cap > 0 ? 1.0f : query.factor(n, i % 2);
        power[n][i] = fmaf(scores[n][i], factor, -base[n][i % 2]);
      }
    }
    if (edge) hide(visible, power);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) above = above || power[n][i] > Cache::kSlack;
    }
    return above;
  }

  __device__ __forceinline__ static void hide(uint32_t visible, float (&x)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((visible >> (4 * n + i) & 1) == 0) x[n][i] = -INFINITY;
      }
    }
  }

  // cap * tanh(s / cap) in powers of 2; tanh(y) = 1 - 2 / (1 + exp(2 y)).
  __device__ __forceinline__ static void cap_scores(const Query<Cache, D, N>& query, float cap,
                                                    float (&scores)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float e = power_of_2(scores[n][i] * query.factor(n, i % 2));
        scores[n][i] = cap * kLog2E * (1 - __fdividef(2.0f, 1 + e));
      }
    }
  }

  // Each row by itself: what another holds must not change its bits.
  __device__ __forceinline__ void raise_bases(const float (&x)[N][4], const float (&power)[N][4],
                                              int lane) {
    const uint32_t lanes_of_row = 0x11111111u << lane % 4;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const bool above = power[n][c] > Cache::kSlack || power[n][c + 2] > Cache::kSlack;
        const bool raises = (__ballot_sync(~0u, above) & lanes_of_row) != 0;
        float top = fmaxf(x[n][c], x[n][c + 2]);
#pragma unroll
        for (int step = 4; step < kWarpSize; step *= 2) {
          top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
        }
        const float raised = raises ? fmaxf(base[n][c], top - Cache::kBias) : base[n][c];
        const float shrink = power_of_2(base[n][c] - raised);
        base[n][c] = raised;
        total[n][c] *= shrink;
#pragma unroll
        for (int m = 0; m < kSteps; ++m) {
          sum[m][n][c] *= shrink;
          sum[m][n][c + 2] *= shrink;
        }
      }
    }
  }
};

}  // namespace jax_hpc::decode_attention
