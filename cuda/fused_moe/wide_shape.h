// How a CTA of the wide products lays out its shared memory: the host's part.
#pragma once

#include <algorithm>

#include "fused_moe/config.h"
#include "fused_moe/stage.h"

namespace jax_hpc::fused_moe {

constexpr int kWideWeightRows = 2 * kWeightRows;  // of a CTA
constexpr int kWideStep = 32;           // tokens of a tile are multiplied in multiples of this
constexpr int kWideMostRows = 192;      // sums and totals of which fill a thread's registers
constexpr int kWideMostBf16Rows = 256;  // which have sums alone
constexpr int kWideBoxRows = 16;        // token rows of a copy

__host__ __device__ constexpr int wide_most_rows(Format format) {
  return format == Format::kBf16 ? kWideMostBf16Rows : kWideMostRows;
}

// Behind the stages: their barriers, and what two CTAs tell each other, with its barriers.
constexpr int kWideMostStages = 8;
constexpr int kWideBarrierBytes = kWideMostStages * 16;
constexpr int kWideExchangeBytes = 12 * 2 * (8 + 64);  // of each warp, two places in turn

// From a multiple of kGroupBytes on. Scales: bytes of a token's scales in a stage. Staged: bytes of
// results that are gathered before they are written.
struct WideLayout {
  int stages;
  int stage_bytes;
  int scale_bytes;  // of a stage
  int scales_at;
  int staged_at;
  int control_at;
  int total;

  // Of a tile.
  __host__ __device__ int rows() const { return stage_bytes / kStageRow - kWideWeightRows; }

  WideLayout(int rows, int scales, int staged) {
    constexpr int kShared = 227 * 1024;
    constexpr int kControl = kWideBarrierBytes + kWideExchangeBytes;
    stage_bytes = (kWideWeightRows + rows) * kStageRow;
    scale_bytes = rows * scales;
    const int left = kShared - kGroupBytes - kControl - staged;
    stages = std::min(kWideMostStages, left / (stage_bytes + scale_bytes));
    scales_at = stages * stage_bytes;
    staged_at = scales_at + stages * scale_bytes;
    control_at = staged_at + staged;
    total = control_at + kControl + kGroupBytes;
  }
};

}  // namespace jax_hpc::fused_moe
