// act = requantised, or rounded, SiLU(gate) * up of rows sorted by expert, for many rows an expert.
//
// The weight rows of a CTA are eight gate rows, the eight up rows that belong to them, and so on:
// a thread holds gate and up of the same column of the intermediate. A CTA has 64 columns.
#pragma once

#include "fused_moe/gate_up_results.cuh"
#include "fused_moe/wide.cuh"

namespace jax_hpc::fused_moe {

constexpr int kWideColumns = kWideWeightRows / 2;    // of a CTA
constexpr int kWideGroupColumns = kWideColumns / 2;  // of a warpgroup
constexpr int kWideStagedBytes = kWideColumns;       // of a token
using WideActChunks = WideChunks<32, kWideGroupColumns * 2 + 16>;

// What the kernel is given: rows of x in the order of the index, with their scales.
struct WideGateUp {
  Index index;
  TokenRows sorted;
  Weights weights;
  RowBuffers rows;
  WideLayout layout;
  uint64_t policy;
};

// Where a warpgroup gathers a token's 32 columns; the halves of every other four tokens are
// exchanged, so that what a warp writes at once lies in different banks.
__device__ __forceinline__ int staged_place(int token, int column) {
  return token * kWideGroupColumns + (column ^ (token / 4 % 2 * 16));
}

// A task of the consumers.
template <Format format>
struct WideGateUpTask {
  const WideMemory& memory;
  const Problem& p;
  const WideGateUp& a;
  const Fragment& f;
  WidePlace& place;
  const Tile& tile;
  int turns;
  int part;  // of the columns

  __device__ __forceinline__ int column0() const {  // of the warpgroup
    return part * kWideColumns + f.group * kWideGroupColumns;
  }

  template <int Rows>
  __device__ __forceinline__ void run() const {
    float totals[Rows / 2];
    if constexpr (format == Format::kBf16) {
      multiply_wide_bf16<Rows>(memory, turns, f, place, totals);
      write_rounded<Rows>(totals);
    } else {
      multiply_wide<Rows>(memory, turns, f, place, totals);
      const TensorScales scales(a.weights, tile.expert);
      stage<Rows>([&](int i) {
        const float* gate = totals + 2 * i;
        return float2{
            silu_times(gate[0] * scales.gate, gate[2] * scales.up) * scales.act_reciprocal,
            silu_times(gate[1] * scales.gate, gate[3] * scales.up) * scales.act_reciprocal};
      });
      write();
    }
  }

  template <int Rows>
  __device__ __forceinline__ void write_rounded(const float (&totals)[Rows / 2]) const {
    constexpr int kTokens = 32;  // of a chunk: a matrix of eight to each of eight lanes
    constexpr int kTokenBytes = WideActChunks::kChunkBytes / kTokens;
    constexpr int kUnit = 8;  // columns of a lane
    constexpr int kUnits = kWideGroupColumns / kUnit;
    static_assert(kUnits * kTokens == kWarpgroup);
    const int thread = f.warp * kWarpSize + f.lane;
    const int within = thread % kUnits * kUnit;
    const bool exists = column0() + within < p.inter;  // a multiple of 16
    auto* to =
        static_cast<uint16_t*>(a.rows.act) + int64_t{tile.first_row} * p.inter + column0() + within;
    WideActChunks(memory, f).template each<Rows>(
        tile.rows,
        [&](int chunk, SharedAddress place) {
          uint32_t act[kTokens / 8];
#pragma unroll
          for (int j = 0; j < kTokens / 8; ++j) {
            const float* gate = totals + 4 * (chunk * kTokens / 8 + j);
            act[j] = pack_bf16(silu_times(gate[0], gate[2]), silu_times(gate[1], gate[3]));
          }
          store_transposed(place + f.lane * kTokenBytes + f.warp * kGroupRows * 2,
                           {act[0], act[1], act[2], act[3]});
        },
        [&](int chunk, SharedAddress place) {
          const int token = chunk * kTokens + thread / kUnits;
          if (!exists || token >= tile.rows) return;
          *reinterpret_cast<uint4*>(to + int64_t{token} * p.inter) =
              load_shared_words(place + thread / kUnits * kTokenBytes + within * 2);
        });
  }

  // Gathers the warpgroup's results: value(2 j) are those of token 8 j + token0 and the next. Four
  // lanes turn over what they have, a column of four tokens each, so that each writes four columns
  // of a token: bytes written one by one needed 96 addresses, which ptxas kept in local memory.
  template <int Rows, class Value>
  __device__ __forceinline__ void stage(const Value& value) const {
    sync_threads<kWarpgroup>(kGroupBarrier + f.group);
    const int of_four = f.row % 4;
    const int token = of_four / 2 * 8 + f.token0 + of_four % 2;
    const SharedAddress to = staged() + staged_place(token, f.warp * kGroupRows + f.row / 4 * 4);
#pragma unroll
    for (int j = 0; j < Rows / 8; j += 2) {
      const float2 first = value(2 * j);
      const float2 second = value(2 * j + 2);
      const uint32_t own = pack_fp8(first.x, first.y, second.x, second.y, 1.0f);
      store_shared_word(to + j * 8 * kWideGroupColumns, turn_over_bytes(own, of_four));
    }
    sync_threads<kWarpgroup>(kGroupBarrier + f.group);
  }

  // Writes what was gathered, 16 columns of a token to a thread.
  __device__ __forceinline__ void write() const {
    constexpr int kUnit = 16;
    constexpr int kUnits = kWideGroupColumns / kUnit;
    const int thread = f.warp * kWarpSize + f.lane;
    const int within = thread % kUnits * kUnit;
    const int column = column0() + within;
    if (column >= p.inter) return;
    auto* to = static_cast<uint8_t*>(a.rows.act) + column;
    for (int token = thread / kUnits; token < tile.rows; token += kWarpgroup / kUnits) {
      *reinterpret_cast<uint4*>(to + int64_t{tile.first_row + token} * p.inter) =
          load_shared_words(staged() + staged_place(token, within));
    }
  }

  __device__ __forceinline__ SharedAddress staged() const {
    return memory.staged() + f.group * kWideGroupColumns * memory.layout.rows();
  }
};

template <Format format>
__device__ __forceinline__ void multiply_gate_up(const WideMemory& memory, const Problem& p,
                                                 const WideGateUp& a, TaskWalk walk, int turns) {
  const Fragment f(static_cast<int>(threadIdx.x), kWideGroups);
  WidePlace place;
  Tile tile;
  int part;
  while (walk.next(tile, part)) {
    run_wide<format>(wide_steps(tile),
                     WideGateUpTask<format>{memory, p, a, f, place, tile, turns, part});
  }
}

// Grid: any number of CTAs, which share the tasks.
template <Format format>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_gate_up_kernel(const __grid_constant__ Problem p, const __grid_constant__ WideGateUp a,
                        const __grid_constant__ CUtensorMap weight_map,
                        const __grid_constant__ CUtensorMap row_map) {
  extern __shared__ uint8_t wide_gate_up_memory[];
  const int warp = uniform_warp();
  const WideMemory memory(wide_gate_up_memory, a.layout);
  if (threadIdx.x == 0) memory.init(2, kWideConsumerWarps);
  __syncthreads();
  // The index and the sorted rows were written just now.
  wait_for_previous_kernel();
  let_next_kernel_start();
  const TaskWalk walk = wide_walk(a.index, ceil_div(p.inter, kWideColumns));
  const int turns = ceil_div(p.hidden * value_bytes(format), kStageRow);
  if (warp >= kWideConsumerWarps) {
    leave_registers<kWideProducerRegisters>();
    if (warp == kWideWeightWarp) {
      if (elect_one()) {
        copy_wide_weights(memory, walk, turns, kWideColumns / kGroupRows, &weight_map, a.policy);
      }
    } else if (warp == kWideRowWarp) {
      if (elect_one()) copy_wide_rows(memory, walk, turns, &row_map);
    }
  } else {
    take_registers<kWideConsumerRegisters>();
    multiply_gate_up<format>(memory, p, a, walk, turns);
  }
}

}  // namespace jax_hpc::fused_moe
