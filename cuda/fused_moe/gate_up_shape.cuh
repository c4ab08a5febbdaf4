// How gate-up's shared memory is laid out and what the kernel is given.
#pragma once

#include "fused_moe/grouped.cuh"

namespace jax_hpc::fused_moe {

// Beside the ring: the index of few pairs; whether a task was its group's last; or the sums of
// pieces, for two tasks in turn.
constexpr int gate_up_extra_bytes(int pieces, Format format) {
  const int exchanged = format == Format::kBlock ? 16 : (pieces > 1 ? 2 * kWarpgroup * 16 : 0);
  return int{sizeof(FewPairs)} + exchanged;
}

template <int TileRows, int Pieces, Format format>
struct GateUpShape : SquareStageShape<format, TileRows * Pieces, TileRows,
                                      format == Format::kBlock ? TileRows + 4 : 0,
                                      gate_up_extra_bytes(Pieces, format)> {
  static constexpr int kTileRows = TileRows;
  // One warp does not ask for 64 rows a stage as fast as the weights come. In blocks, and
  // for 128 rows, there are no registers for two.
  static constexpr int kRowWarps = TileRows == 64 && format != Format::kBlock ? 2 : 1;
  static constexpr int kThreads = (GateUpShape::kRowWarp + kRowWarps) * kWarpSize;
  static constexpr int kPieces = Pieces;
  static constexpr int kGroupColumns = kWeightRows / 2 / Pieces;
  static constexpr int kColumns = GateUpShape::kGroups * kGroupColumns;
  static constexpr int kScaleParts = kBlock / kColumns;  // tasks that share a scale
  static constexpr int kTurnBytes = kStageRow * Pieces;  // of a token's row, of a stage
  static constexpr int kExchangeAt = int{sizeof(FewPairs)};
  static_assert(Pieces == 1 || (Pieces == 4 && TileRows == 8 && !GateUpShape::kHasBlocks));
};

struct GateUpArrays {
  Index index;
  TokenRows x;
  Weights weights;
  RowBuffers rows;
};

}  // namespace jax_hpc::fused_moe
