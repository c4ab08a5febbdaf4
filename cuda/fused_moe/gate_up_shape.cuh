// How gate-up's shared memory is laid out and what the kernel is given.
#pragma once

#include "fused_moe/grouped.cuh"

namespace jax_hpc::fused_moe {

constexpr int kScaleTeam = 4;  // CTAs of 32 columns that share a scale of the intermediate

template <int TileRows, int Pieces, Format format>
struct GateUpShape : StageShape<TileRows * Pieces, format == Format::kBlock ? TileRows + 4 : 0,
                                format == Format::kBlock
                                    ? 16 + 2 * kScaleTeam * (kConsumers / kWarpSize) * TileRows * 4
                                    : (Pieces > 1 ? 2 * kConsumers * 16 : 0)> {
  static constexpr int kTileRows = TileRows;
  static constexpr int kPieces = Pieces;
  static constexpr Format kFormat = format;
  static constexpr bool kHasBlocks = format == Format::kBlock;
  static constexpr int kColumns = kWeightRows / 2 / Pieces;
  static constexpr int kTeam = kHasBlocks ? kScaleTeam : 1;  // CTAs of a cluster
  static constexpr int kTurnValues = kStageValues * Pieces;  // hidden values of a stage
  // Largest magnitudes that the warps of a team send each other, for two tasks in turn.
  static constexpr int kSenders = kScaleTeam * kConsumers / kWarpSize;
  static constexpr int kMagnitudesAt = 16;  // behind two barriers
  static constexpr int kMagnitudeBytes = kSenders * TileRows * int{sizeof(float)};
  static_assert(Pieces == 1 || (Pieces == 4 && TileRows == 8 && !kHasBlocks));
};

struct GateUpArrays {
  Index index;
  TokenRows x;
  Weights weights;
  RowBuffers rows;
};

}  // namespace jax_hpc::fused_moe
