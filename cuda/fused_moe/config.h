// What a layer of experts is, how its work is cut, and what its kernels pass to each other.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <ostream>

namespace jax_hpc::fused_moe {

constexpr unsigned kWholeWarp = ~0u;  // all lanes, as the mask of a shuffle or a vote

// Values that share a scale of an activation, and columns that share one of a block-scaled weight.
constexpr int kBlock = 128;

enum class Format {
  kTensor,  // a scale per weight matrix, static scales of the activations
  kBlock,   // a scale per block of a weight, and per row and 128 columns of an activation
  kBf16,    // bf16 weights and activations, without scales
};

// Of a weight, and of an activation as the products take it.
__host__ __device__ constexpr int value_bytes(Format format) {
  return format == Format::kBf16 ? 2 : 1;
}

// Extents must not be zero; hidden and inter are multiples of 16.
struct Problem {
  int tokens;
  int top_k;
  int experts;  // on this rank
  int hidden;
  int inter;
  Format format;
  int block_rows;  // rows of inter that share a weight scale: 128, or 64; kBlock only
  // Experts of all ranks, among which tokens choose; a hint for how work is cut. 0: `experts`.
  int chosen_among = 0;
};

__host__ __device__ constexpr int64_t num_pairs(const Problem& p) {
  return int64_t{p.tokens} * p.top_k;
}
// As far as the sizes tell: the experts that share the pairs, and an expert's rows.
constexpr int sharing_experts(const Problem& p) {
  return p.chosen_among > p.experts ? p.chosen_among : p.experts;
}
constexpr double mean_rows(const Problem& p) {
  return static_cast<double>(num_pairs(p)) / sharing_experts(p);
}
__host__ __device__ constexpr int blocks_of(int extent, int block) {
  return (extent + block - 1) / block;
}

// Warpgroups that multiply a tile side by side, each 64 weight rows of its own. Two need registers
// for 128 rows each, which leaves room for one CTA on an SM; of bf16, whose sums stay in the tensor
// cores, four find room, and read a tile's rows half as often.
constexpr int warpgroups_of(Format format, int tile_rows) {
  if (tile_rows <= 64) return 1;
  return format == Format::kBf16 ? 4 : 2;
}

// How every stage cuts the work. Made by choose() alone (heuristics.h).
struct Config {
  int tile_rows;  // rows of a tile: 8, 16, 32, 64 or 128, or what is_wide says
  // Pieces of the hidden axis that a gate-up tile multiplies side by side, 1 or 4: with 4 a
  // warpgroup's task is 8 columns of the intermediate instead of 32, so that a single token keeps
  // all SMs busy.
  int gate_up_pieces;
  // The products for many rows an expert (wide.cuh): tiles of a multiple of 32 rows, up to 192, of
  // kBf16 256, and of kBlock a multiple of 64, with blocks of 128 rows.
  bool is_wide = false;
  // Slices of the hidden axis (slice_of) that down writes and the reduction reads in turn. None is
  // empty. There is one of kBlock, whose scales come by way of the L1 cache, which is new only
  // where a kernel waits for the one before; and of the wide products.
  int output_slices = 1;
  // The reduction lets the L2 cache forget the experts' outputs that it has read, where they are
  // whole lines, instead of writing them back to memory.
  bool discards_outputs = false;
};

// Of an expert's outputs, as down leaves them: float32 of bf16 experts, else bf16.
constexpr int output_bytes(Format format) { return format == Format::kBf16 ? 4 : 2; }

// Some of the hidden values.
struct Slice {
  int first;
  int count;
};
// A multiple of what a task of down has, and what a CTA of the reduction has.
constexpr int kSliceUnit = 512;

// Slices are of the same number of units, but for the last.
constexpr Slice slice_of(const Problem& p, const Config& c, int slice) {
  const int units = blocks_of(blocks_of(p.hidden, kSliceUnit), c.output_slices);
  const int first = slice * units * kSliceUnit;
  const int left = p.hidden - first;
  return {first, left < units * kSliceUnit ? left : units * kSliceUnit};
}

constexpr bool has_valid_slices(const Problem& p, const Config& c) {
  const bool can_be_cut = p.format != Format::kBlock && !c.is_wide;
  if (c.output_slices < 1 || (c.output_slices > 1 && !can_be_cut)) return false;
  return slice_of(p, c, c.output_slices - 1).count > 0;
}

// A row is a (token, choice) pair whose expert lives on this rank. Rows are ordered by expert, and
// within an expert by pair index token * top_k + choice, without gaps. A tile is up to
// Config::tile_rows rows of one expert; all tiles of an expert but its last are full. Tiles are
// ordered by their first row.
struct Tile {
  int expert;  // on this rank, from 0
  int first_row;
  int rows;    // at least 1
  int number;  // among the tiles; 0 in memory, and set where a tile is read
};
static_assert(sizeof(Tile) == 16);

// Tiles that any routing can need.
constexpr int64_t max_tiles(const Problem& p, const Config& c) {
  const int64_t pairs = num_pairs(p);
  const int64_t split = pairs / c.tile_rows + (pairs < p.experts ? pairs : p.experts);
  return pairs < split ? pairs : split;
}

// Complete before gate-up, which waits for it. Down and the reduction read the index before they
// wait for the kernel that precedes them: up to the first down a kernel of the chain lets the next
// one start only after its own wait, so gate-up has ended when anything behind that down starts.
struct Index {
  const Tile* tiles;     // [max_tiles], of which header[0] are written
  const int* header;     // {number of tiles, number of rows}, 8-byte aligned
  const int* row_token;  // [pairs], of which header[1] are written: the token of a row
  // The call's own, which no kernel of the chain writes: gate-up sorts few pairs by itself.
  const int* topk_ids;
  const int* expert_offset;
};

// The rows of x as the products take them, and their scales for kBlock.
struct TokenRows {
  const void* values;  // e4m3 or bf16 [tokens, hidden]
  const float* scale;  // [tokens, blocks_of(hidden, 128)]
};

// e4m3 or bf16 [experts, 2, inter, hidden] (gate first) and [experts, hidden, inter], 16-byte
// aligned.
struct Weights {
  const void* gate_up;
  const void* down;
  // kTensor: [experts] each but input_scale, a single value; act_scale may be one too.
  const float* gate_scale;
  const float* up_scale;
  const float* down_scale;
  const float* input_scale;
  const float* act_scale;
  // kBlock: [experts, 2, blocks_of(inter, block_rows), blocks_of(hidden, 128)] and
  // [experts, blocks_of(hidden, 128), blocks_of(inter, block_rows)].
  const float* gate_up_block_scale;
  const float* down_block_scale;
  int act_scale_stride;  // 1; 0 where act_scale is a single value
};

// What gate-up passes to down and down to the reduction, by row; rows that no pair fills are
// neither written nor used.
struct RowBuffers {
  // e4m3 or bf16 [pairs, inter], 16-byte aligned: SiLU(gate) * up, requantised or rounded.
  void* act;
  float* act_scale;  // [pairs, blocks_of(inter, 128)], kBlock only
  // [pairs, hidden], 16-byte aligned: an expert's output, not yet weighted, in bf16, and of kBf16
  // in float32. Before that, of kBlock, float32 [pairs, inter]: the intermediate that is not
  // quantised yet.
  void* outputs;
  // kBlock: [max_tiles, blocks_of(inter, 128)], zeros before gate-up: how many of the tasks that
  // share a scale have left their columns in `outputs`.
  unsigned* arrivals;
};

inline std::ostream& operator<<(std::ostream& out, const Problem& p) {
  out << "fused_moe T=" << p.tokens << " K=" << p.top_k << " E=" << p.experts << " H=" << p.hidden
      << " I=" << p.inter;
  if (p.format == Format::kTensor) return out << " per tensor";
  if (p.format == Format::kBf16) return out << " bf16";
  return out << " blocks of " << p.block_rows;
}

inline std::ostream& operator<<(std::ostream& out, const Config& c) {
  out << "tiles of " << c.tile_rows << " rows, ";
  if (c.is_wide) {
    out << "wide";
  } else {
    out << c.gate_up_pieces << " pieces";
  }
  if (c.output_slices > 1) out << ", outputs in " << c.output_slices << " slices";
  return c.discards_outputs ? out << ", outputs discarded" : out;
}

}  // namespace jax_hpc::fused_moe
