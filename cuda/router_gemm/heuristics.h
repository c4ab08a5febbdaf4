// Which kernel and which tiles a router product takes. Measured on an H200, two terms, weights
// cold, launches back to back in a graph; microseconds stand beside the choices.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/launch.h"
#include "router_gemm/config.h"

namespace jax_hpc::router_gemm {

// CTAs of a cluster size that run at once, one on an SM. Clusters of 4 and 8 do not fill the chip:
// 128 CTAs in them took twice the time of 96, in clusters of 2 they did not.
inline int resident_ctas(int cluster, int num_sms) {
  return std::max(1, cluster > 2 ? num_sms * 9 / 10 : num_sms);
}

// Three terms keep their bound where a CTA adds up no more hidden values than these; float32 sums
// of long rows lose more.
constexpr int kLongestExact = 6144;

// CTAs that must share the hidden axis: a power of two.
inline int least_cluster(const Problem& p) {
  int cluster = 1;
  while (p.terms == 3 && cluster < kPortableCluster && p.hidden > cluster * kLongestExact) {
    cluster *= 2;
  }
  return cluster;
}

// Tiles of the stream kernel: the largest cluster whose CTAs each get a piece and all run at once.
//   H, E = 4096, 128: T = 8: 2.9    4096, 192: 3.2    3072, 384: 3.6    6144, 768: 7.2
inline Config choose_stream(const Problem& p, int num_sms) {
  constexpr int kExperts = 16;
  constexpr int kPieceHidden = 256;  // a step of each warp
  const int token_tile = has_aligned_rows(p) ? 8 : 16;
  const int64_t tiles = int64_t{ceil_div(p.experts, kExperts)} * ceil_div(p.tokens, token_tile);
  int cluster = kPortableCluster;
  while (cluster > least_cluster(p) && (cluster > ceil_div(p.hidden, kPieceHidden) ||
                                        tiles * cluster > resident_ctas(cluster, num_sms))) {
    cluster /= 2;
  }
  return {Kernel::kStream, token_tile, kExperts, cluster};
}

// Tiles of the tiled kernel, by a model of the time that a wave of CTAs takes, in rows of a weight
// tile that a warpgroup multiplies. Fitted to 26 problems, T = 16 to 4096 with two and with three
// terms; what it chooses is at most 10 % slower than the best tile measured, 1 % on average.
//   H, E = 4096, 192: T = 16 32 64 128 256 512 1024 2048 4096:
//                         3.5 3.6 3.8 4.5 6.5 7.9 10.1 14.7 23.0
//   H, E = 6144, 768:     7.5 7.7 8.3 11.2 15.0 21.1 31.2 53.8 110 to 115
inline Config choose_tiled(const Problem& p, int num_sms) {
  constexpr int kTileHidden = 64;
  const int pieces = ceil_div(p.hidden, kTileHidden);
  Config best{};
  double best_cost = 0;
  const auto consider = [&](int tokens, int experts) {
    const double rows = p.terms * experts;
    // Of 64 hidden values. The ring of three terms of 96 experts is one stage short.
    double tile_cost = tokens == 64 ? 58 + rows : 2.3 * rows;
    if (experts == 96 && p.terms == 3) tile_cost *= 1.15;
    for (int cluster = least_cluster(p); cluster <= kPortableCluster; cluster *= 2) {
      if (cluster > pieces) break;
      const int log2 = log2_of(cluster);
      const int64_t ctas =
          int64_t{ceil_div(p.tokens, tokens)} * ceil_div(p.experts, experts) * cluster;
      const int resident = resident_ctas(cluster, num_sms);
      const auto waves = static_cast<double>((ctas + resident - 1) / resident);
      constexpr double kStart = 4000;  // of the ring, and the output
      const double exchange_cost = 17.0 * experts * (tokens / 64.0) * log2;
      const double cost = waves * (tile_cost * ceil_div(pieces, cluster) + kStart + exchange_cost);
      if (best_cost == 0 || cost < best_cost) {
        best_cost = cost;
        best = {Kernel::kTiled, tokens, experts, cluster};
      }
    }
  };
  for (const int experts : {16, 32, 64}) consider(64, experts);
  for (const int experts : {64, 96, 128}) {
    if (experts < 128 || p.terms < 3) consider(128, experts);
  }
  return best;
}

inline Config choose(const Problem& p, int num_sms) {
  constexpr int kFew = 8;
  const bool streams = !has_aligned_rows(p) || p.tokens <= kFew;
  return streams ? choose_stream(p, num_sms) : choose_tiled(p, num_sms);
}

}  // namespace jax_hpc::router_gemm
