// x in e4m3, or in bf16 as it is, in the order of the index, for the wide products: the copy engine
// takes rows that lie together.
#pragma once

#include "common/launch.h"
#include "common/ptx.cuh"
#include "fused_moe/quantize.cuh"

namespace jax_hpc::fused_moe {

// Rows of x by row of the index, with their scales for kBlock.
struct Sorted {
  uint8_t* values;
  float* scale;
};

constexpr int kSortThreads = 256;

// Values of a thread: 16, eight threads those of a group; or 8 of bf16, so that a warp writes whole
// sectors.
__host__ __device__ constexpr int sort_values(Format format) {
  return format == Format::kBf16 ? 8 : kLaneValues;
}
// Groups of columns that a CTA sorts: a token of 4096 values, of bf16 half of one. With eight CTAs
// on an SM, 64 KB of x are asked for at once, 32 KB of bf16, and nothing waits for what is written,
// with eight choices four times as much in the end, of bf16 eight times.
__host__ __device__ constexpr int sort_groups(Format format) {
  return kSortThreads * sort_values(format) / kBlock;
}

// Each thread reads and quantises values of a token before it waits for the index, then writes them
// to the places of all the token's choices. Nothing is read from an L1 that may hold an earlier
// call's x: a small kernel before this one has not run on every SM.
template <Format format>
__global__ __launch_bounds__(kSortThreads, 8) void sort_kernel(const __grid_constant__ Problem p,
                                                               const __grid_constant__ Arrays a,
                                                               const __grid_constant__ Sorted to) {
  constexpr bool kPerGroup = format == Format::kBlock;
  constexpr bool kCopies = format == Format::kBf16;
  constexpr int kValues = sort_values(format);
  constexpr int kLanes = kBlock / kValues;  // of a group
  const int groups = blocks_of(p.hidden, kBlock);
  const int group = static_cast<int>(blockIdx.x) * sort_groups(format) +
                    static_cast<int>(threadIdx.x) / kLanes;  // of all tokens'
  const int token = group / groups;
  const int within = static_cast<int>(threadIdx.x) % kLanes * kValues;
  const int column = (group - token * groups) * kBlock + within;
  const bool has_group = token < p.tokens;
  const bool has_values = has_group && column < p.hidden;
  uint4 values{};
  float scale = 0.0f;
  const int64_t place = int64_t{token} * p.hidden + column;
  const auto* from = static_cast<const uint8_t*>(a.x) + (a.x_is_fp8 ? place : 2 * place);
  if (has_values) values = __ldcg(reinterpret_cast<const uint4*>(from));
  if constexpr (!kCopies) {
    if (!a.x_is_fp8) {
      uint4 high{};
      if (has_values) high = __ldcg(reinterpret_cast<const uint4*>(from) + 1);
      values = quantized<kPerGroup>(values, high, a.weights, scale);
    } else if (kPerGroup && has_group) {
      scale = __ldcg(a.x_scale + group);
    }
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (!has_group) return;
  const int* pair_row = a.workspace.pair_row + int64_t{token} * p.top_k;
  constexpr int kAtOnce = 8;  // choices whose rows are asked for together
  for (int first = 0; first < p.top_k; first += kAtOnce) {
    int rows[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      rows[k] = first + k < p.top_k ? __ldcg(pair_row + first + k) : -1;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (rows[k] < 0) continue;
      const int64_t row = rows[k];
      if (has_values) {
        *reinterpret_cast<uint4*>(to.values + (row * p.hidden + column) * value_bytes(format)) =
            values;
      }
      if (kPerGroup && within == 0) to.scale[row * groups + column / kBlock] = scale;
    }
  }
}

}  // namespace jax_hpc::fused_moe
