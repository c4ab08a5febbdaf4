// What a lane holds of a merged row: its columns of some pieces, added up by log-sum-exp.
#pragma once

#include <type_traits>

#include "decode_attention/arguments.cuh"
#include "decode_attention/cut_pairs.cuh"

namespace jax_hpc::decode_attention {

// Some pieces of a row, for a lane: of each the state, and its values from the lane's column on.
struct Strand {
  const float2* state;  // of the first piece
  const float* values;
  int64_t first_hop;  // rows of the workspace from the first to the second,
  int64_t hop;        // and to each one after that
  int count;          // none where not positive
  int most;           // of any lane of the warp
};

// Where a lane's share of a merged row goes, and what it is multiplied with.
struct Target {
  __nv_bfloat16* out;
  float* lse;  // null where it is not for this lane
  float scale;
  float sink;  // as a power of 2
};

// Keeps the compiler from computing it later than here.
template <class T>
__device__ __forceinline__ void keep_in_register(T& value) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(value));
  } else if constexpr (std::is_same_v<T, float>) {
    asm volatile("" : "+f"(value));
  } else {
    asm volatile("" : "+r"(value));
  }
}

// Of pointers that the compiler has lost sight of.
__device__ __forceinline__ void load_global(float2& to, const float2* from) {
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(to.x), "=f"(to.y) : "l"(from) : "memory");
}
__device__ __forceinline__ void load_global(float (&to)[4], const float* from) {
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
               : "l"(from)
               : "memory");
}

// A lane's share of a row's merged values: kValues from some column on.
template <int D>
struct Merged {
  static constexpr int kValues = D / kWarpSize;
  float base = kNoBase;
  float total = 0;
  float values[kValues] = {};

  // Others (base, total) and their values, all relative to the largest base of all.
  template <int Count>
  __device__ __forceinline__ void add(const float2 (&states)[Count],
                                      const float (&others)[Count][kValues]) {
    float top = base;
#pragma unroll
    for (int i = 0; i < Count; ++i) top = fmaxf(top, states[i].x);
    const float own = power_of_2(base - top);
    total *= own;
#pragma unroll
    for (int j = 0; j < kValues; ++j) values[j] *= own;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      const float its = power_of_2(states[i].x - top);
      total = fmaf(its, states[i].y, total);
#pragma unroll
      for (int j = 0; j < kValues; ++j) values[j] = fmaf(its, others[i][j], values[j]);
    }
    base = top;
  }

  // Of this lane, from a workspace's row on.
  __device__ __forceinline__ static void load(float (&to)[kValues], const float* from) {
    if constexpr (kValues == 4) {
      load_global(to, from);
    } else {
      float2 pair;
      load_global(pair, reinterpret_cast<const float2*>(from));
      to[0] = pair.x, to[1] = pair.y;
    }
  }
  __device__ __forceinline__ static void load_shared(float (&to)[kValues], const float* from) {
#pragma unroll
    for (int j = 0; j < kValues; ++j) to[j] = from[j];
  }

  // Takes in what the lane `distance` away has.
  __device__ __forceinline__ void add_lane(int distance) {
    float other[1][kValues];
    for (int i = 0; i < kValues; ++i) other[0][i] = __shfl_xor_sync(~0u, values[i], distance);
    const float2 state[1] = {
        {__shfl_xor_sync(~0u, base, distance), __shfl_xor_sync(~0u, total, distance)}};
    add(state, other);
  }

  // The next pieces, all under way at once.
  template <int Count>
  __device__ __forceinline__ void add_next(Strand& s) {
    float2 states[Count];
    float others[Count][kValues] = {};
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      states[i] = {kNoBase, 0};
      if (i < s.count) {
        load_global(states[i], s.state);
        load(others[i], s.values);
      }
      const int64_t hop = i == 0 ? s.first_hop : s.hop;
      s.state += hop;
      s.values += hop * D;
    }
    add(states, others);
    s.first_hop = s.hop;
    s.count -= Count;
    s.most -= Count;
  }

  // By as few instructions as the pieces need: each is met for the first time, and takes 5 cycles.
  __device__ __forceinline__ void add_strand(Strand s) {
#pragma unroll 1
    while (s.most > 4) add_next<kPiecesAtOnce>(s);
    if (s.most > 2) {
      add_next<4>(s);
    } else if (s.most > 0) {
      add_next<2>(s);
    }
  }

  __device__ __forceinline__ void write(const Target& target) const {
    const Closing closing = close_row(base, total, target.sink);
    const float weight = closing.weight * target.scale;
    uint32_t packed[kValues / 2];
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      packed[i] = pack_bf16(values[2 * i] * weight, values[2 * i + 1] * weight);
    }
    if constexpr (kValues == 4) {
      *reinterpret_cast<uint2*>(target.out) = make_uint2(packed[0], packed[1]);
    } else {
      *reinterpret_cast<uint32_t*>(target.out) = packed[0];
    }
    if (target.lse != nullptr) *target.lse = closing.log_sum_exp();
  }
};

}  // namespace jax_hpc::decode_attention
