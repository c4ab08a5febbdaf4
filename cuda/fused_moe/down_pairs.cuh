// down of an intermediate of 192 columns, where a task of down.cuh would copy a quarter of zeros
// and be over before it is under way.
//
// Two weight rows are three rows of 128 bytes: the first has columns 0 to 127 of the even row, the
// second the even row's last 64 and the odd row's first 64, the third the odd row's last 128. So 64
// pairs of rows are one copy of 24 KB without gaps, and one task. The product takes 32 columns at a
// time, six of an even row from the start on, six of an odd row behind them. The intermediate's
// rows are in pieces of 64 columns.
#pragma once

#include "fused_moe/down.cuh"

namespace jax_hpc::fused_moe {

constexpr int kPairRows = 2 * kPairs;  // hidden values of a task
constexpr int kPairWeightBytes = kPairRows * kPairColumns;
constexpr int kPieceGroupBytes = kGroupRows * kPairColumns;  // eight rows of the intermediate

template <int TileRows, Format format>
struct DownPairsShape
    : StageShape<1, 2, kPairWeightBytes,
                 (TileRows * kPairColumns + kGroupBytes - 1) / kGroupBytes * kGroupBytes,
                 format == Format::kBlock ? 2 * TileRows + 4 : 0, 0> {
  static constexpr int kRows = TileRows;
  static constexpr bool kHasBlocks = format == Format::kBlock;
  static constexpr int kTaskRows = kPairRows;
};

// By the weights' warp.
template <class Shape>
__device__ __forceinline__ void copy_pairs(const StageMemory<Shape>& memory, TaskBatch<> batch,
                                           const CUtensorMap* map) {
  RingPlace<Shape::kStages> place;
  Tile tile;
  int part;
  while (batch.next(tile, part)) {
    wait_for_room(memory, place);
    if (elect_one()) {
      arrive_expecting(memory.full(place.stage), kPairWeightBytes);
      copy_weights(memory.weights(place.stage), map, memory.full(place.stage), 0, part * kPairs, 0,
                   tile.expert);
    }
    place.advance();
  }
}

// By the rows' warp: groups of eight rows, and the scales of kBlock, [group of columns][row], then
// those of the weights, one for each 64 columns.
template <class Shape, class Factor>
__device__ __forceinline__ void copy_pair_rows(const StageMemory<Shape>& memory, const Problem& p,
                                               TaskBatch<Factor> batch, const DownArrays& arrays,
                                               int lane, const CUtensorMap* map) {
  constexpr int kFloat = int{sizeof(float)};
  constexpr int kGroups = 2;  // of 128 columns
  const int weight_blocks = ceil_div(kPairColumns, p.block_rows);
  RingPlace<Shape::kStages> place;
  Tile tile;
  int part;
  float factor;
  while (batch.next(tile, part, factor)) {
    wait_for_room(memory, place);
    if (lane == 0) {
      const int groups = ceil_div(tile.rows, kGroupRows);
      for (int i = 0; i < groups; ++i) {
        copy_tile(memory.rows(place.stage) + i * kPieceGroupBytes, map, memory.full(place.stage), 0,
                  tile.first_row + i * kGroupRows, 0);
      }
      write_note(memory, place.stage, tile, factor);
      arrive_expecting(memory.full(place.stage), static_cast<uint32_t>(groups * kPieceGroupBytes));
    }
    if constexpr (Shape::kHasBlocks) {
      const SharedAddress to = memory.scales(place.stage);
#pragma unroll
      for (int row = lane; row < Shape::kRows; row += kWarpSize) {
        if (row >= tile.rows) continue;
        const float* from =
            arrays.rows.act_scale + static_cast<int64_t>(tile.first_row + row) * kGroups;
        copy_4(to + row * kFloat, from);
        copy_4(to + (Shape::kRows + row) * kFloat, from + 1);
      }
      if (lane < kPieces) {
        const int64_t scale_row = int64_t{tile.expert} * ceil_div(p.hidden, kBlock) + part;
        copy_4(to + (kGroups * Shape::kRows + lane) * kFloat,
               arrays.weights.down_block_scale + scale_row * weight_blocks +
                   lane * kPieceColumns / p.block_rows);
      }
      arrive_when_copied(memory.full(place.stage));
    }
    place.advance();
  }
  if constexpr (Shape::kHasBlocks) {
    commit_copies();
    wait_copies<0>();
  }
}

// Descriptor of eight-row groups of 64-byte rows in the copy engine's 64-byte swizzle, a group of
// kPieceGroupBytes away from the next.
__device__ __forceinline__ uint64_t piece_descriptor(SharedAddress place) {
  constexpr uint64_t kSwizzle64 = uint64_t{2} << 62;
  constexpr uint64_t kGroupUnits = kPieceGroupBytes >> 4;
  return kSwizzle64 | (kGroupUnits << 32) | (uint64_t{1} << 16) | ((place & 0x3ffff) >> 4);
}

// Products of columns 32 * First to 32 * Last of a stage's even rows, or its odd ones.
template <int Rows, int First, int Last>
__device__ __forceinline__ void multiply_half(SharedAddress weights, SharedAddress rows, bool odd,
                                              float (&sums)[Rows / 2]) {
  constexpr int kColumns = 32;
  constexpr int kSteps = kPairColumns / kColumns;
#pragma unroll
  for (int k = First; k < Last; ++k) {
    const int step = odd ? k + kSteps : k;
    const SharedAddress a = weights + step / 4 * kWeightBytes + step % 4 * kColumns;
    const SharedAddress b = rows + k / 2 * kGroupRows * kPieceColumns + k % 2 * kColumns;
    WgmmaE4m3<Rows>::multiply(sums, descriptor(swizzled_tile(a)), piece_descriptor(b), k > First);
  }
}

// Of the even and the odd row of a pair.
template <int Rows>
struct PairSums {
  float even[Rows / 2];
  float odd[Rows / 2];
};

// Of even and odd rows together, with one wait.
template <class Shape, int First, int Last>
__device__ __forceinline__ void multiply_pairs(const StageMemory<Shape>& memory, int stage,
                                               PairSums<Shape::kRows>& sums) {
  const SharedAddress weights = memory.weights(stage);
  const SharedAddress rows = memory.rows(stage);
  wgmma_fence();
  multiply_half<Shape::kRows, First, Last>(weights, rows, false, sums.even);
  multiply_half<Shape::kRows, First, Last>(weights, rows, true, sums.odd);
  wgmma_commit();
  wgmma_wait<0>();
  hold_all(sums.even);
  hold_all(sums.odd);
}

// Adds the products of the last 64 columns: what 128 have been summed of in the tensor cores is
// added up in float32.
template <class Shape>
__device__ __forceinline__ void add_last_piece(const StageMemory<Shape>& memory, int stage,
                                               PairSums<Shape::kRows>& totals) {
  PairSums<Shape::kRows> sums;
  if constexpr (Shape::kRows < 64) {
    multiply_pairs<Shape, 4, 6>(memory, stage, sums);
  }
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    float (&own)[Shape::kRows / 2] = odd ? sums.odd : sums.even;
    float (&to)[Shape::kRows / 2] = odd ? totals.odd : totals.even;
    if constexpr (Shape::kRows == 64) {  // one after the other, or registers do not suffice
      wgmma_fence();
      multiply_half<Shape::kRows, 4, 6>(memory.weights(stage), memory.rows(stage), odd, own);
      wgmma_commit();
      wgmma_wait<0>();
      hold_all(own);
    }
#pragma unroll
    for (int i = 0; i < Shape::kRows / 2; ++i) to[i] += own[i];
  }
}

// Adds the products of 64 columns, which share scales, of either half of the pairs. One half after
// the other, so that the registers suffice for 64 rows.
template <class Shape, int Piece>
__device__ __forceinline__ void multiply_piece(const StageMemory<Shape>& memory, int stage,
                                               const Fragment& f, PairSums<Shape::kRows>& totals) {
  constexpr int kFloat = int{sizeof(float)};
  constexpr int kPiecesOfGroup = kBlock / kPieceColumns;
  const SharedAddress scales = memory.scales(stage);
  const float2 weights = load_shared_pair(scales + (2 * Shape::kRows + Piece / 2 * 2) * kFloat);
  const float weight = Piece % 2 == 0 ? weights.x : weights.y;
  const auto multiply_and_add = [&](bool odd, float (&to)[Shape::kRows / 2]) {
    float sums[Shape::kRows / 2];
    wgmma_fence();
    multiply_half<Shape::kRows, 2 * Piece, 2 * Piece + 2>(memory.weights(stage), memory.rows(stage),
                                                          odd, sums);
    wgmma_commit();
    wgmma_wait<0>();
    hold_all(sums);
#pragma unroll
    for (int j = 0; j < Shape::kRows / 8; ++j) {
      const float2 row = load_shared_pair(
          scales + (Piece / kPiecesOfGroup * Shape::kRows + 8 * j + f.token0) * kFloat);
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; ++i) {
        to[i] += sums[i] * ((i % 2 == 0 ? row.x : row.y) * weight);
      }
    }
  };
  multiply_and_add(false, totals.even);
  multiply_and_add(true, totals.odd);
}

// A pair's two values are neighbours: eight lanes write 32 bytes of a token's row.
template <class Shape>
__device__ __forceinline__ void write_pairs(const Problem& p, const RowBuffers& rows,
                                            const Note& tile, int part, const Fragment& f,
                                            const PairSums<Shape::kRows>& totals) {
  const int hidden0 = part * kPairRows + 2 * (f.warp * 16 + f.row);
  auto* outputs = static_cast<__nv_bfloat16*>(rows.outputs) +
                  static_cast<int64_t>(tile.first_row) * p.hidden + hidden0;
#pragma unroll
  for (int i = 0; i < Shape::kRows / 2; ++i) {
    const int token = i / 4 * 8 + f.token0 + i % 2;
    const int below = i % 4 / 2 * 16;  // hidden values
    if (token >= tile.rows || hidden0 + below >= p.hidden) continue;
    auto* to = outputs + static_cast<int64_t>(token) * p.hidden + below;
    *reinterpret_cast<uint32_t*>(to) =
        pack_bf16(totals.even[i] * tile.factor, totals.odd[i] * tile.factor);
  }
}

// By the consumers.
template <class Shape>
__device__ __forceinline__ void multiply_down_pairs(const StageMemory<Shape>& memory,
                                                    const Problem& p, const RowBuffers& rows,
                                                    Tasks tasks) {
  const Fragment f(static_cast<int>(threadIdx.x), Shape::kGroups);
  RingPlace<Shape::kStages> place;
  for (; tasks.has_next(); tasks.advance()) {
    int number;
    int part;
    tasks.read(number, part);
    wait(memory.full(place.stage), place.parity);
    const Note tile = read_note(memory, place.stage);
    PairSums<Shape::kRows> totals{};
    if constexpr (Shape::kHasBlocks) {
      multiply_piece<Shape, 0>(memory, place.stage, f, totals);
      multiply_piece<Shape, 1>(memory, place.stage, f, totals);
      multiply_piece<Shape, 2>(memory, place.stage, f, totals);
    } else {
      multiply_pairs<Shape, 0, 4>(memory, place.stage, totals);
      add_last_piece(memory, place.stage, totals);
    }
    release(memory, place.stage, f.lane);
    place.advance();
    write_pairs<Shape>(p, rows, tile, part, f, totals);
  }
}

// Grid: any number of CTAs, which share the tasks.
template <int TileRows, Format format>
__global__ void __launch_bounds__(DownPairsShape<TileRows, format>::kThreads,
                                  DownPairsShape<TileRows, format>::kCtasOfSm)
    down_pairs_kernel(const __grid_constant__ Problem p, const __grid_constant__ DownArrays arrays,
                      const __grid_constant__ CUtensorMap weight_map,
                      const __grid_constant__ CUtensorMap act_map) {
  using Shape = DownPairsShape<TileRows, format>;
  extern __shared__ uint8_t pairs_memory[];
  const StageMemory<Shape> memory{stages_start(pairs_memory)};
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (threadIdx.x == Shape::kWeightWarp * kWarpSize) {
    init_stages(memory, Shape::kHasBlocks ? 2 + kWarpSize : 2);
    fence_barrier_init();
  }
  __syncthreads();
  Tasks tasks = tasks_of<kPairRows>(arrays.slice);
  if (warp == Shape::kWeightWarp) {
    copy_pairs<Shape>(memory, TaskBatch<>(arrays.index, tasks), &weight_map);
  } else if (warp == Shape::kRowWarp) {
    if constexpr (Shape::kHasBlocks) {
      const TaskBatch<> batch(arrays.index, tasks);
      wait_for_act(arrays.slice);
      copy_pair_rows<Shape>(memory, p, batch, arrays, lane, &act_map);
    } else {
      const TaskBatch<DownFactor> batch(arrays.index, tasks, {arrays.weights});
      wait_for_act(arrays.slice);
      copy_pair_rows<Shape>(memory, p, batch, arrays, lane, &act_map);
    }
    wait_for_reduction(arrays.slice);
  } else {
    tasks.read_count(arrays.index, nullptr);
    multiply_down_pairs<Shape>(memory, p, arrays.rows, tasks);
  }
}

}  // namespace jax_hpc::fused_moe
