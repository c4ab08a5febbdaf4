// outputs = down of the intermediate's rows, 64, 128 or of bf16 256 of the hidden values to a task.
//
// Weights and index do not depend on gate-up, which runs before: a CTA that finds room while
// gate-up ends fills its ring with weights meanwhile. Only the intermediate's rows wait, and of a
// later slice not even they.
#pragma once

#include <cuda_bf16.h>

#include "fused_moe/grouped.cuh"
#include "fused_moe/scales.cuh"

namespace jax_hpc::fused_moe {

template <int TileRows, Format format>
struct DownShape
    : SquareStageShape<format, TileRows, TileRows, format == Format::kBlock ? TileRows + 4 : 0, 0> {
  static constexpr int kTaskRows = DownShape::kGroups * kWeightRows;  // hidden values of a task
};

struct DownArrays {
  Index index;
  Weights weights;
  RowBuffers rows;
  Slice slice;
};

// Of a slice, of which a task has `Rows` values.
template <int Rows>
__device__ __forceinline__ Tasks tasks_of(const Slice& slice) {
  static_assert(kSliceUnit % Rows == 0);
  return Tasks(ceil_div(slice.count, Rows), slice.first / Rows);
}

// By the rows' warp, which has read the index before. Down of a later slice follows the reduction
// of another slice, which it does not depend on; and gate-up has ended, for the first down lets the
// next kernel start only behind its wait.
__device__ __forceinline__ void wait_for_act(const Slice& slice) {
  if (slice.first == 0) wait_for_previous_kernel();
  let_next_kernel_start();
}
// At the end: what waits for this kernel then waits for all reductions before it, too.
__device__ __forceinline__ void wait_for_reduction(const Slice& slice) {
  if (slice.first > 0) wait_for_previous_kernel();
}

// By the weights' warp.
template <class Shape>
__device__ __forceinline__ void copy_down(const StageMemory<Shape>& memory, TaskBatch<> batch,
                                          int turns, const CUtensorMap* map) {
  RingPlace<Shape::kStages> place;
  Tile tile;
  int part;
  while (batch.next(tile, part)) {
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn, place.advance()) {
      wait_for_room(memory, place);
      if (elect_one()) {
        arrive_expecting(memory.full(place.stage), Shape::kRowsAt);
        copy_weights(memory.weights(place.stage), map, memory.full(place.stage), turn * kStageRow,
                     part * Shape::kTaskRows, tile.expert);
      }
    }
  }
}

// What the consumers need to know of a task: its tile's rows, and what the sums are multiplied by.
struct Note {
  int first_row;
  int rows;
  float factor;
};

// By one thread, before it arrives.
template <class Shape>
__device__ __forceinline__ void write_note(const StageMemory<Shape>& memory, int stage,
                                           const Tile& tile, float factor) {
  store_shared(memory.note(stage),
               float4{__int_as_float(tile.first_row), __int_as_float(tile.rows), factor, 0.0f});
}
template <class Shape>
__device__ __forceinline__ Note read_note(const StageMemory<Shape>& memory, int stage) {
  const float4 words = load_shared(memory.note(stage));
  return {__float_as_int(words.x), __float_as_int(words.y), words.z};
}

// By the rows' warp, one thread: the intermediate's rows, in groups of eight, and with the first
// stage the note. Rows behind a tile's last are another expert's, and nobody's business.
template <class Shape>
__device__ __forceinline__ void copy_act(const StageMemory<Shape>& memory, int stage, int turn,
                                         const Tile& tile, float factor, const CUtensorMap* map) {
  const int groups = ceil_div(tile.rows, kGroupRows);
  for (int i = 0; i < groups; ++i) {
    copy_tile(memory.rows(stage) + i * kGroupBytes, map, memory.full(stage), turn * kStageRow,
              tile.first_row + i * kGroupRows);
  }
  if (turn == 0) write_note(memory, stage, tile, factor);
  arrive_expecting(memory.full(stage), static_cast<uint32_t>(groups * kGroupBytes));
}

// By the rows' warp.
template <class Shape, class Factor>
__device__ __forceinline__ void copy_rows(const StageMemory<Shape>& memory, TaskBatch<Factor> batch,
                                          int turns, const CUtensorMap* map) {
  RingPlace<Shape::kStages> place;
  Tile tile;
  int part;
  float factor;
  while (batch.next(tile, part, factor)) {
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn, place.advance()) {
      wait_for_room(memory, place);
      if (elect_one()) copy_act(memory, place.stage, turn, tile, factor, map);
    }
  }
}

// The same with the scales of kBlock: of each row, and of the two halves of the stage's weights.
template <class Shape>
__device__ __forceinline__ void copy_scaled_rows(const StageMemory<Shape>& memory, const Problem& p,
                                                 TaskBatch<> batch, int turns,
                                                 const DownArrays& arrays, int lane,
                                                 const CUtensorMap* map) {
  constexpr int kFloat = int{sizeof(float)};
  const int inter_blocks = ceil_div(p.inter, p.block_rows);
  RingPlace<Shape::kStages> place;
  Tile tile;
  int part;
  while (batch.next(tile, part)) {
    const float* row_scale = arrays.rows.act_scale + static_cast<int64_t>(tile.first_row) * turns;
    const int64_t scale_row =
        int64_t{tile.expert} * ceil_div(p.hidden, kBlock) + part * Shape::kTaskRows / kBlock;
    const float* weight_scale = arrays.weights.down_block_scale + scale_row * inter_blocks;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn, place.advance()) {
      wait(memory.empty(place.stage), place.parity ^ 1);
      if (lane == 0) copy_act(memory, place.stage, turn, tile, 1.0f, map);
      const SharedAddress to = memory.scales(place.stage);
#pragma unroll
      for (int row = lane; row < Shape::kRows; row += kWarpSize) {
        if (row < tile.rows) copy_4(to + row * kFloat, row_scale + int64_t{row} * turns + turn);
      }
      if (lane < 2) {
        // What lies behind the last block has zeros of weights.
        const int block = min(turn * kStageValues + lane * (kStageValues / 2), p.inter - 1);
        copy_4(to + (Shape::kRows + lane) * kFloat, weight_scale + block / p.block_rows);
      }
      arrive_when_copied(memory.full(place.stage));
    }
  }
  commit_copies();
  wait_copies<0>();
}

// Writes the tile's products: bf16, 16 bytes of a token's row at once by a quarter of a warp.
template <class Shape>
__device__ __forceinline__ void write_outputs(const Problem& p, const RowBuffers& rows,
                                              const Note& tile, int part, const Fragment& f,
                                              const float (&totals)[Shape::kRows / 2]) {
  const int hidden0 = part * Shape::kTaskRows + f.group * kWeightRows + f.warp * 16;
  if (hidden0 >= p.hidden) return;  // a multiple of 16, as hidden is
  const auto scaled = [&](const float* pair) {
    return transpose(pack_bf16(pair[0] * tile.factor, pair[1] * tile.factor));
  };
  auto* outputs = static_cast<__nv_bfloat16*>(rows.outputs) +
                  static_cast<int64_t>(tile.first_row) * p.hidden + hidden0 + f.token0;
#pragma unroll
  for (int j = 0; j < Shape::kRows / 8; ++j) {
    const uint32_t low = scaled(totals + 4 * j);
    const uint32_t high = scaled(totals + 4 * j + 2);
    const int token = 8 * j + f.row;
    if (token >= tile.rows) continue;
    auto* to = outputs + static_cast<int64_t>(token) * p.hidden;
    *reinterpret_cast<uint32_t*>(to) = low;
    *reinterpret_cast<uint32_t*>(to + 8) = high;
  }
}

// Writes the tile's products in float32, 32 bytes of a token's row at once by eight lanes: rounded
// to bf16 here and after the weighted sum again, the largest error of experts in bf16 would be more
// than twice that of one rounding.
template <class Shape>
__device__ __forceinline__ void write_floats(const Problem& p, const RowBuffers& rows,
                                             const Note& tile, int part, const Fragment& f,
                                             const float (&totals)[Shape::kRows / 2]) {
  const int hidden0 = part * Shape::kTaskRows + f.group * kWeightRows + f.warp * 16;
  if (hidden0 >= p.hidden) return;
  auto* to = static_cast<float*>(rows.outputs) +
             static_cast<int64_t>(tile.first_row + f.token0) * p.hidden + hidden0 + f.row;
#pragma unroll
  for (int j = 0; j < Shape::kRows / 8; ++j) {
    float* at = to + static_cast<int64_t>(8 * j) * p.hidden;
    const int token = 8 * j + f.token0;
    if (token < tile.rows) {
      at[0] = totals[4 * j];
      at[8] = totals[4 * j + 2];
    }
    if (token + 1 < tile.rows) {
      at[p.hidden] = totals[4 * j + 1];
      at[p.hidden + 8] = totals[4 * j + 3];
    }
  }
}

// Adds the products of half a stage, whose weights have a scale of their own.
template <class Shape>
__device__ __forceinline__ void add_half(const StageMemory<Shape>& memory, int stage, int half,
                                         const Fragment& f, const float (&sums)[Shape::kRows / 2],
                                         float (&totals)[Shape::kRows / 2]) {
  constexpr int kFloat = int{sizeof(float)};
  const SharedAddress scales = memory.scales(stage);
  const float2 weights = load_shared_pair(scales + Shape::kRows * kFloat);
  const float weight = half == 0 ? weights.x : weights.y;
#pragma unroll
  for (int j = 0; j < Shape::kRows / 8; ++j) {
    const float2 row = load_shared_pair(scales + (8 * j + f.token0) * kFloat);
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; ++i) {
      totals[i] += sums[i] * ((i % 2 == 0 ? row.x : row.y) * weight);
    }
  }
}

// Weights of one scale are one sum; of bf16 all stages are.
template <class Shape>
__device__ __forceinline__ void multiply_whole(const StageMemory<Shape>& memory, int stage,
                                               const Fragment& f,
                                               float (&totals)[Shape::kRows / 2]) {
  if constexpr (Shape::kFormat == Format::kBf16) {
    accumulate<Shape::kRows>(memory.weights(stage) + f.group * kWeightBytes, memory.rows(stage),
                             totals);
  } else {
    float sums[Shape::kRows / 2];
    wgmma_fence();
    multiply<Shape::kRows>(memory.weights(stage) + f.group * kWeightBytes, memory.rows(stage),
                           sums);
    wgmma_commit();
    wgmma_wait<0>();
    hold_all(sums);
    if constexpr (Shape::kHasBlocks) {
      add_half(memory, stage, 0, f, sums, totals);
    } else {
#pragma unroll
      for (int i = 0; i < Shape::kRows / 2; ++i) totals[i] += sums[i];
    }
  }
}

// Both halves at once where registers allow it; else in a loop, which unrolled would need more.
template <class Shape>
__device__ __forceinline__ void multiply_halves(const StageMemory<Shape>& memory, int stage,
                                                const Fragment& f,
                                                float (&totals)[Shape::kRows / 2]) {
  constexpr int kHalves = 2;
  constexpr int kAtOnce = Shape::kRows <= 64 ? kHalves : 1;
  const SharedAddress weights = memory.weights(stage) + f.group * kWeightBytes;
  const SharedAddress rows = memory.rows(stage);
#pragma unroll 1
  for (int first = 0; first < kHalves; first += kAtOnce) {
    float sums[kAtOnce][Shape::kRows / 2];
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = (first + i) * kStageValues / kHalves;
      multiply<Shape::kRows, 2>(weights + at, rows + at, sums[i]);
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) hold_all(sums[i]);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) add_half(memory, stage, first + i, f, sums[i], totals);
  }
}

// By the consumers.
template <class Shape>
__device__ __forceinline__ void multiply_down(const StageMemory<Shape>& memory, const Problem& p,
                                              const RowBuffers& rows, Tasks tasks, int turns) {
  const Fragment f(static_cast<int>(threadIdx.x), Shape::kGroups);
  RingPlace<Shape::kStages> place;
  for (; tasks.has_next(); tasks.advance()) {
    int number;
    int part;
    tasks.read(number, part);
    wait(memory.full(place.stage), place.parity);
    const Note tile = read_note(memory, place.stage);
    float totals[Shape::kRows / 2] = {};
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn, place.advance()) {
      wait(memory.full(place.stage), place.parity);
      if (Shape::kHasBlocks && p.block_rows < kBlock) {
        multiply_halves(memory, place.stage, f, totals);
      } else {
        multiply_whole(memory, place.stage, f, totals);
      }
      release(memory, place.stage, f.lane);
    }
    if constexpr (Shape::kFormat == Format::kBf16) {
      write_floats<Shape>(p, rows, tile, part, f, totals);
    } else {
      write_outputs<Shape>(p, rows, tile, part, f, totals);
    }
  }
}

// Grid: any number of CTAs, which share the tasks.
template <int TileRows, Format format>
__global__ void __launch_bounds__(DownShape<TileRows, format>::kThreads,
                                  DownShape<TileRows, format>::kCtasOfSm)
    down_kernel(const __grid_constant__ Problem p, const __grid_constant__ DownArrays arrays,
                const __grid_constant__ CUtensorMap weight_map,
                const __grid_constant__ CUtensorMap act_map) {
  using Shape = DownShape<TileRows, format>;
  extern __shared__ uint8_t down_memory[];
  const StageMemory<Shape> memory{stages_start(down_memory)};
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (threadIdx.x == Shape::kWeightWarp * kWarpSize) {
    init_stages(memory, Shape::kHasBlocks ? 2 + kWarpSize : 2);
    fence_barrier_init();
  }
  __syncthreads();
  Tasks tasks = tasks_of<Shape::kTaskRows>(arrays.slice);
  const int turns = ceil_div(p.inter * value_bytes(format), kStageRow);
  if (warp == Shape::kWeightWarp) {
    copy_down<Shape>(memory, TaskBatch<>(arrays.index, tasks), turns, &weight_map);
  } else if (warp == Shape::kRowWarp) {
    if constexpr (Shape::kHasBlocks) {
      const TaskBatch<> batch(arrays.index, tasks);
      wait_for_act(arrays.slice);
      copy_scaled_rows<Shape>(memory, p, batch, turns, arrays, lane, &act_map);
    } else if constexpr (format == Format::kTensor) {
      const TaskBatch<DownFactor> batch(arrays.index, tasks, {arrays.weights});
      wait_for_act(arrays.slice);
      copy_rows<Shape>(memory, batch, turns, &act_map);
    } else {
      const TaskBatch<> batch(arrays.index, tasks);
      wait_for_act(arrays.slice);
      copy_rows<Shape>(memory, batch, turns, &act_map);
    }
    wait_for_reduction(arrays.slice);
  } else {
    tasks.read_count(arrays.index, nullptr);
    multiply_down<Shape>(memory, p, arrays.rows, tasks, turns);
  }
}

}  // namespace jax_hpc::fused_moe
