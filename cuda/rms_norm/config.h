// What a root-mean-square norm is, and how it is cut: plain structs that print themselves.
#pragma once

#include <cstdint>
#include <ostream>

#include "common/launch.h"

namespace jax_hpc::rms_norm {

enum class Weight : int32_t { kBf16, kFloat };

struct Problem {
  int tokens;
  int hidden;
  float eps;
  Weight weight;
  bool has_residual;
  bool fp8_out;
};

constexpr int kChunk = 8;                   // values that a lane reads at once, 16 bytes of bf16
constexpr int kGroup = kWarpSize * kChunk;  // values that a warp reads at once
constexpr int kMostWarps = 32;
constexpr int kMostGroups = 64;
constexpr int kMostHidden = kMostGroups * kGroup;

// A CTA takes one row, a warp of it so many groups that follow each other.
struct Config {
  int groups;  // 1, 2 or 4
};

__host__ __device__ constexpr int warps_of_row(int hidden, int groups) {
  return ceil_div(ceil_div(hidden, kGroup), groups);
}
constexpr int most_warps(int groups) {
  return groups * kMostWarps < kMostGroups ? kMostWarps : kMostGroups / groups;
}

inline std::ostream& operator<<(std::ostream& out, const Problem& p) {
  out << "rms_norm T=" << p.tokens << " H=" << p.hidden
      << (p.weight == Weight::kBf16 ? " bf16-weight" : " float-weight");
  if (p.has_residual) out << " residual";
  if (p.fp8_out) out << " fp8";
  return out;
}

inline std::ostream& operator<<(std::ostream& out, const Config& c) {
  return out << c.groups << (c.groups == 1 ? " group" : " groups") << " a warp";
}

}  // namespace jax_hpc::rms_norm
