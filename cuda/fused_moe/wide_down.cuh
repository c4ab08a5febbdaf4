// outputs = down of the intermediate's rows, for many rows an expert: 128 hidden values to a
// task.
//
// A warpgroup turns its results over in shared memory, so that a warp writes 128 bytes of a token
// at once.
#pragma once

#include "fused_moe/wide.cuh"

namespace jax_hpc::fused_moe {

constexpr int kWideDownScales = sizeof(float);  // of a token, kBlock
// A warpgroup's results of a token, and what puts those of eight tokens into different banks.
constexpr int kWideTokenBytes = kWeightRows * 2 + 16;
constexpr int kWideDownStaged = kWideGroups * kWideTokenBytes;

struct WideDown {
  Index index;
  Weights weights;
  RowBuffers rows;
  WideLayout layout;
  uint64_t policy;
};

// A task of the consumers.
template <Format format>
struct WideDownTask {
  const WideMemory& memory;
  const Problem& p;
  const WideDown& a;
  const Fragment& f;
  WidePlace& place;
  const Tile& tile;
  int turns;
  int hidden0;  // of the warpgroup

  template <int Rows>
  __device__ __forceinline__ void run() const {
    constexpr bool kHasBlocks = format == Format::kBlock;
    float factor = 1.0f;
    if constexpr (!kHasBlocks) {
      factor = a.weights.act_scale_of(tile.expert) * a.weights.down_scale[tile.expert];
    }
    float totals[Rows / 2];
    multiply_wide<kHasBlocks ? 1 : 0, Rows>(memory, turns, f, place, totals);
    stage<Rows>(factor, totals);
    write();
  }

  // Gathers the warpgroup's results. A lane names the place of eight results of a token: of eight
  // lanes those of eight tokens, of the next eight lanes the same tokens' next results.
  template <int Rows>
  __device__ __forceinline__ void stage(float factor, const float (&totals)[Rows / 2]) const {
    sync_threads<kWarpgroup>(kGroupBarrier + f.group);
    const int token = f.lane / 16 * 8 + f.lane % 8;
    const int result = f.warp * 16 + f.lane / 8 % 2 * 8;
    SharedAddress to = staged() + token * kWideTokenBytes + result * 2;
#pragma unroll
    for (int j = 0; j < Rows / 8; j += 2, to += 16 * kWideTokenBytes) {
      const float* first = totals + 4 * j;
      store_transposed(to, {pack_bf16(first[0] * factor, first[1] * factor),
                            pack_bf16(first[2] * factor, first[3] * factor),
                            pack_bf16(first[4] * factor, first[5] * factor),
                            pack_bf16(first[6] * factor, first[7] * factor)});
    }
    sync_threads<kWarpgroup>(kGroupBarrier + f.group);
  }

  // Writes what was gathered, eight results of a token to a thread.
  __device__ __forceinline__ void write() const {
    constexpr int kUnit = 8;
    constexpr int kUnits = kWeightRows / kUnit;
    const int thread = f.warp * kWarpSize + f.lane;
    const int within = thread % kUnits * kUnit;
    if (hidden0 + within >= p.hidden) return;  // a multiple of 16, as hidden is
    auto* to = static_cast<uint16_t*>(a.rows.outputs) + hidden0 + within;
#pragma unroll 4
    for (int token = thread / kUnits; token < tile.rows; token += kWarpgroup / kUnits) {
      *reinterpret_cast<uint4*>(to + int64_t{tile.first_row + token} * p.hidden) =
          load_shared_words(staged() + token * kWideTokenBytes + within * 2);
    }
  }

  __device__ __forceinline__ SharedAddress staged() const {
    return memory.staged() + f.group * kWideTokenBytes * memory.layout.rows();
  }
};

template <Format format>
__device__ __forceinline__ void multiply_down(const WideMemory& memory, const Problem& p,
                                              const WideDown& a, WideWalk<1> walk, int turns) {
  const Fragment f(static_cast<int>(threadIdx.x), kWideGroups);
  WidePlace place;
  Tile tile;
  int part;
  while (walk.next(tile, part)) {
    const int hidden0 = part * kWideWeightRows + f.group * kWeightRows;
    run_wide(wide_steps(tile), WideDownTask<format>{memory, p, a, f, place, tile, turns, hidden0});
  }
}

// By two warps.
__device__ __forceinline__ void copy_down_scales(const WideMemory& memory, const Problem& p,
                                                 const WideDown& a, WideWalk<1> walk, int turns,
                                                 int warp, int lane) {
  WideScales<1> scales(memory, warp, lane);
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
template <Format format>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_down_kernel(const __grid_constant__ Problem p, const __grid_constant__ WideDown a,
                     const __grid_constant__ CUtensorMap weight_map,
                     const __grid_constant__ CUtensorMap row_map) {
  constexpr bool kHasBlocks = format == Format::kBlock;
  extern __shared__ uint8_t wide_down_memory[];
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const WideMemory memory(wide_down_memory, a.layout);
  if (threadIdx.x == 0) memory.init(kHasBlocks ? 2 + kWideScaleArrivals : 2, kWideConsumers);
  __syncthreads();
  // The index was written two kernels ago, and weights by none; the intermediate just now.
  const WideWalk<1> walk(a.index, p.hidden, kWideWeightRows);
  const int turns = ceil_div(p.inter, kStageValues);
  if (warp >= kWideConsumerWarps) {
    leave_registers<kWideProducerRegisters>();
    if (warp == kWideWeightWarp) {
      if (elect_one()) {
        copy_wide_weights(memory, walk, turns, kWideWeightRows / (2 * kGroupRows), &weight_map,
                          a.policy);
      }
    } else {
      wait_for_previous_kernel();
      let_next_kernel_start();
      if (warp == kWideRowWarp) {
        if (elect_one()) copy_wide_rows(memory, walk, turns, &row_map);
      } else if constexpr (kHasBlocks) {
        copy_down_scales(memory, p, a, walk, turns, warp - kWideScaleWarp, lane);
      }
    }
  } else {
    take_registers<kWideConsumerRegisters>();
    multiply_down<format>(memory, p, a, walk, turns);
  }
}

}  // namespace jax_hpc::fused_moe
