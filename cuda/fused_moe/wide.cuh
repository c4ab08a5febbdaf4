// What the wide products share, for many rows an expert: 128 weight rows of a CTA times up to 192
// tokens, of bf16 256, so that a stage is longer in the tensor cores than on its way from the L2
// cache.
//
// Two warpgroups multiply, 64 weight rows each, and run freely: while one adds a stage's sums up in
// float32, the other's products run. Of bf16 all sums stay in the tensor cores.
#pragma once

#include "fused_moe/grouped.cuh"
#include "fused_moe/wide_instructions.cuh"
#include "fused_moe/wide_products.cuh"
#include "fused_moe/wide_shape.h"

namespace jax_hpc::fused_moe {

constexpr int kWideGroups = 2;  // warpgroups that multiply
constexpr int kWideConsumers = kWideGroups * kWarpgroup;
constexpr int kWideConsumerWarps = kWideConsumers / kWarpSize;
constexpr int kWideThreads = kWideConsumers + kWarpgroup;
constexpr int kWideWeightWarp = kWideConsumerWarps;
constexpr int kWideRowWarp = kWideWeightWarp + 1;
constexpr int kWideConsumerRegisters = 232;
constexpr int kWideProducerRegisters = 40;

constexpr int kGroupBarrier = 1;  // of the first warpgroup's threads; the next is the second's

struct WideMemory {
  SharedAddress start;
  const WideLayout& layout;

  __device__ __forceinline__ WideMemory(const uint8_t* dynamic, const WideLayout& given)
      : start(stages_start(dynamic)), layout(given) {}

  __device__ __forceinline__ SharedAddress weights(int stage) const {
    return start + stage * layout.stage_bytes;
  }
  __device__ __forceinline__ SharedAddress rows(int stage) const {
    return weights(stage) + kWideWeightRows * kStageRow;
  }
  __device__ __forceinline__ SharedAddress scales(int stage) const {
    return start + layout.scales_at + stage * layout.scale_bytes;
  }
  __device__ __forceinline__ SharedAddress staged() const { return start + layout.staged_at; }
  __device__ __forceinline__ SharedAddress full(int stage) const {
    return start + layout.control_at + stage * 16;
  }
  __device__ __forceinline__ SharedAddress empty(int stage) const { return full(stage) + 8; }
  // Of what the CTAs of a cluster tell each other (wide_rows_gate_up.cuh).
  __device__ __forceinline__ SharedAddress exchange() const {
    return start + layout.control_at + kWideBarrierBytes;
  }

  // By one thread. Arrivals that fill and empty a stage.
  __device__ __forceinline__ void init(int to_fill, int to_empty) const {
#pragma unroll 1
    for (int i = 0; i < layout.stages; ++i) {
      init_barrier(full(i), to_fill);
      init_barrier(empty(i), to_empty);
    }
    fence_barrier_init();
  }
  // Tells that this warp, all of it, is done with a stage.
  __device__ __forceinline__ void release(int stage, int lane) const {
    __syncwarp();
    if (lane == 0) arrive(empty(stage));
  }
};

struct WidePlace {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The thread's warp, by way of a shuffle: of all its threads the same, as the compiler knows then.
__device__ __forceinline__ int uniform_warp() {
  return __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / kWarpSize, 0);
}

__device__ __forceinline__ TaskWalk wide_walk(const Index& index, int parts) {
  return {index, nullptr, parts};
}

__device__ __forceinline__ int wide_steps(const Tile& tile) {
  return ceil_div(tile.rows, kWideStep);
}

// By one thread: 128 weight rows, `groups` groups of them.
__device__ __forceinline__ void copy_wide_weights(const WideMemory& memory, TaskWalk walk,
                                                  int turns, int groups, const CUtensorMap* map,
                                                  uint64_t policy) {
  WidePlace place;
  Tile tile;
  int part;
  while (walk.next(tile, part)) {
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn, place.advance(memory.layout.stages)) {
      wait(memory.empty(place.stage), place.parity ^ 1);
      const SharedAddress full = memory.full(place.stage);
      arrive_expecting(full, kWideWeightRows * kStageRow);
      copy_wide_weights(memory.weights(place.stage), map, full, turn * kStageRow, part * groups,
                        tile.expert, policy);
    }
  }
}

// By one thread: a tile's rows. What lies behind its last row is nobody's business.
__device__ __forceinline__ void copy_wide_rows(const WideMemory& memory, TaskWalk walk, int turns,
                                               const CUtensorMap* map) {
  constexpr int kBoxBytes = kWideBoxRows * kStageRow;
  WidePlace place;
  Tile tile;
  int part;
  while (walk.next(tile, part)) {
    const int boxes = wide_steps(tile) * (kWideStep / kWideBoxRows);
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn, place.advance(memory.layout.stages)) {
      wait(memory.empty(place.stage), place.parity ^ 1);
      const SharedAddress full = memory.full(place.stage);
      arrive_expecting(full, static_cast<uint32_t>(boxes * kBoxBytes));
      for (int i = 0; i < boxes; ++i) {
        copy_tile(memory.rows(place.stage) + i * kBoxBytes, map, full, turn * kStageRow,
                  tile.first_row + i * kWideBoxRows);
      }
    }
  }
}

// A task's products of bf16. Those of a stage are asked for before those of the one before are
// waited for.
template <int Rows>
__device__ __forceinline__ void multiply_wide_bf16(const WideMemory& memory, int turns,
                                                   const Fragment& f, WidePlace& place,
                                                   float (&sums)[Rows / 2]) {
  constexpr int kSteps = 4;  // 16 values each
#pragma unroll
  for (int i = 0; i < Rows / 2; ++i) sums[i] = 0;
  int before = -1;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn, place.advance(memory.layout.stages)) {
    wait(memory.full(place.stage), place.parity);
    const uint32_t a = swizzled_tile(memory.weights(place.stage) + f.group * kWeightBytes);
    const uint32_t b = swizzled_tile(memory.rows(place.stage));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      Wgmma<Rows>::multiply(sums, descriptor(a + 2 * k), descriptor(b + 2 * k), true);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (before >= 0) memory.release(before, f.lane);
    before = place.stage;
  }
  wgmma_wait<0>();
  hold_all(sums);
  memory.release(before, f.lane);
}

// A task's products.
template <int Rows>
__device__ __forceinline__ void multiply_wide(const WideMemory& memory, int turns,
                                              const Fragment& f, WidePlace& place,
                                              float (&totals)[Rows / 2]) {
#pragma unroll
  for (int i = 0; i < Rows / 2; ++i) totals[i] = 0;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn, place.advance(memory.layout.stages)) {
    wait(memory.full(place.stage), place.parity);
    float sums[Rows / 2];
    wgmma_fence();
    multiply<Rows>(memory.weights(place.stage) + f.group * kWeightBytes, memory.rows(place.stage),
                   sums);
    wgmma_commit();
    wgmma_wait<0>();
    hold_all(sums);
    memory.release(place.stage, f.lane);
#pragma unroll
    for (int i = 0; i < Rows / 2; ++i) totals[i] += sums[i];
  }
}

// Calls task.run<Rows>() with the least number of rows that a tile fits into.
template <Format format, int Steps = 1, class Task>
__device__ __forceinline__ void run_wide(int steps, const Task& task) {
  if constexpr (Steps * kWideStep == wide_most_rows(format)) {
    task.template run<Steps * kWideStep>();
  } else if (steps == Steps) {
    task.template run<Steps * kWideStep>();
  } else {
    run_wide<format, Steps + 1>(steps, task);
  }
}

// Results of bf16 experts on their way out, which a warpgroup gathers a few tokens at a time, in
// two places in turn: bytes of a token are `TokenBytes`, padded so that what a warp writes at once
// lies in different banks.
template <int Tokens, int TokenBytes>
struct WideChunks {
  static constexpr int kChunkBytes = Tokens * TokenBytes;
  static constexpr int kBytes = kWideGroups * 2 * kChunkBytes;
  SharedAddress start;  // of the warpgroup
  int group;

  __device__ __forceinline__ WideChunks(const WideMemory& memory, const Fragment& f)
      : start(memory.staged() + f.group * 2 * kChunkBytes), group(f.group) {}

  // gather(chunk, to), then write(chunk, from) of what all of the warpgroup have gathered.
  template <int Rows, class Gather, class Write>
  __device__ __forceinline__ void each(int rows, const Gather& gather, const Write& write) const {
    sync_threads<kWarpgroup>(kGroupBarrier + group);
#pragma unroll
    for (int chunk = 0; chunk < Rows / Tokens; ++chunk) {
      if (chunk * Tokens >= rows) break;
      const SharedAddress place = start + chunk % 2 * kChunkBytes;
      gather(chunk, place);
      sync_threads<kWarpgroup>(kGroupBarrier + group);
      write(chunk, place);
    }
  }
};

}  // namespace jax_hpc::fused_moe
