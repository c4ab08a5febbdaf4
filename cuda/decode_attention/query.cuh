// A warp's queries as operands of the tensor cores, and what turns their products into scores.
#pragma once

#include "decode_attention/cache_types.cuh"
#include "decode_attention/shared.cuh"

namespace jax_hpc::decode_attention {

// Tile n, register c of a pair of columns: row 8 n + 2 (lane % 4) + c of the warp's rows.
template <class Cache, int D, int N>
struct Query {
  static constexpr int kSteps = D / 16;  // products over the head dimension
  static constexpr bool kScaled = Cache::kBytes == 1;

  uint32_t values[kSteps][N][2];
  // What makes a product a power of 2, or with a cap the argument of tanh's exponential: of all
  // rows, on an fp8 cache of each.
  float unit;
  float factors[N][2];

  __device__ __forceinline__ float factor(int n, int c) const {
    if constexpr (kScaled) return factors[n][c];
    return unit;
  }

  __device__ __forceinline__ void load(const Arguments& a, const Shared& shared, int stage,
                                       int head, int first_row, int lane) {
    const float scale = a.problem.scale * (kScaled ? key_scale(a, head) : 1.0f);
    unit = a.problem.cap > 0 ? scale * a.cap_unit : scale * kLog2E;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int row = stage * 8 * N * a.row_groups + first_row + 8 * n + lane / 4;
      const uint8_t* const at = shared.query + row * shared.query_stride;
      if constexpr (!kScaled) {
        read_bf16(at, n, lane % 4);
        continue;
      }
      float row_scale = 1;
      if (a.problem.fp8_query) {
        read_fp8(at, n, lane % 4);
        row_scale = shared.query_scale[row];
      } else {
        row_scale = quantize_bf16(at, n, lane % 4);
      }
      // Lane l has the scale of row l / 4 and needs those of its two columns.
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        factors[n][c] = unit * __shfl_sync(~0u, row_scale, (lane % 4 * 2 + c) * 4);
      }
    }
  }

 private:
  __device__ __forceinline__ static float key_scale(const Arguments& a, int head) {
    const ScaleKind kind = a.problem.k_scale;
    if (kind == ScaleKind::kTensor) return a.k_scale[0];
    return kind == ScaleKind::kHead ? a.k_scale[head] : 1.0f;
  }

  __device__ __forceinline__ void read_bf16(const uint8_t* row, int n, int quarter) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint8_t* const at = row + (16 * k + quarter * 2) * 2;
      values[k][n][0] = *reinterpret_cast<const uint32_t*>(at);
      values[k][n][1] = *reinterpret_cast<const uint32_t*>(at + 16);
    }
  }

  // In the order of Fp8Cache::keys.
  __device__ __forceinline__ void read_fp8(const uint8_t* row, int n, int quarter) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint32_t four = *reinterpret_cast<const uint32_t*>(row + 16 * k + quarter * 4);
      unpack_e4m3(four, values[k][n][0], values[k][n][1]);
    }
  }

  __device__ __forceinline__ static float4 four_bf16(const uint8_t* row, int k, int quarter) {
    const uint2 pairs = *reinterpret_cast<const uint2*>(row + (16 * k + quarter * 4) * 2);
    return {__uint_as_float(pairs.x << 16), __uint_as_float(pairs.x & 0xffff0000u),
            __uint_as_float(pairs.y << 16), __uint_as_float(pairs.y & 0xffff0000u)};
  }

  // Quantised per row as jax_hpc.fp8 does, bit for bit; returns the scale.
  __device__ __forceinline__ float quantize_bf16(const uint8_t* row, int n, int quarter) {
    float largest = 0;
    bool is_nan = false;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const float4 v = four_bf16(row, k, quarter);
      largest = fmaxf(largest, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
      is_nan = is_nan || v.x != v.x || v.y != v.y || v.z != v.z || v.w != v.w;
    }
    if (is_nan) largest = NAN;
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const float other = __shfl_xor_sync(~0u, largest, step);
      largest = largest != largest || other != other ? NAN : fmaxf(largest, other);
    }
    constexpr float kSmallestScale = 0x1p-126f;
    float scale = largest * (1.0f / 448.0f);
    if (scale < kSmallestScale) scale = 1;
    const float reciprocal = __fdiv_rn(1.0f, scale);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const float4 v = four_bf16(row, k, quarter);
      values[k][n][0] = round_to_e4m3(v.x * reciprocal, v.y * reciprocal);
      values[k][n][1] = round_to_e4m3(v.z * reciprocal, v.w * reciprocal);
    }
    return scale;
  }
};

}  // namespace jax_hpc::decode_attention
