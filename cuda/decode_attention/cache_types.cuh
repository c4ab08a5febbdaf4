// How the two kinds of cache become tensor-core operands. The keys of 16 tokens are the rows of
// one operand; of the values, transposed, the head dimension is.
#pragma once

#include <cstdint>

#include "decode_attention/instructions.cuh"

namespace jax_hpc::decode_attention {

// Products in bf16, probabilities as a sum of two: the output's own rounding is then the largest
// error. Probabilities may exceed 1 by 2^kSlack before their base is raised.
struct Bf16Cache {
  static constexpr int kTerms = 2;  // of a probability
  static constexpr int kBytes = 2;
  static constexpr float kBias = 0;
  static constexpr float kSlack = 8;
  static constexpr int kFragments = 1;  // operands that one load of four matrices gives
  static constexpr uint32_t kNotFinite = 0x7f807f80;  // exponents of a pair that is not

  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    return pack_bf16(low, high);
  }
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
    multiply_bf16(d, a, b0, b1);
  }
  static __device__ __forceinline__ void keys(uint32_t (&a)[1][4], const uint32_t (&r)[4]) {
    for (int i = 0; i < 4; ++i) a[0][i] = r[i];
  }
  static __device__ __forceinline__ void values(uint32_t (&a)[1][4], const uint32_t (&r)[4]) {
    for (int i = 0; i < 4; ++i) a[0][i] = r[i];
  }
  // Row (token) and 16-byte column of the address that a lane gives for a load.
  static __device__ __forceinline__ int value_token(int lane) { return lane % 8 + lane / 16 * 8; }
  static __device__ __forceinline__ int value_column(int lane) { return lane / 8 % 2; }
  // Where the two rows of an operand of values lie in the head dimension.
  static __device__ __forceinline__ int first_dim(int lane) { return lane / 4; }
  static constexpr int kSecondDim = 8;
};

// e4m3 values are exact in f16, which has Hopper's full rate where mma.sync's e4m3 form is
// unpacked to f16 anyway; probabilities stay in f16. They are kept below 2^15 and start at 2^7,
// so that tiny ones still are normal numbers.
struct Fp8Cache {
  static constexpr int kTerms = 1;
  static constexpr int kBytes = 1;
  static constexpr float kBias = 7;
  static constexpr float kSlack = 15;
  static constexpr int kFragments = 2;
  static constexpr uint32_t kNotFinite = 0x7c007c00;

  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    return pack_f16(low, high);
  }
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
    multiply_f16(d, a, b0, b1);
  }
  // A register holds four neighbours of the head dimension, of which an operand takes the first
  // two as its columns 2 (l % 4) and the next, the last two as those eight on; the query's operand
  // is read in the same order.
  static __device__ __forceinline__ void keys(uint32_t (&a)[2][4], const uint32_t (&r)[4]) {
    unpack_e4m3(r[0], a[0][0], a[0][2]);
    unpack_e4m3(r[1], a[0][1], a[0][3]);
    unpack_e4m3(r[2], a[1][0], a[1][2]);
    unpack_e4m3(r[3], a[1][1], a[1][3]);
  }
  // A transposed register holds two neighbours of the head dimension of one token, then of the
  // next token. Sorted by dimension they are a pair of tokens for row l / 4 and one for the row
  // eight below, which therefore is the neighbour.
  static __device__ __forceinline__ void values(uint32_t (&a)[2][4], const uint32_t (&r)[4]) {
    constexpr uint32_t kByDimension = 0x3120;
    unpack_e4m3(__byte_perm(r[0], 0, kByDimension), a[0][0], a[0][1]);
    unpack_e4m3(__byte_perm(r[1], 0, kByDimension), a[0][2], a[0][3]);
    unpack_e4m3(__byte_perm(r[2], 0, kByDimension), a[1][0], a[1][1]);
    unpack_e4m3(__byte_perm(r[3], 0, kByDimension), a[1][2], a[1][3]);
  }
  static __device__ __forceinline__ int value_token(int lane) { return lane % 16; }
  static __device__ __forceinline__ int value_column(int lane) { return lane / 16; }
  static __device__ __forceinline__ int first_dim(int lane) { return lane / 4 * 2; }
  static constexpr int kSecondDim = 1;
};

}  // namespace jax_hpc::decode_attention
