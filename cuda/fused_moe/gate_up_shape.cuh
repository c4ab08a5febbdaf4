// How gate-up's shared memory is laid out and what the kernel is given.
#pragma once

#include "fused_moe/grouped.cuh"

namespace jax_hpc::fused_moe {

constexpr int kScaleTeam = 4;  // CTAs of 32 columns that share a scale of the intermediate

// Beside the ring: the index of few pairs; largest magnitudes that the warps of a team send each
// other, for two tasks in turn, behind two barriers; or the sums of pieces, for two tasks in turn.
constexpr int kSenders = kScaleTeam * kConsumers / kWarpSize;
constexpr int gate_up_extra_bytes(int tile_rows, int pieces, Format format) {
  const int exchanged = format == Format::kBlock
                            ? 16 + 2 * kSenders * tile_rows * int{sizeof(float)}
                            : (pieces > 1 ? 2 * kConsumers * 16 : 0);
  return int{sizeof(FewPairs)} + exchanged;
}

template <int TileRows, int Pieces, Format format>
struct GateUpShape
    : SquareStageShape<TileRows * Pieces, format == Format::kBlock ? TileRows + 4 : 0,
                       gate_up_extra_bytes(TileRows, Pieces, format)> {
  static constexpr int kTileRows = TileRows;
  static constexpr int kPieces = Pieces;
  static constexpr bool kHasBlocks = format == Format::kBlock;
  static constexpr int kColumns = kWeightRows / 2 / Pieces;
  static constexpr int kTeam = kHasBlocks ? kScaleTeam : 1;  // CTAs of a cluster
  static constexpr int kTurnValues = kStageValues * Pieces;  // hidden values of a stage
  static constexpr int kExchangeAt = int{sizeof(FewPairs)};
  static constexpr int kMagnitudesAt = kExchangeAt + 16;
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
