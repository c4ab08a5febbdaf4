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

// The register kernel keeps a token's scores in the registers of one warp or a few. The shared
// kernel keeps them in shared memory, for more experts than registers have room for.
enum class Kernel { kRegister, kShared };

constexpr int kMostExperts = 32768;  // what shared memory holds, with their groups

struct Config {
  Kernel kernel;
  int lane_values;  // scores of one lane, for the register kernel
  int warps;        // of one token
  int tokens;       // of one CTA
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
  return out << c.warps << (c.warps == 1 ? " warp of " : " warps of ") << c.lane_values
             << " a lane, " << c.tokens << (c.tokens == 1 ? " token" : " tokens") << " a CTA";
}

}  // namespace jax_hpc::route_topk
