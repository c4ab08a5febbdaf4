// How an attention prologue is cut into warps. The bits of the results do not depend on it.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "qk_norm_rope_append/config.h"

namespace jax_hpc::qk_norm_rope_append {

inline int turns_of_token(const Problem& p) {
  return ceil_div(p.heads(), heads_of_warp(p.head_dim));
}

// A few tokens are spread as widely as their heads allow, for the latency of one turn. With more
// tokens than an H200 holds warps, a warp takes all heads of a token and reads its row of the table
// once.
inline Config choose(const Problem& p) {
  constexpr int kMostRows = 65535;  // of a grid
  constexpr int kSms = 132;
  constexpr int kResidentWarps = kSms * 24;
  const int turns = turns_of_token(p);
  const int warps_of_token = std::min({turns, ceil_div(kResidentWarps, p.tokens), kMostRows});
  const int turns_of_warp = ceil_div(turns, warps_of_token);
  const int64_t warps = int64_t{p.tokens} * ceil_div(turns, turns_of_warp);
  return {static_cast<int>(std::clamp<int64_t>(warps / kSms, 1, std::min(kMostWarps, p.tokens))),
          turns_of_warp};
}

}  // namespace jax_hpc::qk_norm_rope_append
