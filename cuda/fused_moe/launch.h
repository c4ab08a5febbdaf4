// Entry point of a layer of experts: raw pointers and a stream.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fused_moe/config.h"

namespace jax_hpc::fused_moe {

constexpr int kMostExperts = 512;
constexpr int kMostTopK = 128;
constexpr int64_t kMostPairs = int64_t{1} << 24;
constexpr int kMostTileRows = 256;
constexpr int64_t kMostGroups = int64_t{1} << 30;  // of 128 columns, in all tokens together
constexpr int kAligned = 16;                       // values of which rows are multiples

// Whether it is within these limits and what Problem says. Of no other are the sizes below defined.
constexpr bool is_supported(const Problem& p) {
  if (p.tokens < 1 || p.top_k < 1 || p.experts < 1 || p.hidden < 1 || p.inter < 1) return false;
  if (p.hidden % kAligned != 0 || p.inter % kAligned != 0) return false;
  if (p.format == Format::kBlock && p.block_rows != kBlock && p.block_rows != kBlock / 2) {
    return false;
  }
  const int64_t groups = int64_t{p.tokens} * blocks_of(p.hidden, kBlock);
  return p.experts <= kMostExperts && p.top_k <= kMostTopK && num_pairs(p) <= kMostPairs &&
         groups <= kMostGroups;
}

// Who sorts the pairs: one CTA, or the CTAs of a cluster, which pass each other their counts, or
// many, each the pairs of a segment of the tokens, after a launch of their own that counts them.
enum class Sorting { kOne, kCluster, kSegments };
constexpr int kPairsOfOne = 512;
constexpr int kSortingCluster = 8;
constexpr int kPairsOfCluster = 16384;
constexpr int kSegments = 128;  // more, where one would have more pairs than these:
constexpr int kPairsOfSegment = 4096;

constexpr Sorting sorting_of(const Problem& p) {
  if (num_pairs(p) <= kPairsOfOne) return Sorting::kOne;
  return num_pairs(p) <= kPairsOfCluster ? Sorting::kCluster : Sorting::kSegments;
}
constexpr int segment_tokens(const Problem& p) {
  const int most = kPairsOfSegment / p.top_k;
  const int fair = blocks_of(p.tokens, kSegments);
  return fair < most ? fair : most;
}
constexpr int num_segments(const Problem& p) { return blocks_of(p.tokens, segment_tokens(p)); }
constexpr int64_t num_counts(const Problem& p) {
  return int64_t{num_segments(p)} * blocks_of(p.experts, 2);
}
// Enough for every Config.
constexpr int64_t tile_capacity(const Problem& p) { return max_tiles(p, Config{8, 1}); }
constexpr int64_t num_arrivals(const Problem& p) {
  return p.format == Format::kBlock ? tile_capacity(p) * blocks_of(p.inter, kBlock) : 0;
}
// In values of bf16: of a row its outputs, in float32 of kBf16, or before them its intermediate in
// float32, or for the wide products its x in bf16, or in e4m3 with a scale per 128 values: of 16
// values or more fewer bytes than outputs.
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
  uint32_t* counts;  // [num_counts], of two experts each
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

// cudaErrorInvalidValue for a problem that is not supported. `overlaps`: each kernel may start
// while the one before it ends. The results do not depend on it.
cudaError_t launch(const Problem& problem, const Config& config, const Arrays& arrays,
                   bool overlaps, int num_sms, cudaStream_t stream);

// Its stages, but for the products of gemm.h. To prepare is to quantise x and to make the index,
// and with Config::is_wide to put x in its order.
cudaError_t launch_prepare(const Problem& problem, const Config& config, const Arrays& arrays,
                           bool overlaps, cudaStream_t stream);
// The rows of x that gate-up reads, once they are prepared.
TokenRows prepared_rows(const Problem& problem, const Config& config, const Arrays& arrays);
// Of a slice of the hidden axis, which the kernel before this one writes.
cudaError_t launch_reduce(const Problem& problem, const Config& config, const Arrays& arrays,
                          const Slice& slice, bool overlaps, cudaStream_t stream);

}  // namespace jax_hpc::fused_moe
