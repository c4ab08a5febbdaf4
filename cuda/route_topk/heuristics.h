// Which kernel and which instance a choice of experts takes. The choice depends on the number of
// tokens, the bits of the results do not.
#pragma once

#include "common/launch.h"
#include "route_topk/config.h"

namespace jax_hpc::route_topk {

constexpr int kMostTokensOfCta = 4;
constexpr int kWarpsOfToken = 4;

inline Config choose(const Problem& p) {
  // A decode step spreads over the SMs, and a large row over the four schedulers of one; many
  // tokens fill the SMs by themselves, with less work for each.
  constexpr int kFewTokens = 256;
  constexpr int kSmallRow = 256;
  const bool few = p.tokens <= kFewTokens;
  const int tokens = few ? 1 : kMostTokensOfCta;
  const int needed = ceil_div(p.experts, kWarpSize);
  if (few && p.experts > kSmallRow) {
    for (const int values : {3, 4, 6, 8}) {
      if (needed <= values * kWarpsOfToken) return {Kernel::kRegister, values, kWarpsOfToken, 1};
    }
  }
  for (const int values : {4, 6, 8, 12, 16, 24, 32}) {
    if (needed <= values) return {Kernel::kRegister, values, 1, tokens};
  }
  return {Kernel::kShared, 0, 0, 1};
}

}  // namespace jax_hpc::route_topk
