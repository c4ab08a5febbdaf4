// The products of the two kinds of cache: scores from tiles of queries and keys, sums of values
// from probabilities in registers.
#pragma once

#include "prefill_attention/shared.cuh"

namespace jax_hpc::prefill_attention {

// Probabilities of 64 rows and 128 tokens as pairs of bf16, scores[2 i] and the next; values lie as
// in the cache.
template <class Cache, int D>
struct Products {
  static constexpr int kWords = kTileTokens / 4;

  static __device__ __forceinline__ void scores(float (&d)[kTileTokens / 2], uint64_t a, uint64_t b,
                                                bool accumulate) {
    Wgmma<kTileTokens>::multiply(d, a, b, accumulate);
  }
  static __device__ __forceinline__ void pack(const float (&scores)[kTileTokens / 2],
                                              uint32_t (&weights)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) weights[i] = pack_bf16(scores[2 * i], scores[2 * i + 1]);
  }
  // `values` is the lower half of a descriptor.
  static __device__ __forceinline__ void add_values(float (&out)[D / 2],
                                                    const uint32_t (&weights)[kWords],
                                                    uint32_t values) {
    using TileOf = Tile<Cache, D>;
    constexpr uint32_t kColumnStride = uint32_t{TileOf::kColumnBytes / 16 - 1} << 16;
    constexpr int kStep = 16 * TileOf::kRowBytes / 16;  // of 16 tokens
#pragma unroll
    for (int k = 0; k < kTileTokens / 16; ++k) {
      WgmmaValues<D>::multiply(out, weights + 4 * k,
                               TileOf::descriptor(values + kColumnStride + k * kStep));
    }
  }
};

// As e4m3: a word is four tokens of a row, in the order of Checker::transpose. Sums of a tile start
// afresh, for the tensor cores keep fewer bits of them than float32 has.
template <int D>
struct Products<Fp8Cache, D> {
  static constexpr int kWords = kTileTokens / 8;

  static __device__ __forceinline__ void scores(float (&d)[kTileTokens / 2], uint64_t a, uint64_t b,
                                                bool accumulate) {
    WgmmaE4m3<kTileTokens>::multiply(d, a, b, accumulate);
  }
  static __device__ __forceinline__ void pack(const float (&scores)[kTileTokens / 2],
                                              uint32_t (&weights)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const float* const at = scores + i / 2 * 8 + i % 2 * 2;  // 16 tokens, a row
      weights[i] = pack_e4m3(at[0], at[1], at[4], at[5]);
    }
  }
  static __device__ __forceinline__ void add_values(float (&sums)[D / 2],
                                                    const uint32_t (&weights)[kWords],
                                                    uint32_t values) {
#pragma unroll
    for (int k = 0; k < kTileTokens / 32; ++k) {
      WgmmaE4m3Values<D>::multiply(sums, weights + 4 * k, descriptor(values + 2 * k), k > 0);
    }
  }
};

}  // namespace jax_hpc::prefill_attention
