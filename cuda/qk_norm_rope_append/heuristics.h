// How an attention prologue is cut into warps. The bits of the results do not depend on it.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "qk_norm_rope_append/config.h"

namespace jax_hpc::qk_norm_rope_append {

// A few tokens are spread as widely as their heads allow, for the latency of one turn. With more
// turns than an H200 holds warps, all warps are there from the start and have equally many.
inline Config choose(const Problem& p) {
  constexpr int kSms = 132;
  constexpr int kResidentWarps = kSms * kMostWarps * kCtasOfSm;
  const int64_t all = turns_of(p);
  const int64_t turns_of_warp =
      std::min<int64_t>((all + kResidentWarps - 1) / kResidentWarps, most_turns(p));
  const int64_t warps = (all + turns_of_warp - 1) / turns_of_warp;
  return {static_cast<int>(std::clamp<int64_t>(warps / kSms, 1, kMostWarps)),
          static_cast<int>(turns_of_warp)};
}

}  // namespace jax_hpc::qk_norm_rope_append
