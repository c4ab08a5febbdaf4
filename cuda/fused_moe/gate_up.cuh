// act = requantised SiLU(gate) * up of the tokens that an expert's rows name.
//
// The 64 weight rows of a product are groups of eight gate rows and the eight up rows that belong
// to them, in turn: a thread holds gate and up of the same columns of the intermediate, 32 of them
// to a tile. With four pieces a tile has 8 columns, and the product's four warps each multiply
// another piece of the hidden axis, with the tokens' rows of that piece.
#pragma once

#include "common/fp8.cuh"
#include "fused_moe/grouped.cuh"

namespace jax_hpc::fused_moe {

constexpr int kScaleTeam = 4;  // CTAs of 32 columns that share a scale of the intermediate

template <int TileRows, int Pieces, Format format>
struct GateUpShape
    : StageShape<TileRows * Pieces, format == Format::kBlock ? TileRows + 4 : 0,
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

// By the weights' warp, one thread.
template <class Shape>
__device__ __forceinline__ void copy_gate_up(const StageMemory<Shape>& memory, const Problem& p,
                                             TaskWalk walk, int member, int turns,
                                             const CUtensorMap* map) {
  RingPlace<Shape::kStages> place;
  Tile tile;
  int part;
  while (walk.next(tile, part)) {
    const int first = (part * Shape::kTeam + member) * Shape::kColumns;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn, place.advance()) {
      wait(memory.empty(place.stage), place.parity ^ 1);
      arrive_expecting(memory.full(place.stage), kWeightBytes);
      if constexpr (Shape::kPieces == 1) {
        copy_weights(memory.weights(place.stage), map, memory.full(place.stage),
                     turn * kStageValues, 0, 0, first / kGroupRows, tile.expert);
      } else {
        copy_weights(memory.weights(place.stage), map, memory.full(place.stage), 0, first, 0,
                     turn * Shape::kPieces, tile.expert);
      }
    }
  }
}

// The copies of a stage's token rows and scales by the lanes of one warp.
template <class Shape>
class RowCopies {
 public:
  __device__ __forceinline__ RowCopies(const StageMemory<Shape>& memory, const Problem& p,
                                       const GateUpArrays& arrays, int lane)
      : memory_(memory), p_(p), arrays_(arrays), lane_(lane) {}

  __device__ __forceinline__ void start_task(const Tile& tile, int column) {
    rows_ = tile.rows;
    const auto* values = static_cast<const uint8_t*>(arrays_.x.values);
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      if (row(i) >= rows_) continue;
      const int token = load_int(arrays_.index.row_token + tile.first_row + row(i));
      from_[i] = values + static_cast<int64_t>(token) * p_.hidden + hidden0();
    }
    if constexpr (Shape::kHasBlocks) start_scales(tile, column);
  }

  __device__ __forceinline__ void copy(int turn, int stage) {
    const int offset = turn * Shape::kTurnValues;
    const bool valid = offset + hidden0() < p_.hidden;
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      if (row(i) >= rows_) continue;
      // What no token has is zero, for the weights are zero there, and zero times NaN is not.
      copy_16(memory_.rows(stage) + place(i), from_[i] + (valid ? offset : -hidden0()), valid);
    }
    if constexpr (Shape::kHasBlocks) copy_scales(turn, stage);
  }

 private:
  static constexpr int kUnit = 16;  // bytes of a copy, which are values too
  static constexpr int kUnitsOfRow = kStageValues / kUnit;
  static constexpr int kRowsAtOnce = Shape::kPieces == 1 ? kWarpSize / kUnitsOfRow : 1;
  static constexpr int kRowsOfLane = Shape::kTileRows / kRowsAtOnce;
  static constexpr int kScalesOfLane = ceil_div(Shape::kTileRows, kWarpSize);

  __device__ __forceinline__ int row(int i) const {
    return Shape::kPieces == 1 ? i * kRowsAtOnce + lane_ / kUnitsOfRow : i;
  }
  // Of a stage's first turn.
  __device__ __forceinline__ int hidden0() const {
    return (Shape::kPieces == 1 ? lane_ % kUnitsOfRow : lane_) * kUnit;
  }
  __device__ __forceinline__ int place(int i) const {
    const int piece = Shape::kPieces == 1 ? 0 : lane_ / kUnitsOfRow;
    const int swizzled = (lane_ % kUnitsOfRow) ^ (row(i) % kGroupRows);
    return (piece * Shape::kTileRows + row(i)) * kStageValues + swizzled * kUnit;
  }

  __device__ __forceinline__ void start_scales(const Tile& tile, int column) {
    const int hidden_blocks = ceil_div(p_.hidden, kBlock);
#pragma unroll
    for (int i = 0; i < kScalesOfLane; ++i) {
      const int scaled = i * kWarpSize + lane_;
      if (scaled >= rows_) continue;
      const int token = load_int(arrays_.index.row_token + tile.first_row + scaled);
      x_scale_[i] = arrays_.x.scale + static_cast<int64_t>(token) * hidden_blocks;
    }
    // Lane 0 those of gate, lane 1 those of up. A tile without columns has zeros of weights.
    const int block = min(column, p_.inter - 1) / p_.block_rows;
    const int64_t matrix = int64_t{tile.expert} * 2 + lane_;
    weight_scale_ = arrays_.weights.gate_up_block_scale +
                    (matrix * ceil_div(p_.inter, p_.block_rows) + block) * hidden_blocks;
  }
  __device__ __forceinline__ void copy_scales(int turn, int stage) {
    const SharedAddress to = memory_.scales(stage);
#pragma unroll
    for (int i = 0; i < kScalesOfLane; ++i) {
      const int scaled = i * kWarpSize + lane_;
      if (scaled < rows_) copy_4(to + scaled * int{sizeof(float)}, x_scale_[i] + turn);
    }
    if (lane_ < 2) {
      copy_4(to + (Shape::kTileRows + lane_) * int{sizeof(float)}, weight_scale_ + turn);
    }
  }

  const StageMemory<Shape>& memory_;
  const Problem& p_;
  const GateUpArrays& arrays_;
  int lane_;
  int rows_ = 0;
  const uint8_t* from_[kRowsOfLane];
  const float* x_scale_[kScalesOfLane];
  const float* weight_scale_ = nullptr;
};

// By the rows' warp.
template <class Shape>
__device__ __forceinline__ void copy_rows(const StageMemory<Shape>& memory, const Problem& p,
                                          TaskWalk walk, int member, int turns,
                                          const GateUpArrays& arrays, int lane) {
  RowCopies<Shape> copies(memory, p, arrays, lane);
  RingPlace<Shape::kStages> place;
  Tile tile;
  int part;
  while (walk.next(tile, part)) {
    copies.start_task(tile, (part * Shape::kTeam + member) * Shape::kColumns);
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn, place.advance()) {
      wait(memory.empty(place.stage), place.parity ^ 1);
      copies.copy(turn, place.stage);
      arrive_when_copied(memory.full(place.stage));
    }
  }
  commit_copies();
  wait_copies<0>();
}

// Adds a stage's products to the totals.
template <class Shape>
__device__ __forceinline__ void add_stage(const StageMemory<Shape>& memory, int stage,
                                          const Fragment& f,
                                          const float (&sums)[Shape::kRows / 2],
                                          float (&totals)[Shape::kRows / 2]) {
  if constexpr (!Shape::kHasBlocks) {
#pragma unroll
    for (int i = 0; i < Shape::kRows / 2; ++i) totals[i] += sums[i];
    return;
  }
  const SharedAddress scales = memory.scales(stage);
  constexpr int kFloat = int{sizeof(float)};
  const float2 weight = load_shared_pair(scales + Shape::kTileRows * kFloat);
#pragma unroll
  for (int j = 0; j < Shape::kRows / 8; ++j) {
    const float2 x = load_shared_pair(scales + (8 * j + f.token0) * kFloat);
    totals[4 * j] += sums[4 * j] * (x.x * weight.x);
    totals[4 * j + 1] += sums[4 * j + 1] * (x.y * weight.x);
    totals[4 * j + 2] += sums[4 * j + 2] * (x.x * weight.y);
    totals[4 * j + 3] += sums[4 * j + 3] * (x.y * weight.y);
  }
}

__device__ __forceinline__ float silu_times(float gate, float up) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// Writes a column of the intermediate of two tokens of a tile, times `factor` each.
__device__ __forceinline__ void write_column(const Problem& p, const RowBuffers& rows,
                                             const Tile& tile, int token, int column, float2 act,
                                             float2 factor) {
  const uint32_t pair = pack_fp8(act.x * factor.x, act.y * factor.y, 0.0f, 0.0f, 1.0f);
  auto* to = static_cast<uint8_t*>(rows.act) +
             static_cast<int64_t>(tile.first_row + token) * p.inter + column;
  if (token < tile.rows) to[0] = static_cast<uint8_t>(pair);
  if (token + 1 < tile.rows) to[p.inter] = static_cast<uint8_t>(pair >> 8);
}

// Static scales of a tile's expert.
struct TensorScales {
  float gate;
  float up;
  float act_reciprocal;

  __device__ __forceinline__ TensorScales(const Weights& weights, int expert)
      : gate(*weights.input_scale * weights.gate_scale[expert]),
        up(*weights.input_scale * weights.up_scale[expert]),
        act_reciprocal(1.0f / weights.act_scale[expert]) {}
};

template <class Shape>
__device__ __forceinline__ void write_tensor(const Problem& p, const RowBuffers& rows,
                                             const Tile& tile, const TensorScales& scales,
                                             int column0, const Fragment& f,
                                             const float (&totals)[Shape::kRows / 2]) {
  const int column = column0 + f.warp * kGroupRows + f.row;
  if (column >= p.inter) return;
#pragma unroll
  for (int j = 0; j < Shape::kRows / 8; ++j) {
    const float2 act = {silu_times(totals[4 * j] * scales.gate, totals[4 * j + 2] * scales.up),
                        silu_times(totals[4 * j + 1] * scales.gate,
                                   totals[4 * j + 3] * scales.up)};
    write_column(p, rows, tile, 8 * j + f.token0, column, act,
                 {scales.act_reciprocal, scales.act_reciprocal});
  }
}

// With four pieces a warp's own totals are those of its piece's tokens; the first warp adds them up
// in the order of the pieces. `turn` alternates two places for them.
template <class Shape>
__device__ __forceinline__ void write_pieces(const StageMemory<Shape>& memory, const Problem& p,
                                             const RowBuffers& rows, const Tile& tile,
                                             const TensorScales& scales, int column0,
                                             const Fragment& f, int turn,
                                             const float (&totals)[Shape::kRows / 2]) {
  float4 own{};
#pragma unroll
  for (int i = 0; i < Shape::kPieces; ++i) {
    if (f.warp == i) own = {totals[4 * i], totals[4 * i + 1], totals[4 * i + 2], totals[4 * i + 3]};
  }
  constexpr int kVector = int{sizeof(float4)};
  const SharedAddress place = memory.extra() + (turn * kConsumers + f.lane) * kVector;
  store_shared(place + f.warp * kWarpSize * kVector, own);
  sync_threads<kConsumers>(1);
  if (f.warp > 0) return;
  float4 sum = own;
#pragma unroll
  for (int i = 1; i < Shape::kPieces; ++i) {
    const float4 part = load_shared(place + i * kWarpSize * kVector);
    sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
  }
  const int column = column0 + f.row;
  if (column >= p.inter) return;
  write_column(p, rows, tile, f.token0, column,
               {silu_times(sum.x * scales.gate, sum.z * scales.up),
                silu_times(sum.y * scales.gate, sum.w * scales.up)},
               {scales.act_reciprocal, scales.act_reciprocal});
}

// Dynamic scales: every warp sends its tokens' largest magnitudes to the four CTAs whose columns
// share a scale, which find the same scale from them. Two places alternate between tasks: a CTA
// sends those of the next task but one only after it has those of the next from all others, which
// have read the last ones by then.
template <class Shape>
__device__ __forceinline__ void write_block(const StageMemory<Shape>& memory, const Problem& p,
                                            const RowBuffers& rows, const Tile& tile, int part,
                                            int member, const Fragment& f, int task,
                                            float (&totals)[Shape::kRows / 2]) {
  constexpr int kFloat = int{sizeof(float)};
  const int place = task % 2;
  const SharedAddress barrier = memory.extra() + place * 8;
  const SharedAddress magnitudes =
      memory.extra() + Shape::kMagnitudesAt + place * Shape::kMagnitudeBytes;
  if (f.warp == 0 && f.lane == 0) arrive_expecting(barrier, Shape::kMagnitudeBytes);
  // Lanes of rows 0 to 3 send to one CTA each.
  const auto peer = static_cast<uint32_t>(f.row % kScaleTeam);
  const int sender = member * (kConsumers / kWarpSize) + f.warp;
  const SharedAddress to = address_in_cluster(
      magnitudes + (sender * Shape::kTileRows + f.token0) * kFloat, peer);
  const SharedAddress barrier_there = address_in_cluster(barrier, peer);
#pragma unroll
  for (int j = 0; j < Shape::kRows / 8; ++j) {
    totals[4 * j] = silu_times(totals[4 * j], totals[4 * j + 2]);
    totals[4 * j + 1] = silu_times(totals[4 * j + 1], totals[4 * j + 3]);
    float2 most = {fabsf(totals[4 * j]), fabsf(totals[4 * j + 1])};
#pragma unroll
    for (int distance = 4; distance < kWarpSize; distance *= 2) {
      most.x = larger_magnitude(most.x, __shfl_xor_sync(0xffffffff, most.x, distance));
      most.y = larger_magnitude(most.y, __shfl_xor_sync(0xffffffff, most.y, distance));
    }
    if (f.row < kScaleTeam) send(to + 8 * j * kFloat, most, barrier_there);
  }
  wait_for_cluster(barrier, static_cast<uint32_t>(task / 2 % 2));
  const int column = (part * kScaleTeam + member) * Shape::kColumns + f.warp * kGroupRows + f.row;
  const int groups = ceil_div(p.inter, kBlock);
#pragma unroll
  for (int j = 0; j < Shape::kRows / 8; ++j) {
    float2 most = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < Shape::kSenders; ++i) {
      const float2 one =
          load_shared_pair(magnitudes + (i * Shape::kTileRows + 8 * j + f.token0) * kFloat);
      most = {larger_magnitude(most.x, one.x), larger_magnitude(most.y, one.y)};
    }
    const float2 scale = {scale_of_largest(most.x), scale_of_largest(most.y)};
    const int token = 8 * j + f.token0;
    if (member == 0 && f.warp == 0 && f.row == 0) {
      float* out = rows.act_scale + static_cast<int64_t>(tile.first_row + token) * groups + part;
      if (token < tile.rows) out[0] = scale.x;
      if (token + 1 < tile.rows) out[groups] = scale.y;
    }
    if (column < p.inter) {
      write_column(p, rows, tile, token, column, {totals[4 * j], totals[4 * j + 1]},
                   {1.0f / scale.x, 1.0f / scale.y});
    }
  }
  // Nobody of this CTA sends for the next task but one before all of it have read.
  sync_threads<kConsumers>(1);
}

// By the consumers.
template <class Shape>
__device__ __forceinline__ void multiply_gate_up(const StageMemory<Shape>& memory,
                                                 const Problem& p, TaskWalk walk, int member,
                                                 int turns, const GateUpArrays& arrays) {
  const Fragment f(static_cast<int>(threadIdx.x));
  RingPlace<Shape::kStages> place;
  Tile tile;
  int part;
  for (int task = 0; walk.next(tile, part); ++task) {
    float totals[Shape::kRows / 2] = {};
    [[maybe_unused]] const auto run = [&] {
#pragma unroll 1
      for (int turn = 0; turn < turns; ++turn, place.advance()) {
        float sums[Shape::kRows / 2];
        wait(memory.full(place.stage), place.parity);
        fence_for_products();
        wgmma_fence();
        multiply<Shape::kRows>(memory.weights(place.stage), memory.rows(place.stage), sums);
        wgmma_commit();
        wgmma_wait<0>();
        hold_all(sums);
        add_stage<Shape>(memory, place.stage, f, sums, totals);
        release(memory, place.stage, f.lane);
      }
    };
    const int column0 = (part * Shape::kTeam + member) * Shape::kColumns;
    if constexpr (Shape::kHasBlocks) {
      run();
      write_block<Shape>(memory, p, arrays.rows, tile, part, member, f, task, totals);
    } else {
      const TensorScales scales(arrays.weights, tile.expert);
      run();
      if constexpr (Shape::kPieces > 1) {
        write_pieces<Shape>(memory, p, arrays.rows, tile, scales, column0, f, task % 2, totals);
      } else {
        write_tensor<Shape>(p, arrays.rows, tile, scales, column0, f, totals);
      }
    }
  }
}

// Grid: any number of teams, which share the tasks.
template <int TileRows, int Pieces, Format format>
__global__ void __launch_bounds__(kThreads, GateUpShape<TileRows, Pieces, format>::kCtasOfSm)
    gate_up_kernel(const __grid_constant__ Problem p, const __grid_constant__ GateUpArrays arrays,
                   const __grid_constant__ CUtensorMap map) {
  using Shape = GateUpShape<TileRows, Pieces, format>;
  extern __shared__ uint8_t gate_up_memory[];
  const StageMemory<Shape> memory = stage_memory<Shape>(gate_up_memory);
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (threadIdx.x == kWeightWarp * kWarpSize) {
    init_stages(memory, 1 + kWarpSize);
    if constexpr (Shape::kHasBlocks) {
      init_barrier(memory.extra(), 1);
      init_barrier(memory.extra() + 8, 1);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if constexpr (Shape::kTeam > 1) {
    cluster_arrive_relaxed();
    cluster_wait();
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int member = Shape::kTeam > 1 ? static_cast<int>(cluster_rank()) : 0;
  const TaskWalk walk(arrays.index, ceil_div(p.inter, Shape::kColumns * Shape::kTeam),
                      static_cast<int>(blockIdx.x) / Shape::kTeam,
                      static_cast<int>(gridDim.x) / Shape::kTeam);
  const int turns = ceil_div(p.hidden, Shape::kTurnValues);
  if (warp == kWeightWarp) {
    if (elect_one()) copy_gate_up<Shape>(memory, p, walk, member, turns, &map);
  } else if (warp == kRowWarp) {
    copy_rows<Shape>(memory, p, walk, member, turns, arrays, lane);
  } else {
    multiply_gate_up<Shape>(memory, p, walk, member, turns, arrays);
  }
}

}  // namespace jax_hpc::fused_moe
