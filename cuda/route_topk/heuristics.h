// Which kernel and which instance a choice of experts takes.
#pragma once

#include "common/launch.h"
#include "route_topk/config.h"

namespace jax_hpc::route_topk {

constexpr int kMostTokensOfCta = 4;

inline Config choose(const Problem& p) {
  // One warp a CTA spreads the tokens of a decode step over the SMs.
  constexpr int kFewTokens = 256;
  const int tokens = p.tokens <= kFewTokens ? 1 : kMostTokensOfCta;
  const int needed = ceil_div(p.experts, kWarpSize);
  // Up to 8 values a lane, single loads are whole lines of a warp already.
  for (const int values : {4, 6, 8}) {
    if (needed <= values) return {Kernel::kWarp, values, 1, tokens};
  }
  const bool aligned = p.experts % 4 == 0;
  for (const int values : {12, 16, 24, 32}) {
    const bool exists = aligned || values == 16 || values == 32;
    if (exists && needed <= values) return {Kernel::kWarp, values, aligned ? 4 : 1, tokens};
  }
  return {Kernel::kCta, 0, 1, 1};
}

}  // namespace jax_hpc::route_topk
