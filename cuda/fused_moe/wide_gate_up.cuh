// act = requantised SiLU(gate) * up of rows sorted by expert, for many rows an expert.
//
// The weight rows of a CTA are eight gate rows, the eight up rows that belong to them, and so on:
// a thread holds gate and up of the same column of the intermediate. A CTA has 64 columns. Of 128,
// which share a dynamic scale, two CTAs of a cluster tell each other the magnitudes.
#pragma once

#include "fused_moe/gate_up_results.cuh"
#include "fused_moe/wide.cuh"

namespace jax_hpc::fused_moe {

constexpr int kWideColumns = kWideWeightRows / 2;     // of a CTA
constexpr int kWideGroupColumns = kWideColumns / 2;   // of a warpgroup
constexpr int kWideStagedBytes = kWideColumns;        // of a token
constexpr int kWideGateUpScales = 2 * sizeof(float);  // of a token, kBlock

// CTAs of a cluster.
template <Format format>
constexpr int kWideSharing = format == Format::kBlock ? 2 : 1;

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

// The larger magnitudes of this lane's values and those of the lane across `bit`: of the first half
// where that bit is clear, of the second where it is set.
template <int Half, int Given, int Kept>
__device__ __forceinline__ void keep_larger(const float (&values)[Given], float (&most)[Kept],
                                            int lane, int bit) {
  const bool is_second = (lane & bit) != 0;
#pragma unroll
  for (int i = 0; i < Half; ++i) {
    const float own = is_second ? values[i + Half] : values[i];
    const float other = is_second ? values[i] : values[i + Half];
    most[i] = larger_magnitude(own, __shfl_xor_sync(~0u, other, bit));
  }
}

// A task of the consumers.
template <Format format>
struct WideGateUpTask {
  static constexpr bool kHasBlocks = format == Format::kBlock;
  static constexpr int kSharing = kWideSharing<format>;
  const WideMemory& memory;
  const Problem& p;
  const WideGateUp& a;
  const Fragment& f;
  WidePlace& place;
  const Tile& tile;
  int turns;
  int number;  // of the task, in this CTA
  int part;    // of the columns

  __device__ __forceinline__ int column0() const {  // of the warpgroup
    return part * kWideColumns + f.group * kWideGroupColumns;
  }

  template <int Rows>
  __device__ __forceinline__ void run() const {
    float totals[Rows / 2];
    multiply_wide<kHasBlocks ? 2 : 0, Rows>(memory, turns, f, place, totals);
    float act[Rows / 4];  // of tokens 8j + token0 and the next
    if constexpr (kHasBlocks) {
#pragma unroll
      for (int i = 0; i < Rows / 4; ++i) {
        act[i] = silu_times(totals[i / 2 * 4 + i % 2], totals[i / 2 * 4 + 2 + i % 2]);
      }
      share_magnitudes<Rows>(act);
      find_factors<Rows>();
      stage<Rows>([&](int i, int token) {
        const float2 factor = load_shared_pair(memory.factors() + token * 4);
        return float2{act[i] * factor.x, act[i + 1] * factor.y};
      });
    } else {
      const TensorScales scales(a.weights, tile.expert);
      stage<Rows>([&](int i, int) {
        const float* gate = totals + 2 * i;
        return float2{
            silu_times(gate[0] * scales.gate, gate[2] * scales.up) * scales.act_reciprocal,
            silu_times(gate[1] * scales.gate, gate[3] * scales.up) * scales.act_reciprocal};
      });
    }
    write();
  }

  // Raises each token's largest magnitude, in both CTAs. Eight lanes have the same tokens: they
  // exchange halves of their values three times, and each is left with an eighth of the tokens.
  template <int Rows>
  __device__ __forceinline__ void share_magnitudes(const float (&act)[Rows / 4]) const {
    constexpr int kValues = Rows / 4;
    float most[kValues / 2];
    keep_larger<kValues / 2>(act, most, f.lane, 4);
    keep_larger<kValues / 4>(most, most, f.lane, 8);
    keep_larger<kValues / 8>(most, most, f.lane, 16);
    const int first = (f.lane & 4 ? kValues / 2 : 0) + (f.lane & 8 ? kValues / 4 : 0) +
                      (f.lane & 16 ? kValues / 8 : 0);
    const int set = memory.largest_at(number % 3);
#pragma unroll
    for (uint32_t cta = 0; cta < kSharing; ++cta) {
      const SharedAddress there = address_in_cluster(memory.start, cta) + set;
#pragma unroll
      for (int i = 0; i < kValues / 8; ++i) {
        const int value = first + i;
        const int token = value / 2 * 8 + f.token0 + value % 2;
        raise_in_cluster(there + token * 4, __float_as_uint(most[i]));
      }
    }
#pragma unroll
    for (uint32_t cta = 0; cta < kSharing; ++cta) {
      arrive_after_writes(address_in_cluster(memory.start, cta) + memory.exchanged_at());
    }
    wait_for_cluster(memory.start + memory.exchanged_at(), static_cast<uint32_t>(number % 2));
  }

  // Scales of the tokens, a thread each, and their reciprocals for all. Every warp of the cluster
  // has arrived, so none still reads what the task before shared.
  template <int Rows>
  __device__ __forceinline__ void find_factors() const {
    const int token = static_cast<int>(threadIdx.x);
    if (token < Rows) {
      const SharedAddress largest = memory.start + token * 4;
      const float most = __uint_as_float(load_shared_word(largest + memory.largest_at(number % 3)));
      const float scale = scale_of_largest(most);
      store_shared_float(memory.factors() + token * 4, 1.0f / scale);
      if (part % kSharing == 0 && token < tile.rows) {
        const int64_t row = tile.first_row + token;
        a.rows.act_scale[row * ceil_div(p.inter, kBlock) + part / kSharing] = scale;
      }
    }
    if (token < kWideMostRows) {
      store_shared_word(memory.start + memory.largest_at((number + 2) % 3) + token * 4, 0);
    }
    sync_threads<kWideConsumers>(kConsumerBarrier);
  }

  // Gathers the warpgroup's results: value(i, token) are those of token and the next.
  template <int Rows, class Value>
  __device__ __forceinline__ void stage(const Value& value) const {
    sync_threads<kWarpgroup>(kGroupBarrier + f.group);
    const SharedAddress to = staged();
    const int column = f.warp * kGroupRows + f.row;
#pragma unroll
    for (int j = 0; j < Rows / 8; ++j) {
      const int token = 8 * j + f.token0;
      const float2 act = value(2 * j, token);
      const uint32_t pair = pack_fp8(act.x, act.y, 0.0f, 0.0f, 1.0f);
      store_shared_byte(to + staged_place(token, column), pair);
      store_shared_byte(to + staged_place(token + 1, column), pair >> 8);
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

template <Format format, class Walk>
__device__ __forceinline__ void multiply_gate_up(const WideMemory& memory, const Problem& p,
                                                 const WideGateUp& a, Walk walk, int turns) {
  const Fragment f(static_cast<int>(threadIdx.x), kWideGroups);
  WidePlace place;
  Tile tile;
  int part;
  for (int number = 0; walk.next(tile, part); ++number) {
    run_wide(wide_steps(tile),
             WideGateUpTask<format>{memory, p, a, f, place, tile, turns, number, part});
  }
}

// By two warps.
template <class Walk>
__device__ __forceinline__ void copy_gate_up_scales(const WideMemory& memory, const Problem& p,
                                                    const WideGateUp& a, Walk walk, int turns,
                                                    int warp, int lane) {
  WideScales<2> scales(memory, warp, lane);
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

// Grid: any number of clusters, which share the tasks.
template <Format format>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_gate_up_kernel(const __grid_constant__ Problem p, const __grid_constant__ WideGateUp a,
                        const __grid_constant__ CUtensorMap weight_map,
                        const __grid_constant__ CUtensorMap row_map) {
  constexpr bool kHasBlocks = format == Format::kBlock;
  constexpr int kSharing = kWideSharing<format>;
  extern __shared__ uint8_t wide_gate_up_memory[];
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const WideMemory memory(wide_gate_up_memory, a.layout);
  if (threadIdx.x == 0) {
    memory.init(kHasBlocks ? 2 + kWideScaleArrivals : 2, kSharing * kWideConsumers);
  }
  if (kHasBlocks && threadIdx.x < kWideMostRows) {
#pragma unroll
    for (int set = 0; set < 3; ++set) {
      store_shared_word(memory.start + memory.largest_at(set) + threadIdx.x * 4, 0);
    }
  }
  meet_cluster<kSharing>();
  // The index and the sorted rows were written just now.
  wait_for_previous_kernel();
  let_next_kernel_start();
  const WideWalk<kSharing> walk(a.index, p.inter, kWideColumns);
  const int turns = ceil_div(p.hidden, kStageValues);
  if (warp >= kWideConsumerWarps) {
    leave_registers<kWideProducerRegisters>();
    if (warp == kWideWeightWarp) {
      if (elect_one()) {
        copy_wide_weights(memory, walk, turns, kWideColumns / kGroupRows, &weight_map, a.policy);
      }
    } else if (warp == kWideRowWarp) {
      if (elect_one()) copy_wide_rows(memory, walk, turns, &row_map);
    } else if constexpr (kHasBlocks) {
      copy_gate_up_scales(memory, p, a, walk, turns, warp - kWideScaleWarp, lane);
    }
  } else {
    take_registers<kWideConsumerRegisters>();
    multiply_gate_up<format>(memory, p, a, walk, turns);
  }
  meet_cluster<kSharing>();
}

}  // namespace jax_hpc::fused_moe
