// How a CTA of the wide products lays out its shared memory: the host's part.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fused_moe/config.h"

namespace jax_hpc::fused_moe {

constexpr int kWideWeightRows = 128;  // of a CTA: 64 of each of two warpgroups
constexpr int kWideStep = 32;         // tokens of a tile are multiplied in multiples of this
constexpr int kWideMostRows = 192;    // sums and totals of which fill a thread's registers
constexpr int kWideMostSums = 256;    // rows of bf16, which has sums alone
constexpr int kWideBoxRows = 16;      // token rows of a copy

__host__ __device__ constexpr int wide_most_rows(Format format) {
  return format == Format::kBf16 ? kWideMostSums : kWideMostRows;
}

// Behind the stages: their barriers, and what two CTAs tell each other, with its barriers.
constexpr int kWideMostStages = 8;
constexpr int kWideBarrierBytes = kWideMostStages * 16;
constexpr int kWideExchangeBytes = 12 * 2 * (8 + 64);  // of each warp, two places in turn

// Scales: bytes of a token's scales in a stage. Staged: bytes of results that are gathered before
// they are written.
struct WideLayout {
  int stages;
  int stage_bytes;
  int scale_bytes;
  int scales_at;
  int staged_at;
  int control_at;
  int total;

  __host__ __device__ int rows() const { return stage_bytes / kBlock - kWideWeightRows; }

  WideLayout(int rows, int scales, int staged) {
    constexpr int kAlignment = 1024;
    constexpr int kShared = 227 * 1024;
    constexpr int kControl = kWideBarrierBytes + kWideExchangeBytes;
    stage_bytes = (kWideWeightRows + rows) * kBlock;
    scale_bytes = rows * scales;
    const int left = kShared - kAlignment - kControl - staged;
    stages = std::min(kWideMostStages, left / (stage_bytes + scale_bytes));
    scales_at = stages * stage_bytes;
    staged_at = scales_at + stages * scale_bytes;
    control_at = staged_at + staged;
    total = control_at + kControl + kAlignment;
  }
};

// Weights that several tiles read stay in the L2 cache; read once, their lines leave it first.
constexpr uint64_t kEvictNormal = 0x1000000000000000;
constexpr uint64_t kEvictFirstPolicy = 0x12f0000000000000;
constexpr uint64_t weight_policy(const Problem& p, const Config& c) {
  return mean_rows(p) > c.tile_rows ? kEvictNormal : kEvictFirstPolicy;
}

}  // namespace jax_hpc::fused_moe
