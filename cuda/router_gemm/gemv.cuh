// Router product for a single token: a CTA for each expert, which exchanges nothing with others.
#pragma once

#include <cuda_bf16.h>

#include "common/launch.h"
#include "common/ptx.cuh"
#include "router_gemm/config.h"

namespace jax_hpc::router_gemm {

constexpr int kGemvThreads = 256;
constexpr int kGemvWarps = kGemvThreads / kWarpSize;
// Hidden values of a vector of 16 bytes.
constexpr int kVectorHidden = 8;
// A barrier lies behind the rows in shared memory.
constexpr int64_t gemv_shared_bytes(const Problem& p) {
  return gemv_row_bytes(p) + int64_t{sizeof(uint64_t)};
}

__device__ __forceinline__ void add_products(float& sum, uint32_t a, uint32_t b) {
  sum = fmaf(__uint_as_float(a << 16), __uint_as_float(b << 16), sum);
  sum = fmaf(__uint_as_float(a & 0xffff0000u), __uint_as_float(b & 0xffff0000u), sum);
}

// Sum over groups of so many consecutive lanes.
template <int Lanes>
__device__ __forceinline__ float lane_sum(float sum) {
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  return sum;
}

// Grid: x = experts, y = tokens. The copy engine brings whole rows: ptxas would not keep several
// loads of a thread under way at once (it sinks them to their uses).
template <int Terms>
__global__ void __launch_bounds__(kGemvThreads)
    gemv_kernel(Problem p, const __nv_bfloat16* __restrict__ x,
                const __nv_bfloat16* __restrict__ parts, float* __restrict__ logits) {
  extern __shared__ uint4 gemv_memory[];
  __shared__ float of_warps[kGemvWarps];
  const SharedAddress memory = shared_address(gemv_memory);
  const auto thread = static_cast<int>(threadIdx.x);
  const auto expert = static_cast<int>(blockIdx.x);
  const auto token = static_cast<int>(blockIdx.y);
  const int row_bytes = p.hidden * int{sizeof(__nv_bfloat16)};
  const SharedAddress barrier = memory + (1 + Terms) * row_bytes;
  if (thread == 0) {
    init_barrier(barrier, 1);
    fence_barrier_init();
    arrive_expecting(barrier, static_cast<uint32_t>((1 + Terms) * row_bytes));
    const __nv_bfloat16* weights = parts + static_cast<int64_t>(expert) * p.hidden;
#pragma unroll
    for (int i = 0; i < Terms; ++i) {
      copy_bytes(memory + (1 + i) * row_bytes, weights, row_bytes, barrier);
      weights += static_cast<int64_t>(p.experts) * p.hidden;
    }
    copy_bytes(memory, x + static_cast<int64_t>(token) * p.hidden, row_bytes, barrier);
  }
  __syncthreads();
  wait(barrier, 0);
  let_next_kernel_start();

  const int vectors = p.hidden / kVectorHidden;
  float sums[Terms] = {};
  for (int at = thread; at < vectors; at += kGemvThreads) {
    const uint4 values = gemv_memory[at];
#pragma unroll
    for (int i = 0; i < Terms; ++i) {
      const uint4 weights = gemv_memory[(1 + i) * vectors + at];
      add_products(sums[i], values.x, weights.x);
      add_products(sums[i], values.y, weights.y);
      add_products(sums[i], values.z, weights.z);
      add_products(sums[i], values.w, weights.w);
    }
  }
  float sum = sums[Terms - 1];
#pragma unroll
  for (int i = Terms - 2; i >= 0; --i) sum = fmaf(sum, 1.0f / 256, sums[i]);
  sum = lane_sum<kWarpSize>(sum);
  if (thread % kWarpSize == 0) of_warps[thread / kWarpSize] = sum;
  __syncthreads();
  if (thread >= kWarpSize) return;
  sum = lane_sum<kGemvWarps>(of_warps[thread % kGemvWarps]);
  if (thread == 0) logits[static_cast<int64_t>(token) * p.experts + expert] = sum;
}

}  // namespace jax_hpc::router_gemm
