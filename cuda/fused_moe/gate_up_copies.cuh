// What gate-up's copying warps do.
#pragma once

#include "fused_moe/gate_up_shape.cuh"

namespace jax_hpc::fused_moe {

// By the weights' warp, one thread.
template <class Shape>
__device__ __forceinline__ void copy_gate_up(const StageMemory<Shape>& memory, const Problem& p,
                                             TaskWalk walk, int turns, const CUtensorMap* map) {
  RingPlace<Shape::kStages> place;
  Tile tile;
  int part;
  while (walk.next(tile, part)) {
    const int first = part * Shape::kColumns;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn, place.advance()) {
      wait(memory.empty(place.stage), place.parity ^ 1);
      arrive_expecting(memory.full(place.stage), Shape::kRowsAt);
      if constexpr (Shape::kPieces == 1) {
        copy_weights(memory.weights(place.stage), map, memory.full(place.stage), turn * kStageRow,
                     0, 0, first / kGroupRows, tile.expert);
      } else {
        copy_weights(memory.weights(place.stage), map, memory.full(place.stage), 0, first, 0,
                     turn * Shape::kPieces, tile.expert);
      }
    }
  }
}

// The copies of a stage's token rows and scales by the lanes of the rows' warps. With one piece
// eight lanes take a row's 128 bytes and a lane every fourth or eighth row; with four the warp
// takes a row's 512 bytes.
template <class Shape>
class RowCopies {
 public:
  __device__ __forceinline__ RowCopies(const StageMemory<Shape>& memory, const Problem& p,
                                       const GateUpArrays& arrays, const FewPairs* few, int lane)
      : memory_(memory),
        p_(p),
        arrays_(arrays),
        few_(few),
        lane_(lane),
        row_bytes_(p.hidden * value_bytes(Shape::kFormat)) {
    const int unit = lane % kUnitsOfRow;
    const int group = lane / kUnitsOfRow;
    hidden0_ = (kHasPieces ? lane : unit) * kUnit;
    first_row_ = kHasPieces ? 0 : group;
    place_[0] =
        group * (kHasPieces ? kGroupBytes : kStageRow) + (kHasPieces ? unit : unit ^ group) * kUnit;
    place_[1] = place_[0] ^ (kRowsAtOnce * (kStageRow + kUnit));
  }

  // Reads the tokens of a task that has not started yet, ahead of it if they find room.
  __device__ __forceinline__ void read_tokens(const Tile& tile) {
    if constexpr (kReadsAhead) {
#pragma unroll
      for (int i = 0; i < kRowsOfLane; ++i) {
        if (i < count_of(tile)) token_[i] = row_token(tile, i);
      }
    }
  }

  __device__ __forceinline__ void start_task(const Tile& tile, int column) {
    rows_ = tile.rows;
    count_ = count_of(tile);
    const auto* values = static_cast<const uint8_t*>(arrays_.x.values);
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      if (i >= count_) continue;
      const int token = kReadsAhead ? token_[i] : row_token(tile, i);
      from_[i] = values + static_cast<int64_t>(token) * row_bytes_ + hidden0_;
    }
    if constexpr (Shape::kHasBlocks) start_scales(tile, column);
  }

  __device__ __forceinline__ void copy(int turn, int stage) {
    const int offset = turn * Shape::kTurnBytes;
    const SharedAddress to = memory_.rows(stage);
    if (offset + hidden0_ < row_bytes_) {
#pragma unroll
      for (int i = 0; i < kRowsOfLane; ++i) {
        if (i < count_) copy_16(to + place(i), from_[i] + offset, true);
      }
    } else {
      // What no token has is zero, for the weights are zero there, and zero times NaN is not.
#pragma unroll
      for (int i = 0; i < kRowsOfLane; ++i) {
        if (i < count_) copy_16(to + place(i), arrays_.x.values, false);
      }
    }
    if constexpr (Shape::kHasBlocks) copy_scales(turn, stage);
  }

 private:
  static constexpr bool kHasPieces = Shape::kPieces > 1;
  static constexpr int kUnit = 16;  // bytes of a copy
  static constexpr int kUnitsOfRow = kStageRow / kUnit;
  static constexpr int kRowsAtOnce = kHasPieces ? 1 : Shape::kRowWarps * kWarpSize / kUnitsOfRow;
  static constexpr int kRowsOfLane = Shape::kTileRows / kRowsAtOnce;
  static constexpr int kScalesOfLane = ceil_div(Shape::kTileRows, kWarpSize);
  static constexpr bool kReadsAhead = Shape::kTileRows <= 64;  // of more, registers do not suffice

  // Token of the lane's row i.
  __device__ __forceinline__ int row_token(const Tile& tile, int i) const {
    return token_of(tile.first_row + first_row_ + i * kRowsAtOnce);
  }
  // Of the lane's rows.
  __device__ __forceinline__ int count_of(const Tile& tile) const {
    return (tile.rows - first_row_ + kRowsAtOnce - 1) / kRowsAtOnce;
  }
  // Of the lane's row i: swizzled, so that its rows of a group, one, two or eight, differ.
  __device__ __forceinline__ int place(int i) const {
    if constexpr (kHasPieces) return (place_[0] ^ (i * kUnit)) + i * kStageRow;
    if constexpr (kRowsAtOnce == kGroupRows) return place_[0] + i * kGroupBytes;
    return place_[i % 2] + i / 2 * kGroupBytes;
  }
  __device__ __forceinline__ int token_of(int row) const {
    return few_ != nullptr ? few_->row_token[row] : load_int(arrays_.index.row_token + row);
  }

  __device__ __forceinline__ void start_scales(const Tile& tile, int column) {
    const int hidden_blocks = ceil_div(p_.hidden, kBlock);
#pragma unroll
    for (int i = 0; i < kScalesOfLane; ++i) {
      const int scaled = i * kWarpSize + lane_;
      if (scaled >= rows_) continue;
      const int token = token_of(tile.first_row + scaled);
      x_scale_[i] = arrays_.x.scale + static_cast<int64_t>(token) * hidden_blocks;
    }
    // Lane 0 those of gate, lane 1 those of up. A tile without columns has zeros of weights.
    const int block = min(column, p_.inter - 1) / p_.block_rows;
    const int64_t matrix = int64_t{tile.expert} * 2 + lane_;
    weight_scale_ = arrays_.weights.gate_up_block_scale +
                    (matrix * ceil_div(p_.inter, p_.block_rows) + block) * hidden_blocks;
  }
  __device__ __forceinline__ void copy_scales(int turn, int stage) {
    const SharedAddress to = memory_.scales(stage) + lane_ * int{sizeof(float)};
#pragma unroll
    for (int i = 0; i < kScalesOfLane; ++i) {
      const int scaled = i * kWarpSize + lane_;
      if (scaled < rows_) copy_4(to + i * kWarpSize * int{sizeof(float)}, x_scale_[i] + turn);
    }
    if (lane_ < 2) copy_4(to + Shape::kTileRows * int{sizeof(float)}, weight_scale_ + turn);
  }

  const StageMemory<Shape>& memory_;
  const Problem& p_;
  const GateUpArrays& arrays_;
  const FewPairs* few_;
  int lane_;
  int row_bytes_;  // of a token
  int hidden0_;    // byte of a token's row: the lane's, in the first turn
  int first_row_;  // of the lane
  int place_[2];
  int rows_ = 0;
  int count_ = 0;                             // of the lane's rows
  int token_[kReadsAhead ? kRowsOfLane : 1];  // of the next task
  const uint8_t* from_[kRowsOfLane];
  const float* x_scale_[kScalesOfLane];
  const float* weight_scale_ = nullptr;
};

// A task's note, by one thread before it arrives; where every CTA has the index, static scales
// alone.
template <class Shape>
__device__ __forceinline__ void copy_gate_up_note(const StageMemory<Shape>& memory, int stage,
                                                  const GateUpArrays& arrays, const FewPairs* few,
                                                  const Tile& tile) {
  const SharedAddress note = memory.note(stage);
  if (few == nullptr) copy_16(note, arrays.index.tiles + tile.number, true);
  if constexpr (Shape::kFormat == Format::kTensor) {
    const Weights& weights = arrays.weights;
    const SharedAddress scales = note + int{sizeof(Tile)};
    copy_4(scales, weights.gate_scale + tile.expert);
    copy_4(scales + 4, weights.up_scale + tile.expert);
    copy_4(scales + 8, weights.act_scale + tile.expert * weights.act_scale_stride);
    copy_4(scales + 12, weights.input_scale);
  }
}

// By the rows' warps.
template <class Shape>
__device__ __forceinline__ void copy_rows(const StageMemory<Shape>& memory, const Problem& p,
                                          TaskWalk walk, int turns, const GateUpArrays& arrays,
                                          const FewPairs* few, int lane) {
  const int reading_turn = min(turns - 1, 1);  // the next tile is there by then
  RowCopies<Shape> copies(memory, p, arrays, few, lane);
  RingPlace<Shape::kStages> place;
  Tile tile;
  int part;
  if (walk.has_next()) copies.read_tokens(walk.next_tile());
  while (walk.next(tile, part)) {
    copies.start_task(tile, part * Shape::kColumns);
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn, place.advance()) {
      if (turn == reading_turn && walk.has_next()) copies.read_tokens(walk.next_tile());
      wait(memory.empty(place.stage), place.parity ^ 1);
      if (turn == 0 && lane == 0) copy_gate_up_note(memory, place.stage, arrays, few, tile);
      copies.copy(turn, place.stage);
      arrive_when_copied(memory.full(place.stage));
    }
  }
  commit_copies();
  wait_copies<0>();
}

}  // namespace jax_hpc::fused_moe
