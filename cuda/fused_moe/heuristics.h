// How a layer of experts is cut.
#pragma once

#include <algorithm>

#include "fused_moe/config.h"

namespace jax_hpc::fused_moe {

// Rows of a tile: enough for most experts of a uniform routing (mean and two deviations), for a
// second tile reads the expert's weights again.
inline int choose_tile_rows(const Problem& p) {
  const double mean = static_cast<double>(num_pairs(p)) / p.experts;
  for (const int rows : {8, 16, 32}) {
    const double spare = rows - 1 - mean;
    if (spare > 0 && spare * spare >= 4 * mean) return rows;
  }
  return 64;
}

inline Config choose(const Problem& p, int num_sms) {
  constexpr int kTileColumns = 32;
  Config config{.tile_rows = choose_tile_rows(p), .gate_up_pieces = 1};
  const int64_t busy_experts = std::min<int64_t>(num_pairs(p), p.experts);
  const int64_t tiles = busy_experts * blocks_of(p.inter, kTileColumns);
  const bool has_pieces =
      config.tile_rows == 8 && p.format == Format::kTensor && p.hidden % kBlock == 0;
  if (has_pieces && tiles < num_sms) config.gate_up_pieces = 4;
  return config;
}

}  // namespace jax_hpc::fused_moe
