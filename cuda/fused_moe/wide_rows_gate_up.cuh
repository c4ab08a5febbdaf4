// act = requantised SiLU(gate) * up of block-scaled experts, for many rows an expert.
//
// The columns of a CTA are eight gate rows, the eight up rows that belong to them, and so on: a
// thread holds gate and up of the same column of the intermediate. A CTA has 64 columns; of 128,
// which share a dynamic scale, two CTAs of a cluster tell each other the magnitudes, each warp the
// one that has the same tokens.
#pragma once

#include "fused_moe/gate_up_results.cuh"
#include "fused_moe/wide_gate_up.cuh"
#include "fused_moe/wide_rows.cuh"

namespace jax_hpc::fused_moe {

constexpr int kRowCluster = 2;
constexpr int kGateUpScales = 2 * sizeof(float);                  // bytes of a token
constexpr int kExchanges = 2;                                     // of a warp, in turn
constexpr int kExchangedBytes = kRowsOfWarp * 4;                  // of a warp
constexpr int kExchangedAt = kRowConsumerWarps * kExchanges * 8;  // behind the barriers
static_assert(kRowConsumerWarps * kExchanges * (8 + kExchangedBytes) == kWideExchangeBytes);

// Where a warp's exchange `number` lies: its barrier and its magnitudes, pairs of tokens eight
// apart.
struct Exchange {
  SharedAddress barrier;
  SharedAddress magnitudes;
  uint32_t parity;

  __device__ __forceinline__ Exchange(const WideMemory& memory, int warp, int number) {
    const SharedAddress start = memory.exchange();
    const int place = warp * kExchanges + number % kExchanges;
    barrier = start + place * 8;
    magnitudes = start + kExchangedAt + place * kExchangedBytes;
    parity = static_cast<uint32_t>(number / kExchanges % 2);
  }
};

// A task of the consumers.
struct RowGateUpTask {
  const WideMemory& memory;
  const Problem& p;
  const WideGateUp& a;
  const RowFragment& f;
  const Tile& tile;
  int part;    // of the columns
  int number;  // of the warp's exchanges

  static constexpr int kActs = kRowSums / 4;  // of a token

  __device__ __forceinline__ void finish(const float (&totals)[kRowSums]) const {
    float act[2][kActs];
    float most[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      most[i] = 0;
#pragma unroll
      for (int k = 0; k < kActs; ++k) {
        const float* gate = totals + k / 2 * 8 + 2 * i + k % 2;
        act[i][k] = silu_times(gate[0], gate[4]);
        most[i] = larger_magnitude(most[i], act[i][k]);
      }
#pragma unroll
      for (int bit = 1; bit < 4; bit *= 2) {
        most[i] = larger_magnitude(most[i], __shfl_xor_sync(kWholeWarp, most[i], bit));
      }
    }
    exchange(most);
    __syncwarp();  // none still reads what was gathered last
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float scale = scale_of_largest(most[i]);
      const int token = f.token + 8 * i;
      if (part % kRowCluster == 0 && f.lane % 4 == 0 && token < tile.rows) {
        const int64_t row = tile.first_row + token;
        a.rows.act_scale[row * ceil_div(p.inter, kBlock) + part / kRowCluster] = scale;
      }
      const SharedAddress to = staged() + (f.lane / 4 + 8 * i) * kRowStagedStride + f.column0;
#pragma unroll
      for (int k = 0; k < kActs; k += 2) {
        store_shared_half(to + k * 4, pack_fp8(act[i][k], act[i][k + 1], 0.0f, 0.0f, 1.0f / scale));
      }
    }
    __syncwarp();
    const int64_t row = tile.first_row + f.warp * kRowsOfWarp;
    const int column0 = part * kWideColumns;
    write_staged(staged(), f, tile.rows - f.warp * kRowsOfWarp,
                 static_cast<uint8_t*>(a.rows.act) + row * p.inter + column0, p.inter,
                 [&](int within) { return column0 + within < p.inter; });
  }

  // The larger of this CTA's magnitudes and the other's. The other writes to a place again only
  // after an exchange whose magnitudes this warp sends when it has read that place.
  __device__ __forceinline__ void exchange(float (&most)[2]) const {
    const Exchange own(memory, f.warp, number);
    const uint32_t other = cluster_rank() ^ 1;
    __syncwarp();
    if (f.lane == 0) arrive_expecting(own.barrier, kExchangedBytes);
    const int pair = f.lane / 4 * int{sizeof(float2)};
    if (f.lane % 4 == 0) {
      send(address_in_cluster(own.magnitudes + pair, other), float2{most[0], most[1]},
           address_in_cluster(own.barrier, other));
    }
    wait_for_cluster(own.barrier, own.parity);
    const float2 theirs = load_shared_pair(own.magnitudes + pair);
    most[0] = larger_magnitude(most[0], theirs.x);
    most[1] = larger_magnitude(most[1], theirs.y);
  }

  __device__ __forceinline__ SharedAddress staged() const {
    return memory.staged() + f.warp * kRowStagedWarp;
  }
};

__device__ __forceinline__ void multiply_row_gate_up(const WideMemory& memory, const Problem& p,
                                                     const WideGateUp& a, TaskWalk walk,
                                                     int turns) {
  const RowFragment f(static_cast<int>(threadIdx.x));
  WidePlace place;
  Tile tile;
  int part;
  int number = 0;
  while (walk.next(tile, part)) {
    const bool has_tokens = f.group * kRowsOfGroup < tile.rows;
    float totals[kRowSums];
    multiply_rows<2>(memory, turns, has_tokens, f, place, totals);
    if (!has_tokens) continue;
    RowGateUpTask{memory, p, a, f, tile, part, number}.finish(totals);
    ++number;
  }
}

// By two warps.
__device__ __forceinline__ void copy_gate_up_scales(const WideMemory& memory, const Problem& p,
                                                    const WideGateUp& a, TaskWalk walk, int turns,
                                                    int warp, int lane) {
  TaskScales<2> scales(memory, warp, lane);
  const int row_blocks = ceil_div(p.inter, kBlock);
  Tile tile;
  int part;
  while (walk.next(tile, part)) {
    // A CTA without columns has zeros of weights.
    const int block = min(part * kWideColumns, p.inter - 1) / kBlock;
    const float* gate =
        a.weights.gate_up_block_scale + (int64_t{tile.expert} * 2 * row_blocks + block) * turns;
    scales.copy_task(a.sorted.scale + int64_t{tile.first_row} * turns, turns, tile.rows,
                     {gate, gate + int64_t{row_blocks} * turns}, turns);
  }
}

// Columns of a tile are cut into an even number of parts, of which the last may be empty: the CTAs
// of a cluster, neighbours among an even number of CTAs, have neighbouring parts of the same tile.
__host__ __device__ constexpr int row_gate_up_parts(const Problem& p) {
  return kRowCluster * ceil_div(p.inter, kRowCluster * kWideColumns);
}

// Grid: any number of clusters, which share the tasks. A CTA may end before the other: each warp
// has then received all that is sent to it, for the warps that exchange have the same tasks and
// tokens.
static __global__ void __launch_bounds__(kRowThreads, 1)
    wide_row_gate_up_kernel(const __grid_constant__ Problem p, const __grid_constant__ WideGateUp a,
                            const __grid_constant__ CUtensorMap weight_map,
                            const __grid_constant__ CUtensorMap row_map) {
  extern __shared__ uint8_t wide_row_gate_up_memory[];
  const int warp = uniform_warp();
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const WideMemory memory(wide_row_gate_up_memory, a.layout);
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < kRowConsumerWarps * kExchanges; ++i) {
      init_barrier(memory.exchange() + i * 8, 1);
    }
    memory.init(2 + kScaleArrivals, kRowConsumerWarps);
  }
  __syncwarp();
  cluster_arrive_relaxed();
  cluster_wait();
  // The index and the sorted rows were written just now.
  wait_for_previous_kernel();
  let_next_kernel_start();
  const TaskWalk walk = wide_walk(a.index, row_gate_up_parts(p));
  const int turns = ceil_div(p.hidden, kStageValues);
  if (warp >= kRowConsumerWarps) {
    leave_registers<kRowProducerRegisters>();
    if (warp == kRowWeightWarp) {
      if (elect_one()) {
        copy_wide_weights(memory, walk, turns, kWideColumns / kGroupRows, &weight_map, a.policy);
      }
    } else if (warp == kRowRowWarp) {
      if (elect_one()) copy_wide_rows(memory, walk, turns, &row_map);
    } else {
      copy_gate_up_scales(memory, p, a, walk, turns, warp - kRowScaleWarp, lane);
    }
  } else {
    take_registers<kRowConsumerRegisters>();
    multiply_row_gate_up(memory, p, a, walk, turns);
  }
}

}  // namespace jax_hpc::fused_moe
