// Rotary embedding of a lane's values: where they lie in a head, and by which angles they turn.
#pragma once

#include "qk_norm_rope_append/config.h"
#include "qk_norm_rope_append/values.cuh"

namespace jax_hpc::qk_norm_rope_append {

// Rotary widths of whole chunks: a lane holds both values of each of its pairs, so that nothing
// passes between lanes, and its angles are four vectors of the table's row.
template <int kHeadDim>
struct ChunkRotation {
  float cosine[kChunk];
  float sine[kChunk];
  bool turns_first;
  bool turns_second;

  // Of lane `place` of a head. In half style a chunk and the one rotary / 2 behind it; of the
  // values that are not rotated, which lie behind, any two chunks.
  static __device__ Places places(const Problem& p, int place) {
    const int pair = place * kChunk;
    if (p.options.style == Style::kInterleaved) return {pair, pair + kHeadDim / 2};
    const int half = p.rotary / 2;
    return pair < half ? Places{pair, pair + half} : Places{pair + half, pair + kHeadDim / 2};
  }

  __device__ ChunkRotation(const Problem& p, const float* row, Places at, int)
      : cosine{}, sine{}, turns_first(at.first < p.rotary), turns_second(at.second < p.rotary) {
    if (p.options.style == Style::kHalf) {
      if (!turns_first) return;
      read(row + at.first, cosine);
      read(row + at.first + p.rotary / 2, sine);
    } else {
      if (turns_first) read_four(row + at.first / 2, p.rotary, 0);
      if (turns_second) read_four(row + at.second / 2, p.rotary, kChunk / 2);
    }
  }

  // The whole warp calls it; a head is left as it is where `wanted` is false.
  __device__ void turn(const Problem& p, float (&x)[kValues], bool wanted) const {
    if (!wanted) return;
    if (p.options.style == Style::kHalf) {
      if (!turns_first) return;
#pragma unroll
      for (int i = 0; i < kChunk; ++i) turn_pair(x[i], x[i + kChunk], i);
    } else {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        if (i < kChunk / 2 ? turns_first : turns_second) turn_pair(x[2 * i], x[2 * i + 1], i);
      }
    }
  }

 private:
  __device__ void read_four(const float* from, int rotary, int index) {
    const float4 c = __ldg(reinterpret_cast<const float4*>(from));
    const float4 s = __ldg(reinterpret_cast<const float4*>(from + rotary / 2));
    cosine[index] = c.x, cosine[index + 1] = c.y, cosine[index + 2] = c.z, cosine[index + 3] = c.w;
    sine[index] = s.x, sine[index + 1] = s.y, sine[index + 2] = s.z, sine[index + 3] = s.w;
  }
  __device__ void turn_pair(float& a, float& b, int i) const {
    const float turned = a * cosine[i] - b * sine[i];
    b = b * cosine[i] + a * sine[i];
    a = turned;
  }
};

// Any even rotary width: values find their pairs in shared memory, one by one. For models whose
// widths no vector fits; nothing here is meant to be fast.
template <int kHeadDim>
struct AnyRotation {
  const float* row;
  Places at;
  float* head;

  static __device__ Places places(const Problem&, int place) {
    return {place * kChunk, place * kChunk + kHeadDim / 2};
  }

  __device__ AnyRotation(const Problem&, const float* row, Places at, int head_of_cta)
      : row(row), at(at) {
    __shared__ float heads[kMostWarps * heads_of_warp(kHeadDim) * kHeadDim];
    head = heads + head_of_cta * kHeadDim;
  }

  __device__ void turn(const Problem& p, float (&x)[kValues], bool wanted) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) head[index(i)] = x[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (wanted && index(i) < p.rotary) x[i] = turned(p, x[i], index(i));
    }
    __syncwarp();
  }

 private:
  __device__ int index(int i) const { return (i < kChunk ? at.first : at.second - kChunk) + i; }
  __device__ float turned(const Problem& p, float x, int index) const {
    const int half = p.rotary / 2;
    const bool is_half = p.options.style == Style::kHalf;
    const bool is_first = is_half ? index < half : index % 2 == 0;
    const int step = is_half ? half : 1;
    const int pair = !is_half ? index / 2 : is_first ? index : index - half;
    const float other = head[is_first ? index + step : index - step];
    const float across = other * __ldg(row + half + pair);
    return x * __ldg(row + pair) + (is_first ? -across : across);
  }
};

}  // namespace jax_hpc::qk_norm_rope_append
