// What a choice of experts is, and how it is cut: plain structs that print themselves.
#pragma once

#include <cstdint>
#include <ostream>

namespace jax_hpc::route_topk {

enum class Scoring : int32_t { kSoftmax, kSigmoid };

// The options of the operator, whose meaning jax_hpc/ops/route_topk/reference.py defines.
struct Options {
  int k;
  Scoring scoring;
  bool renormalize;
  float scale;
  int num_zero_experts;
  int num_groups;
  int topk_groups;
};

struct Problem {
  int tokens;
  int experts;
  Options options;
};

// The CTA kernel spreads a token over up to eight warps, for the latency of a few tokens; the warp
// kernel takes one warp a token, for the work of many. The shared kernel is for more experts than
// either has room for.
enum class Kernel { kCta, kWarp, kShared };

constexpr int kMostExperts = 32768;  // what shared memory holds, with their groups

struct Config {
  Kernel kernel;
  int lane_values;  // scores of one lane, for the CTA and warp kernels
  int warps;        // of one CTA, for the same: of one token, or of as many tokens
};

inline std::ostream& operator<<(std::ostream& out, const Problem& p) {
  const Options& o = p.options;
  out << "route_topk T=" << p.tokens << " E=" << p.experts << " K=" << o.k
      << (o.scoring == Scoring::kSoftmax ? " softmax" : " sigmoid");
  if (o.renormalize) out << " renormalized";
  if (o.num_zero_experts > 0) out << " zero=" << o.num_zero_experts;
  if (o.num_groups > 1) out << " groups=" << o.topk_groups << "/" << o.num_groups;
  return out;
}

inline std::ostream& operator<<(std::ostream& out, const Config& c) {
  if (c.kernel == Kernel::kShared) return out << "shared";
  return out << (c.kernel == Kernel::kCta ? "CTA of " : "warp a token, ") << c.warps
             << (c.kernel == Kernel::kCta ? " warps" : " a CTA") << ", " << c.lane_values
             << (c.lane_values == 1 ? " value a lane" : " values a lane");
}

}  // namespace jax_hpc::route_topk
