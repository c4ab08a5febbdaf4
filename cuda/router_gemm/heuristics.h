// Which kernel and which tiles a router product takes. Measured on one H200, two terms, weights
// cold, launches back to back in a graph; microseconds stand beside the choices.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "router_gemm/config.h"

namespace jax_hpc::router_gemm {

// CTAs of a cluster size that run at once, one on an SM. Clusters of 4 and 8 do not fill the chip:
// 128 CTAs in them took twice the time of 96, in clusters of 2 they did not.
inline int resident_ctas(int cluster, int num_sms) {
  return cluster > 2 ? num_sms * 9 / 10 : num_sms;
}

// Largest cluster whose CTAs each get a piece and all run at once; 1 if none does.
inline int largest_cluster(int tiles, int pieces, int num_sms) {
  for (int cluster = kPortableCluster; cluster > 1; cluster /= 2) {
    if (cluster <= pieces && tiles * cluster <= resident_ctas(cluster, num_sms)) return cluster;
  }
  return 1;
}

// Tiles of the stream kernel: small ones where that fills the SMs with clusters of at least 4,
// since every doubling of a tile halves what is read twice and the SMs that read it.
//   H, E = 4096, 192 (12 tiles of experts): T = 8 16 32 64 128 256: 3.8 3.9 4.4 5.1 6.2 8.0
//   H, E = 6144, 768 (48):                  T = 8 16 32 64:         8.0 8.2 8.9 10.6
inline Config choose_stream(const Problem& p, int num_sms) {
  constexpr int kWarps = 8;
  constexpr int kStepHidden = 32;
  constexpr int kFewest = 4;
  const int pieces = ceil_div(ceil_div(p.hidden, kStepHidden), kWarps);
  if (p.hidden % 8 != 0) {
    const int tiles = ceil_div(p.experts, 16) * ceil_div(p.tokens, 16);
    return {Kernel::kStream, 16, 16, largest_cluster(tiles, pieces, num_sms)};
  }
  const int widest = p.terms == 3 ? 32 : 64;  // three terms have no registers for 64 tokens
  int token_tile = p.tokens <= 8 ? 8 : p.tokens <= 16 ? 16 : p.tokens <= 64 ? 32 : widest;
  int expert_tile = p.tokens <= 32 ? 16 : 32;
  const auto tiles = [&] {
    return ceil_div(p.experts, expert_tile) * ceil_div(p.tokens, token_tile);
  };
  const auto is_too_many = [&] { return tiles() * kFewest > resident_ctas(kFewest, num_sms); };
  if (is_too_many()) expert_tile = 32;
  if (is_too_many() && token_tile == 32) token_tile = widest;
  return {Kernel::kStream, token_tile, expert_tile, largest_cluster(tiles(), pieces, num_sms)};
}

// Tiles of the tiled kernel, by the time that a wave of CTAs takes.
//   H, E = 4096, 192: T = 512 1024 2048 4096: 9.9 12.1 17.3 23.9
//   H, E = 6144, 768: T = 128 256 512 1024 2048 4096: 12.3 15.4 23.0 31.6 54.9 111
inline Config choose_tiled(const Problem& p, int num_sms) {
  constexpr int kTokens = 128;
  constexpr int kHidden = 64;
  const int pieces = ceil_div(p.hidden, kHidden);
  Config best{};
  double best_cost = 0;
  for (const int experts : {64, 96, 128}) {
    if (experts == 128 && p.terms == 3) continue;
    // In rows of the weight tile that a warpgroup multiplies. The ring of three terms of 96 experts
    // is one stage short.
    double tile_cost = 32 + p.terms * experts;
    if (experts == 96 && p.terms == 3) tile_cost *= 1.1;
    for (int cluster = 1; cluster <= kPortableCluster && cluster <= pieces; cluster *= 2) {
      const int ctas = ceil_div(p.tokens, kTokens) * ceil_div(p.experts, experts) * cluster;
      const int waves = ceil_div(ctas, resident_ctas(cluster, num_sms));
      // Start of the ring and output, and in a cluster the exchange of the sums.
      const double fixed_cost = 1500 + (cluster > 1 ? 16 * experts : 0);
      const double cost = waves * (tile_cost * ceil_div(pieces, cluster) + fixed_cost);
      if (best_cost == 0 || cost < best_cost) {
        best_cost = cost;
        best = {Kernel::kTiled, kTokens, experts, cluster};
      }
    }
  }
  return best;
}

inline Config choose(const Problem& p, int num_sms) {
  constexpr int kFew = 64;
  const Config stream = choose_stream(p, num_sms);
  // Beyond 64 tokens the stream kernel wins as long as clusters of 4 still run at once.
  const bool streams = p.hidden % 8 != 0 || p.tokens <= kFew ||
                       (p.tokens <= 4 * kFew && p.terms < 3 && stream.cluster >= 4);
  return streams ? stream : choose_tiled(p, num_sms);
}

}  // namespace jax_hpc::router_gemm
