// How an attention prologue is cut into warps. The bits of the results do not depend on it.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "qk_norm_rope_append/config.h"

namespace jax_hpc::qk_norm_rope_append {

// A few tokens are spread as widely as their heads allow, for the latency of one turn. With more
// turns than an H200 holds warps, all warps are there from the start and have equally many, in CTAs
// of half the size where the SM with the most warps has fewer of them then.
inline Config choose(const Problem& p) {
  constexpr int kSms = 132;
  constexpr int kResidentWarps = kSms * kMostWarps * kCtasOfSm;
  const int64_t all = turns_of(p);
  const int64_t turns_of_warp =
      std::min<int64_t>((all + kResidentWarps - 1) / kResidentWarps, most_turns(p));
  const int64_t warps = (all + turns_of_warp - 1) / turns_of_warp;
  const auto most_of_sm = [&](int of_cta) {
    return of_cta * ((warps + of_cta * kSms - 1) / (of_cta * kSms));
  };
  constexpr int kHalf = kMostWarps / 2;
  const bool is_halved = turns_of_warp > 1 && most_of_sm(kHalf) < most_of_sm(kMostWarps);
  const auto of_cta = std::clamp<int64_t>(warps / kSms, 1, is_halved ? kHalf : kMostWarps);
  return {static_cast<int>(of_cta), static_cast<int>(turns_of_warp)};
}

}  // namespace jax_hpc::qk_norm_rope_append
