// act = requantised, or rounded, SiLU(gate) * up of the tokens that an expert's rows name.
//
// The 64 weight rows of a product are groups of eight gate rows and the eight up rows that belong
// to them, in turn: a thread holds gate and up of the same columns of the intermediate, 32 of them
// to a warpgroup. With four pieces it has 8 columns, and the product's four warps each multiply
// another piece of the hidden axis, with the tokens' rows of that piece.
#pragma once

#include "fused_moe/early.cuh"
#include "fused_moe/gate_up_copies.cuh"
#include "fused_moe/gate_up_results.cuh"

namespace jax_hpc::fused_moe {

// Adds products of a stage to the totals.
template <class Shape>
__device__ __forceinline__ void add_products(const StageMemory<Shape>& memory, int stage,
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

// How the 128 values of a stage are summed. The tensor cores' sums keep 13 bits behind the largest
// term's first: of 128 values that moves one in 100 results to the other side of a rounding to
// e4m3, of 32 one in 300. So a sum of theirs has one step of 32 values, or where float32's
// additions would take longer than the products, two or in large tiles all four, and float32 adds
// the sums up. As many of them stand side by side as registers allow.
template <class Shape>
struct Summing {
  static constexpr int kSteps = 4;
  static constexpr bool kIsLarge = Shape::kRows == 128;
  static constexpr bool kIsMiddle = Shape::kRows == 64 || (Shape::kHasBlocks && Shape::kRows == 32);
  static constexpr int kFollowing = kIsLarge ? kSteps : kIsMiddle ? 2 : 1;
  static constexpr bool kIsAlone = kIsLarge || (Shape::kRows == 64 && !Shape::kHasBlocks);
  static constexpr int kAtOnce = Shape::kRows <= 16 ? kSteps : kIsAlone ? 1 : 2;
};

// The products of a stage, added to the totals.
template <class Shape>
__device__ __forceinline__ void multiply_stage(const StageMemory<Shape>& memory, int stage,
                                               const Fragment& f,
                                               float (&totals)[Shape::kRows / 2]) {
  using S = Summing<Shape>;
  const uint32_t a = swizzled_tile(memory.weights(stage) + f.group * kWeightBytes);
  const uint32_t b = swizzled_tile(memory.rows(stage));
#pragma unroll
  for (int first = 0; first < S::kSteps; first += S::kAtOnce * S::kFollowing) {
    float sums[S::kAtOnce][Shape::kRows / 2];
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::kAtOnce * S::kFollowing; ++i) {
      const int units = 2 * (first + i);  // of a descriptor
      WgmmaE4m3<Shape::kRows>::multiply(sums[i / S::kFollowing], descriptor(a + units),
                                        descriptor(b + units), i % S::kFollowing > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < S::kAtOnce; ++i) hold_all(sums[i]);
#pragma unroll
    for (int i = 0; i < Shape::kRows / 2; ++i) {
      if constexpr (S::kAtOnce >= 2) sums[0][i] += sums[1][i];
      if constexpr (S::kAtOnce == 4) sums[0][i] += sums[2][i] + sums[3][i];
    }
    add_products<Shape>(memory, stage, f, sums[0], totals);
  }
}

// Products of turns of a task, added to the totals.
template <class Shape>
__device__ __forceinline__ void multiply_turns(const StageMemory<Shape>& memory, int turns,
                                               const Fragment& f, RingPlace<Shape::kStages>& place,
                                               float (&totals)[Shape::kRows / 2]) {
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn, place.advance()) {
    wait(memory.full(place.stage), place.parity);
    fence_for_products();
    if constexpr (Shape::kFormat == Format::kBf16) {
      accumulate<Shape::kRows>(memory.weights(place.stage) + f.group * kWeightBytes,
                               memory.rows(place.stage), totals);
    } else {
      multiply_stage<Shape>(memory, place.stage, f, totals);
    }
    release(memory, place.stage, f.lane);
  }
}

// By the consumers: the tile of a task whose first stage is there.
template <class Shape>
__device__ __forceinline__ Tile read_tile(const StageMemory<Shape>& memory, int stage,
                                          const FewPairs* few, int number) {
  if (few != nullptr) {
    const Tile& tile = few->tiles[number];
    return {tile.expert, tile.first_row, tile.rows, number};
  }
  const uint4 note = load_shared_words(memory.note(stage));
  return {static_cast<int>(note.x), static_cast<int>(note.y), static_cast<int>(note.z), number};
}

// By the consumers, of static scales or none.
template <class Shape>
__device__ __forceinline__ void multiply_static(const StageMemory<Shape>& memory, const Problem& p,
                                                const RowBuffers& rows, Tasks tasks, int turns,
                                                const FewPairs* few) {
  const Fragment f(static_cast<int>(threadIdx.x), Shape::kGroups);
  RingPlace<Shape::kStages> place;
  for (int task = 0; tasks.has_next(); tasks.advance(), ++task) {
    int number;
    int part;
    tasks.read(number, part);
    wait(memory.full(place.stage), place.parity);
    const Tile tile = read_tile(memory, place.stage, few, number);
    const Scales<Shape> scales = read_scales(memory, place.stage);
    float totals[Shape::kRows / 2] = {};
    multiply_turns<Shape>(memory, turns, f, place, totals);
    const int column0 = part * Shape::kColumns + f.group * Shape::kGroupColumns;
    if constexpr (Shape::kPieces > 1) {
      write_pieces<Shape>(memory, p, rows, tile, scales, column0, f, task % 2, totals);
    } else {
      write_tile<Shape>(p, rows, tile, scales, column0, f, totals);
    }
  }
}

// By the consumers, of block scales.
template <class Shape>
__device__ __forceinline__ void multiply_block(const StageMemory<Shape>& memory, const Problem& p,
                                               const RowBuffers& rows, Tasks tasks, int turns,
                                               const FewPairs* few) {
  const Fragment f(static_cast<int>(threadIdx.x), Shape::kGroups);
  RingPlace<Shape::kStages> place;
  for (; tasks.has_next(); tasks.advance()) {
    int number;
    int part;
    tasks.read(number, part);
    wait(memory.full(place.stage), place.parity);
    const Tile tile = read_tile(memory, place.stage, few, number);
    float totals[Shape::kRows / 2] = {};
    multiply_turns<Shape>(memory, turns, f, place, totals);
    leave_unscaled<Shape>(p, rows, tile, part * Shape::kColumns + f.group * Shape::kGroupColumns, f,
                          totals);
    const int group = part / Shape::kScaleParts;
    if (is_last_of_group(memory, p, rows, tile, group)) {
      quantize_group<Shape>(p, rows, tile, group, f);
    }
  }
}

// Grid: any number of CTAs, which share the tasks.
template <int TileRows, int Pieces, Format format>
__global__ void __launch_bounds__(GateUpShape<TileRows, Pieces, format>::kThreads,
                                  GateUpShape<TileRows, Pieces, format>::kCtasOfSm)
    gate_up_kernel(const __grid_constant__ Problem p, const __grid_constant__ GateUpArrays arrays,
                   const __grid_constant__ CUtensorMap map) {
  using Shape = GateUpShape<TileRows, Pieces, format>;
  extern __shared__ uint8_t gate_up_memory[];
  const StageMemory<Shape> memory{stages_start(gate_up_memory)};
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int extra = static_cast<int>(memory.extra() - shared_address(gate_up_memory));
  auto* few = reinterpret_cast<FewPairs*>(gate_up_memory + extra);
  if (num_pairs(p) > kFewPairs) few = nullptr;
  if (few != nullptr && warp == 0) sort_few(p, TileRows, arrays.index, lane, *few);
  if (threadIdx.x == Shape::kWeightWarp * kWarpSize) {
    init_stages(memory, 1 + Shape::kRowWarps * kWarpSize);
    fence_barrier_init();
  }
  __syncthreads();
  const int parts = ceil_div(p.inter, Shape::kColumns);
  const int turns = ceil_div(p.hidden * value_bytes(format), Shape::kTurnBytes);
  if constexpr (Pieces == 1) {
    if (few == nullptr && warp == Shape::kWeightWarp) {
      ask_early<Shape::kCtasOfSm, Shape::kRowsAt>(p, arrays.index, turns, parts,
                                                  Shape::kColumns / kGroupRows, &map, lane);
    }
  }
  // Weights, and the index of few pairs, do not depend on the kernel before. Tokens do where it
  // quantises them; else one of the other warps waits, so that the next kernel may start.
  const bool is_waiting = format == Format::kBf16 ? warp == 0 : warp >= Shape::kRowWarp;
  if (few == nullptr || is_waiting) {
    wait_for_previous_kernel();
    let_next_kernel_start();
  }
  if (warp == Shape::kWeightWarp) {
    const TaskWalk walk(arrays.index, few, parts);
    if (elect_one()) copy_gate_up<Shape>(memory, p, walk, turns, &map);
  } else if (warp >= Shape::kRowWarp) {
    const TaskWalk walk(arrays.index, few, parts);
    copy_rows<Shape>(memory, p, walk, turns, arrays, few,
                     static_cast<int>(threadIdx.x) - Shape::kRowWarp * kWarpSize);
  } else {
    Tasks tasks(parts);
    tasks.read_count(arrays.index, few);
    if constexpr (Shape::kHasBlocks) {
      multiply_block<Shape>(memory, p, arrays.rows, tasks, turns, few);
    } else {
      multiply_static<Shape>(memory, p, arrays.rows, tasks, turns, few);
    }
  }
}

}  // namespace jax_hpc::fused_moe
