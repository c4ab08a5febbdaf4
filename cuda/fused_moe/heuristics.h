// How a layer of experts is cut.
#pragma once

#include <algorithm>

#include "fused_moe/config.h"

namespace jax_hpc::fused_moe {

// Rows of a tile: enough for most experts of a uniform routing (mean and two deviations), for a
// second tile reads the expert's weights again.
//
// Measured on an H200, gate-up / the whole call in us, 4096 hidden values, 8 choices, cold weights:
//
//   experts x columns, scales      T    tiles of 64   64, two warpgroups   128, two warpgroups
//   192 x 192, per tensor       1024      115 /  194           119 / 199                     -
//   24 x 1536, per tensor        128       94 /  135            99 / 137                     -
//                                256      164 /  252                   -             151 / 198
//                               1024      517 /  734                   -             434 / 595
//   24 x 1536, in blocks         128      144 /  191           126 / 181                     -
//                                256      254 /  358           216 / 330             197 / 278
//                               1024      738 / 1138          641 / 1005             561 / 840
//
// There, sums of tiles of 64 had 32 values and those of 128 had 64 (gate_up.cuh). Of blocks tiles
// of 64 have 64 since, and one warpgroup takes 114 / 171 for T = 128 (tiles of 32 take 143 / 219,
// of 128 178 / 245); tiles of 128 have sums of 128 values, and take 181 / 258 and 515 / 778 in
// blocks, 145 / 192 and 418 / 578 per tensor.
inline int choose_tile_rows(const Problem& p) {
  const double mean = static_cast<double>(num_pairs(p)) / p.experts;
  for (const int rows : {8, 16, 32, 64}) {
    const double spare = rows - 1 - mean;
    if (spare > 0 && spare * spare >= 4 * mean) return rows;
  }
  return 128;
}

inline Config choose(const Problem& p, int num_sms) {
  constexpr int kTileColumns = 32;
  Config config{.tile_rows = choose_tile_rows(p), .gate_up_pieces = 1};
  const int64_t busy_experts = std::min<int64_t>(num_pairs(p), p.experts);
  const int64_t tiles = busy_experts * blocks_of(p.inter, kTileColumns);
  constexpr int kPieceBytes = 128;
  const bool has_pieces = config.tile_rows == 8 && p.format != Format::kBlock &&
                          p.hidden * value_bytes(p.format) % kPieceBytes == 0;
  if (has_pieces && tiles < num_sms) config.gate_up_pieces = 4;
  return config;
}

}  // namespace jax_hpc::fused_moe
