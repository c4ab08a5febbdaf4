// The threads that choose one token's experts: a warp or a CTA, with the same operations.
#pragma once

#include <cstdint>

#include "common/launch.h"

namespace jax_hpc::route_topk {

constexpr unsigned kWholeWarp = 0xffffffffu;

// The same order of additions in every lane and every run.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value = __fadd_rn(value, __shfl_xor_sync(kWholeWarp, value, offset));
  }
  return value;
}

struct WarpTeam {
  static constexpr int kSize = kWarpSize;

  __device__ int rank() const { return static_cast<int>(threadIdx.x) % kWarpSize; }
  __device__ void sync() { __syncwarp(); }
  __device__ uint32_t max(uint32_t value) { return __reduce_max_sync(kWholeWarp, value); }
  __device__ uint32_t min(uint32_t value) { return __reduce_min_sync(kWholeWarp, value); }
  __device__ float sum(float value) { return warp_sum(value); }
};

template <int Warps>
struct CtaTeam {
  static constexpr int kSize = Warps * kWarpSize;

  // Two rows in turn: a thread may still read the last operation's while others write the next's.
  struct Shared {
    uint32_t parts[2][Warps];
  };

  __device__ explicit CtaTeam(Shared& shared) : shared_(shared) {}
  __device__ int rank() const { return static_cast<int>(threadIdx.x); }
  __device__ void sync() { __syncthreads(); }

  __device__ uint32_t max(uint32_t value) {
    const uint32_t* parts = exchange(__reduce_max_sync(kWholeWarp, value));
    uint32_t all = parts[0];
#pragma unroll
    for (int i = 1; i < Warps; ++i) all = ::max(all, parts[i]);
    return all;
  }
  __device__ uint32_t min(uint32_t value) {
    const uint32_t* parts = exchange(__reduce_min_sync(kWholeWarp, value));
    uint32_t all = parts[0];
#pragma unroll
    for (int i = 1; i < Warps; ++i) all = ::min(all, parts[i]);
    return all;
  }
  __device__ float sum(float value) {
    const uint32_t* parts = exchange(__float_as_uint(warp_sum(value)));
    float all = __uint_as_float(parts[0]);
#pragma unroll
    for (int i = 1; i < Warps; ++i) all = __fadd_rn(all, __uint_as_float(parts[i]));
    return all;
  }

 private:
  // Every warp's part, seen by all threads.
  __device__ const uint32_t* exchange(uint32_t part) {
    uint32_t* parts = shared_.parts[turn_];
    turn_ ^= 1;
    if (threadIdx.x % kWarpSize == 0) parts[threadIdx.x / kWarpSize] = part;
    __syncthreads();
    return parts;
  }

  Shared& shared_;
  int turn_ = 0;
};

}  // namespace jax_hpc::route_topk
