// Entry point of a layer of experts: raw pointers and a stream.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fused_moe/config.h"

namespace jax_hpc::fused_moe {

constexpr int kMostExperts = 512;
constexpr int kMostTopK = 128;
constexpr int64_t kMostPairs = int64_t{1} << 24;
constexpr int64_t kMostGroups = int64_t{1} << 30;  // of 128 columns, in all tokens together
// Pairs that one CTA sorts. With more, several CTAs count first, in a launch of their own.
constexpr int kPairsOfCta = 8192;

constexpr int index_ctas(const Problem& p) {
  return static_cast<int>((num_pairs(p) + kPairsOfCta - 1) / kPairsOfCta);
}
constexpr int64_t num_counts(const Problem& p) {
  return index_ctas(p) > 1 ? int64_t{index_ctas(p)} * blocks_of(p.experts, 2) : 0;
}
// Enough for every Config.
constexpr int64_t tile_capacity(const Problem& p) { return max_tiles(p, Config{8, 1}); }
constexpr int64_t num_arrivals(const Problem& p) {
  return p.format == Format::kBlock ? tile_capacity(p) * blocks_of(p.inter, kBlock) : 0;
}
// In values of bf16: of a row its outputs, in float32 of kBf16, or before them its intermediate in
// float32.
constexpr int64_t num_outputs(const Problem& p) {
  if (p.format == Format::kBf16) return num_pairs(p) * 2 * p.hidden;
  const bool has_floats = p.format == Format::kBlock && p.hidden < 2 * p.inter;
  return num_pairs(p) * (has_floats ? 2 * p.inter : p.hidden);
}

// What the kernels of a call write for each other. All arrays are 16-byte aligned.
struct Workspace {
  int* header;       // [4], of which Index has two
  Tile* tiles;       // [tile_capacity]
  int* row_token;    // [pairs]
  int* pair_row;     // [pairs]: the row of a pair, -1 where it has no expert here
  uint32_t* counts;  // [num_counts], of two experts each; null where there are none
  void* x;           // e4m3 [tokens, hidden]; null where x is taken as it is
  float* x_scale;    // [tokens, blocks_of(hidden, 128)], kBlock; null where x is taken as it is
  RowBuffers rows;
};

// All arrays are row-major and 16-byte aligned.
struct Arrays {
  const void* x;                 // bf16, or of fp8 experts e4m3 with x_is_fp8, [tokens, hidden]
  const float* x_scale;          // [tokens, blocks_of(hidden, 128)] of an fp8 x, kBlock; else null
  const int* topk_ids;           // [tokens, top_k]
  const float* topk_weights;     // [tokens, top_k]
  const int* expert_offset;      // []
  const void* shared_output;     // bf16 [tokens, hidden], or null
  const float* identity_weight;  // [tokens], or null
  void* out;                     // bf16 [tokens, hidden]
  Weights weights;
  Workspace workspace;
  bool x_is_fp8;
};

constexpr bool quantizes_x(Format format, bool x_is_fp8) {
  return format != Format::kBf16 && !x_is_fp8;
}

// Kernels that a call launches, one after the other.
constexpr int num_launches(const Problem& p) { return index_ctas(p) > 1 ? 5 : 4; }

// cudaErrorInvalidValue for a problem beyond the limits above. `overlaps`:
// each kernel may start while the one before it ends. The results do not depend on it.
cudaError_t launch(const Problem& problem, const Config& config, const Arrays& arrays,
                   bool overlaps, int num_sms, cudaStream_t stream);

// Its stages, but for the products of gemm.h.
cudaError_t launch_prepare(const Problem& problem, const Config& config, const Arrays& arrays,
                           bool overlaps, cudaStream_t stream);
cudaError_t launch_reduce(const Problem& problem, const Arrays& arrays, bool overlaps,
                          cudaStream_t stream);

}  // namespace jax_hpc::fused_moe
