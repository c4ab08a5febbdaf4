// Rotary embedding of a lane's values: where they lie in a head, and by which angles they turn.
#pragma once

#include "common/ptx.cuh"
#include "qk_norm_rope_append/config.h"
#include "qk_norm_rope_append/values.cuh"

namespace jax_hpc::qk_norm_rope_append {

// Eight values times those of a weight in shared memory, from `first` on.
template <int kHeadDim>
__device__ __forceinline__ void weigh_chunk(SharedAddress weight, int first, float* x) {
  float values[kChunk];
  read_split<kHeadDim>(weight, first, values);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) x[i] *= values[i];
}

// Both chunks of a head.
template <int kHeadDim>
__device__ __forceinline__ void weigh(SharedAddress weight, Places at, float (&x)[kValues]) {
  weigh_chunk<kHeadDim>(weight, at.first, x);
  weigh_chunk<kHeadDim>(weight, at.second, x + kChunk);
}

// A row of the table is in shared memory, as are weights.
//
// Rotary widths of whole chunks: a lane holds both values of each of its pairs, so that nothing
// passes between lanes, and its angles are four vectors of the row. Plain is half style over the
// whole head, after the norm: the most frequent by far.
template <int kHeadDim, bool kPlain>
struct ChunkRotation {
  static constexpr int kMostCtasOfSm = kCtasOfSm;
  static constexpr bool kIsPlain = kPlain;
  static constexpr bool kSplitsRow = kPlain;  // interleaved, lanes read a vector each
  static constexpr int kRowAlignment = 16;

  // Of lane `place` of a head. In half style a chunk and the one rotary / 2 behind it; of the
  // values that are not rotated, which lie behind, any two chunks.
  static __device__ Places places(const Problem& p, int place) {
    const int pair = place * kChunk;
    if (kPlain || p.options.style == Style::kInterleaved) return {pair, pair + kHeadDim / 2};
    const int half = p.rotary / 2;
    return pair < half ? Places{pair, pair + half} : Places{pair + half, pair + kHeadDim / 2};
  }

  __device__ explicit ChunkRotation(int) {}

  // Weighs a head, if `weighs`, and turns it. The whole warp calls it; a head is left as it is
  // where `wanted` is false.
  __device__ void turn(const Problem& p, SharedAddress row, SharedAddress weight, bool weighs,
                       Places at, float (&x)[kValues], bool wanted) const {
    if (!wanted) return;
    if (weighs) weigh<kHeadDim>(weight, at, x);
    if (kPlain) {
      const SharedAddress cosines = row + 2 * at.first;
      const SharedAddress odd = cosines + split_vector<kHeadDim>(1);
      constexpr SharedAddress kSines = split_vector<kHeadDim>(kHeadDim / 8);
      turn_four<1, kChunk>(cosines, cosines + kSines, x);
      turn_four<1, kChunk>(odd, odd + kSines, x + 4);
      return;
    }
    const int rotary = p.rotary;
    const SharedAddress sines = row + 4 * (rotary / 2);
    if (p.options.style == Style::kHalf) {
      if (at.first >= rotary) return;
#pragma unroll
      for (int i = 0; i < kChunk; i += 4) {
        turn_four<1, kChunk>(row + 4 * (at.first + i), sines + 4 * (at.first + i), x + i);
      }
    } else {
      if (at.first < rotary) turn_four<2, 1>(row + 2 * at.first, sines + 2 * at.first, x);
      if (at.second < rotary) {
        turn_four<2, 1>(row + 2 * at.second, sines + 2 * at.second, x + kChunk);
      }
    }
  }

 private:
  // Pairs x[i * kStep] and x[i * kStep + kApart].
  template <int kStep, int kApart>
  static __device__ void turn_four(SharedAddress cosines, SharedAddress sines, float* x) {
    const float4 c = load_shared(cosines);
    const float4 s = load_shared(sines);
    turn_pair(x[0], x[kApart], c.x, s.x);
    turn_pair(x[kStep], x[kStep + kApart], c.y, s.y);
    turn_pair(x[2 * kStep], x[2 * kStep + kApart], c.z, s.z);
    turn_pair(x[3 * kStep], x[3 * kStep + kApart], c.w, s.w);
  }
  static __device__ void turn_pair(float& a, float& b, float cosine, float sine) {
    const float turned = a * cosine - b * sine;
    b = b * cosine + a * sine;
    a = turned;
  }
};

// Any even rotary width: values find their pairs in shared memory, one by one. For models whose
// widths no vector fits; nothing here is meant to be fast.
template <int kHeadDim>
struct AnyRotation {
  static constexpr int kMostCtasOfSm = kCtasOfSm - 2;  // 72 registers do not suffice
  static constexpr bool kIsPlain = false;
  static constexpr bool kSplitsRow = false;
  static constexpr int kRowAlignment = 4;
  float* head;

  static __device__ Places places(const Problem&, int place) {
    return {place * kChunk, place * kChunk + kHeadDim / 2};
  }

  __device__ explicit AnyRotation(int head_of_cta) {
    __shared__ float heads[kMostWarps * heads_of_warp(kHeadDim) * kHeadDim];
    head = heads + head_of_cta * kHeadDim;
  }

  __device__ void turn(const Problem& p, SharedAddress row, SharedAddress weight, bool weighs,
                       Places at, float (&x)[kValues], bool wanted) const {
    if (wanted && weighs) weigh<kHeadDim>(weight, at, x);
#pragma unroll
    for (int i = 0; i < kValues; ++i) head[index(at, i)] = x[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (wanted && index(at, i) < p.rotary) x[i] = turned(p, row, x[i], index(at, i));
    }
    __syncwarp();
  }

 private:
  static __device__ int index(Places at, int i) {
    return (i < kChunk ? at.first : at.second - kChunk) + i;
  }
  __device__ float turned(const Problem& p, SharedAddress row, float x, int index) const {
    const int half = p.rotary / 2;
    const bool is_half = p.options.style == Style::kHalf;
    const bool is_first = is_half ? index < half : index % 2 == 0;
    const int step = is_half ? half : 1;
    const int pair = !is_half ? index / 2 : is_first ? index : index - half;
    const float other = head[is_first ? index + step : index - step];
    const float across = other * load_shared_float(row + (half + pair) * 4);
    return x * load_shared_float(row + pair * 4) + (is_first ? -across : across);
  }
};

}  // namespace jax_hpc::qk_norm_rope_append
