// x in e4m3, or in bf16 as it is, in the order of the index, for the wide products: the copy engine
// takes rows that lie together.
#pragma once

#include "common/launch.h"
#include "fused_moe/quantize.cuh"

namespace jax_hpc::fused_moe {

// Rows of x by row of the index, with their scales for kBlock.
struct Sorted {
  uint8_t* values;
  float* scale;
};

// The tokens of a CTA's segment. A thread has several chunks at once of 16 values, eight threads
// those of a group; or of 8 values of bf16, so that a warp writes whole sectors.
template <Format format>
class SegmentTokens {
 public:
  __device__ __forceinline__ SegmentTokens(const Problem& p, const Arrays& a, int tokens)
      : p_(p),
        a_(a),
        first_token_(static_cast<int>(blockIdx.x) * tokens),
        groups_(blocks_of(p.hidden, kBlock)),
        lanes_(kCopies ? p.hidden / kValues : groups_ * kGroupLanes),
        chunks_(min(tokens, p.tokens - first_token_) * lanes_) {}

  // Asks for the values of chunks from `first` on.
  __device__ __forceinline__ void read(int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const Place place = place_of(first, i);
      low_[i] = uint4{};
      if constexpr (!kCopies) high_[i] = uint4{};
      if (!place.has_values) continue;
      const int64_t value = int64_t{first_token_ + place.token} * p_.hidden + place.column;
      const auto* from = static_cast<const uint8_t*>(a_.x) + (a_.x_is_fp8 ? value : 2 * value);
      low_[i] = __ldg(reinterpret_cast<const uint4*>(from));
      if constexpr (!kCopies) {
        if (!a_.x_is_fp8) high_[i] = __ldg(reinterpret_cast<const uint4*>(from) + 1);
      }
    }
  }

  // Quantises all chunks, of which the first ones are read; `rows` are those of the tokens'
  // choices.
  __device__ __forceinline__ void write(const int* rows, const Sorted& to) {
    for (int first = 0; first < chunks_; first += kAtOnce * static_cast<int>(blockDim.x)) {
      if (first > 0) read(first);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const Place place = place_of(first, i);
        float scale = 0.0f;
        uint4 values = low_[i];
        if constexpr (!kCopies) {
          if (!a_.x_is_fp8) {
            values = quantized<kPerGroup>(low_[i], high_[i], a_.weights, scale);
          } else if (kPerGroup && place.exists) {
            scale = __ldg(a_.x_scale + int64_t{first_token_ + place.token} * groups_ +
                          place.column / kBlock);
          }
        }
        if (place.exists) write(rows + place.token * p_.top_k, place, values, scale, to);
      }
    }
  }

 private:
  static constexpr bool kPerGroup = format == Format::kBlock;
  static constexpr bool kCopies = format == Format::kBf16;
  static constexpr int kValues = kCopies ? 8 : kLaneValues;
  static constexpr int kAtOnce = kCopies ? 8 : 4;
  struct Place {
    bool exists;
    bool has_values;
    int token;  // of the segment
    int column;
  };

  __device__ __forceinline__ Place place_of(int first, int i) const {
    const int chunk = first + i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
    const int token = chunk / lanes_;
    const int column = (chunk - token * lanes_) * kValues;
    const bool exists = chunk < chunks_;
    return {exists, exists && column < p_.hidden, token, column};
  }

  __device__ __forceinline__ void write(const int* rows, const Place& place, const uint4& values,
                                        float scale, const Sorted& to) const {
    const bool has_scale = kPerGroup && threadIdx.x % kGroupLanes == 0;
#pragma unroll 4
    for (int k = 0; k < p_.top_k; ++k) {
      const int64_t row = rows[k];
      if (row < 0) continue;
      if (place.has_values) {
        *reinterpret_cast<uint4*>(to.values +
                                  (row * p_.hidden + place.column) * value_bytes(format)) = values;
      }
      if (has_scale) to.scale[row * groups_ + place.column / kBlock] = scale;
    }
  }

  const Problem& p_;
  const Arrays& a_;
  int first_token_;
  int groups_;
  int lanes_;  // of a token
  int chunks_;
  uint4 low_[kAtOnce];
  uint4 high_[kCopies ? 1 : kAtOnce];
};

}  // namespace jax_hpc::fused_moe
