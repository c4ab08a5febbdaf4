// How a row is cut into warps. The bits of the results do not depend on it.
#pragma once

#include "rms_norm/config.h"

namespace jax_hpc::rms_norm {

// A few rows are spread as widely as they go, for the latency of one; of many, fewer and busier
// warps leave room for more rows on an SM.
inline Config choose(const Problem& p) {
  constexpr int kSms = 132;
  constexpr int kFewTokens = 2 * kSms;
  const bool fits_one = warps_of_row(p.hidden, 1) <= most_warps(1);
  return {p.tokens <= kFewTokens && fits_one ? 1 : 2};
}

}  // namespace jax_hpc::rms_norm
