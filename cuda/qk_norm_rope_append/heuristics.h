// How an attention prologue is cut into warps. The bits of the results do not depend on it.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "qk_norm_rope_append/config.h"

namespace jax_hpc::qk_norm_rope_append {

// A few tokens are spread as widely as their heads allow, for the latency of one turn. With more
// turns than an H200 holds warps, a warp has several, for which it prepares once, in CTAs of two
// warps, which spread evenly; but six at most: warps that run at a time then go through memory side
// by side. 8192 tokens of 64/8, us in bf16 / fp8: 84.6 / 65.8 with five turns, 85.0 / 65.4 with
// six, 88.1 / 66.4 with twelve, 94.5 / 75.6 with 45, all warps there from the start; of 8/1 14.2 /
// 12.1 with six, which are all warps there.
inline Config choose(const Problem& p) {
  constexpr int kSms = 132;
  constexpr int kResidentWarps = kSms * kMostWarps * kCtasOfSm;
  constexpr int kMostTurns = 6;
  constexpr int kWarpsOfManyTurns = 2;
  const int64_t all = turns_of(p);
  const int64_t turns_of_warp = std::min<int64_t>((all + kResidentWarps - 1) / kResidentWarps,
                                                  std::min(kMostTurns, most_turns(p)));
  const int64_t warps = (all + turns_of_warp - 1) / turns_of_warp;
  const int most_warps = turns_of_warp > 1 ? kWarpsOfManyTurns : kMostWarps;
  const auto of_cta = std::clamp<int64_t>(warps / kSms, 1, most_warps);
  return {static_cast<int>(of_cta), static_cast<int>(turns_of_warp)};
}

}  // namespace jax_hpc::qk_norm_rope_append
