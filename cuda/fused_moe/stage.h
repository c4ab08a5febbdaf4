// What the stages in shared memory are made of: the maps of the copy engine, made by the host, and
// the kernels agree on it.
#pragma once

namespace jax_hpc::fused_moe {

// Bytes of a row of weights or tokens that a stage has, swizzled by as many.
constexpr int kStageRow = 128;
constexpr int kGroupRows = 8;  // rows of a swizzled group
constexpr int kGroupBytes = kGroupRows * kStageRow;
constexpr int kWeightRows = 64;  // of a warpgroup

// Of an intermediate of 192 columns in e4m3 (down_pairs.cuh): pairs of a task's weight rows, and
// columns of a piece of the intermediate's rows.
constexpr int kPairColumns = 192;
constexpr int kPairs = kWeightRows;
constexpr int kPieceColumns = 64;
constexpr int kPieces = kPairColumns / kPieceColumns;

}  // namespace jax_hpc::fused_moe
