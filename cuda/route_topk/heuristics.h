// Which kernel and which instance a choice of experts takes. The choice depends on the number of
// tokens, the bits of the results do not.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "route_topk/config.h"

namespace jax_hpc::route_topk {

constexpr int kMostWarpsOfToken = 8;
constexpr int kMostTokensOfCta = 4;

inline Config choose(const Problem& p) {
  constexpr int kFewTokens = 528;
  const int needed = ceil_div(p.experts, kWarpSize);
  if (p.tokens <= kFewTokens && needed <= 4 * kMostWarpsOfToken) {
    return {Kernel::kCta, ceil_div(needed, kMostWarpsOfToken), std::min(needed, kMostWarpsOfToken)};
  }
  for (const int values : {4, 6, 8, 12, 16, 24, 32}) {
    if (needed <= values) return {Kernel::kWarp, values, kMostTokensOfCta};
  }
  return {Kernel::kShared, 0, 0};
}

}  // namespace jax_hpc::route_topk
