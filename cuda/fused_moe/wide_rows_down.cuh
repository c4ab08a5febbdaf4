// outputs = down of the intermediate's rows of block-scaled experts, for many rows an expert: 128
// hidden values to a task.
#pragma once

#include "fused_moe/wide_down.cuh"
#include "fused_moe/wide_rows.cuh"

namespace jax_hpc::fused_moe {

constexpr int kDownScales = sizeof(float);  // bytes of a token

// A warp's results, 32 hidden values at a time.
__device__ __forceinline__ void write_row_outputs(const WideMemory& memory, const Problem& p,
                                                  const WideDown& a, const RowFragment& f,
                                                  const Tile& tile, int part,
                                                  const float (&totals)[kRowSums]) {
  constexpr int kValues = kRowStagedToken / 2;
  const SharedAddress staged = memory.staged() + f.warp * kRowStagedWarp;
  const SharedAddress to = staged + f.lane % 16 * kRowStagedStride + f.lane / 16 * 16;
  const int64_t row = tile.first_row + f.warp * kRowsOfWarp;
#pragma unroll
  for (int first = 0; first < kWideWeightRows; first += kValues) {
    __syncwarp();  // none still reads what was gathered last
#pragma unroll
    for (int within = 0; within < kValues; within += 16) {
      const float* sums = totals + (first + within) / 2;
      store_matrices(to + within * 2, {pack_bf16(sums[0], sums[1]), pack_bf16(sums[2], sums[3]),
                                       pack_bf16(sums[4], sums[5]), pack_bf16(sums[6], sums[7])});
    }
    __syncwarp();
    const int hidden0 = part * kWideWeightRows + first;
    auto* outputs = static_cast<uint16_t*>(a.rows.outputs) + row * p.hidden + hidden0;
    write_staged(staged, f, tile.rows - f.warp * kRowsOfWarp, reinterpret_cast<uint8_t*>(outputs),
                 int64_t{p.hidden} * 2,
                 [&](int within) { return hidden0 + within / 2 < p.hidden; });
  }
}

__device__ __forceinline__ void multiply_row_down(const WideMemory& memory, const Problem& p,
                                                  const WideDown& a, TaskWalk walk, int turns) {
  const RowFragment f(static_cast<int>(threadIdx.x));
  WidePlace place;
  Tile tile;
  int part;
  while (walk.next(tile, part)) {
    const bool has_tokens = f.group * kRowsOfGroup < tile.rows;
    float totals[kRowSums];
    multiply_rows<1>(memory, turns, has_tokens, f, place, totals);
    if (has_tokens) write_row_outputs(memory, p, a, f, tile, part, totals);
  }
}

// By two warps.
__device__ __forceinline__ void copy_down_scales(const WideMemory& memory, const Problem& p,
                                                 const WideDown& a, TaskWalk walk, int turns,
                                                 int warp, int lane) {
  TaskScales<1> scales(memory, warp, lane);
  const int hidden_blocks = ceil_div(p.hidden, kBlock);
  Tile tile;
  int part;
  while (walk.next(tile, part)) {
    const float* weight =
        a.weights.down_block_scale + (int64_t{tile.expert} * hidden_blocks + part) * turns;
    scales.copy_task(a.rows.act_scale + int64_t{tile.first_row} * turns, turns, tile.rows, {weight},
                     turns);
  }
}

// Grid: any number of CTAs, which share the tasks.
static __global__ void __launch_bounds__(kRowThreads, 1)
    wide_row_down_kernel(const __grid_constant__ Problem p, const __grid_constant__ WideDown a,
                         const __grid_constant__ CUtensorMap weight_map,
                         const __grid_constant__ CUtensorMap row_map) {
  extern __shared__ uint8_t wide_row_down_memory[];
  const int warp = uniform_warp();
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const WideMemory memory(wide_row_down_memory, a.layout);
  if (threadIdx.x == 0) memory.init(2 + kScaleArrivals, kRowConsumerWarps);
  __syncthreads();
  // The index was written two kernels ago, and weights by none; the intermediate just now.
  const TaskWalk walk = wide_walk(a.index, ceil_div(p.hidden, kWideWeightRows));
  const int turns = ceil_div(p.inter, kStageValues);
  if (warp >= kRowConsumerWarps) {
    leave_registers<kRowProducerRegisters>();
    if (warp == kRowWeightWarp) {
      if (elect_one()) {
        copy_wide_weights(memory, walk, turns, kWideWeightRows / (2 * kGroupRows), &weight_map,
                          a.policy);
      }
    } else {
      wait_for_previous_kernel();
      let_next_kernel_start();
      if (warp == kRowRowWarp) {
        if (elect_one()) copy_wide_rows(memory, walk, turns, &row_map);
      } else {
        copy_down_scales(memory, p, a, walk, turns, warp - kRowScaleWarp, lane);
      }
    }
  } else {
    take_registers<kRowConsumerRegisters>();
    multiply_row_down(memory, p, a, walk, turns);
  }
}

}  // namespace jax_hpc::fused_moe
