// outputs = down of the intermediate's rows, for many rows an expert: 128 hidden values to a
// task.
//
// A warpgroup turns its results over in shared memory, so that a warp writes 128 bytes of a token
// at once, or of float32 256.
#pragma once

#include "fused_moe/scales.cuh"
#include "fused_moe/wide.cuh"

namespace jax_hpc::fused_moe {

// A warpgroup's results of a token, and what puts those of eight tokens into different banks.
constexpr int kWideTokenBytes = kWeightRows * 2 + 16;
constexpr int kWideDownStaged = kWideGroups * kWideTokenBytes;
using WideDownChunks = WideChunks<16, kWeightRows* int{sizeof(float)} + 16>;

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
    float totals[Rows / 2];
    if constexpr (format == Format::kBf16) {
      multiply_wide_bf16<Rows>(memory, turns, f, place, totals);
      write_floats<Rows>(totals);
    } else {
      const float factor = DownFactor{a.weights}(tile.expert);
      multiply_wide<Rows>(memory, turns, f, place, totals);
      stage<Rows>(factor, totals);
      write();
    }
  }

  template <int Rows>
  __device__ __forceinline__ void write_floats(const float (&totals)[Rows / 2]) const {
    constexpr int kTokens = 16;  // of a chunk
    constexpr int kTokenBytes = WideDownChunks::kChunkBytes / kTokens;
    constexpr int kFloat = int{sizeof(float)};
    constexpr int kUnit = 4;  // floats of a lane
    constexpr int kUnits = kWeightRows / kUnit;
    constexpr int kTokensAtOnce = kWarpgroup / kUnits;
    const int thread = f.warp * kWarpSize + f.lane;
    const int within = thread % kUnits * kUnit;
    const bool exists = hidden0 + within < p.hidden;
    float* to =
        static_cast<float*>(a.rows.outputs) + int64_t{tile.first_row} * p.hidden + hidden0 + within;
    WideDownChunks(memory, f).template each<Rows>(
        tile.rows,
        [&](int chunk, SharedAddress place) {
          const SharedAddress at = place + f.token0 * kTokenBytes + (f.warp * 16 + f.row) * kFloat;
#pragma unroll
          for (int j = 0; j < kTokens / 8; ++j) {
            const float* sums = totals + 4 * (chunk * kTokens / 8 + j);
            const SharedAddress first = at + 8 * j * kTokenBytes;
            store_shared_float(first, sums[0]);
            store_shared_float(first + kTokenBytes, sums[1]);
            store_shared_float(first + 8 * kFloat, sums[2]);
            store_shared_float(first + kTokenBytes + 8 * kFloat, sums[3]);
          }
        },
        [&](int chunk, SharedAddress place) {
#pragma unroll
          for (int i = 0; i < kTokens; i += kTokensAtOnce) {
            const int of_chunk = thread / kUnits + i;
            const int token = chunk * kTokens + of_chunk;
            if (!exists || token >= tile.rows) continue;
            *reinterpret_cast<uint4*>(to + int64_t{token} * p.hidden) =
                load_shared_words(place + of_chunk * kTokenBytes + within * kFloat);
          }
        });
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
                                              const WideDown& a, TaskWalk walk, int turns) {
  const Fragment f(static_cast<int>(threadIdx.x), kWideGroups);
  WidePlace place;
  Tile tile;
  int part;
  while (walk.next(tile, part)) {
    const int hidden0 = part * kWideWeightRows + f.group * kWeightRows;
    run_wide<format>(wide_steps(tile),
                     WideDownTask<format>{memory, p, a, f, place, tile, turns, hidden0});
  }
}

// Grid: any number of CTAs, which share the tasks.
template <Format format>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_down_kernel(const __grid_constant__ Problem p, const __grid_constant__ WideDown a,
                     const __grid_constant__ CUtensorMap weight_map,
                     const __grid_constant__ CUtensorMap row_map) {
  extern __shared__ uint8_t wide_down_memory[];
  const int warp = uniform_warp();
  const WideMemory memory(wide_down_memory, a.layout);
  if (threadIdx.x == 0) memory.init(2, kWideConsumerWarps);
  __syncthreads();
  // The index was written two kernels ago, and weights by none; the intermediate just now.
  const TaskWalk walk = wide_walk(a.index, ceil_div(p.hidden, kWideWeightRows));
  const int turns = ceil_div(p.inter * value_bytes(format), kStageRow);
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
      if (warp == kWideRowWarp && elect_one()) copy_wide_rows(memory, walk, turns, &row_map);
    }
  } else {
    take_registers<kWideConsumerRegisters>();
    multiply_down<format>(memory, p, a, walk, turns);
  }
}

}  // namespace jax_hpc::fused_moe
