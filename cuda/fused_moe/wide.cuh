// What the wide products share, for many rows an expert: 128 weight rows of a CTA times up to 192
// tokens, so that a stage is longer in the tensor cores than on its way from the L2 cache.
//
// Two warpgroups multiply, 64 weight rows each, and run freely: while one adds a stage's sums up in
// float32, the other's products run.
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
constexpr int kWideScaleWarp = kWideRowWarp + 1;  // and the next
constexpr int kWideScaleWarps = 2;
constexpr int kWideScaleArrivals = kWideScaleWarps * kWarpSize;  // of a stage
constexpr int kWideConsumerRegisters = 232;
constexpr int kWideProducerRegisters = 40;
constexpr int kWideSteps = kWideMostRows / kWideStep;

// Barriers of the CTA's threads.
constexpr int kGroupBarrier = 1;  // and the next, of one warpgroup
constexpr int kConsumerBarrier = 3;

struct WideMemory {
  SharedAddress start;
  const WideLayout& layout;

  __device__ __forceinline__ WideMemory(const uint8_t* dynamic, const WideLayout& given)
      : layout(given) {
    constexpr uint32_t kAlignment = kGroupBytes;
    const SharedAddress address = shared_address(dynamic);
    const uint32_t aligned = (address + kAlignment - 1) / kAlignment * kAlignment;
    start = __shfl_sync(~0u, aligned, 0);
  }

  __device__ __forceinline__ SharedAddress weights(int stage) const {
    return start + stage * layout.stage_bytes;
  }
  __device__ __forceinline__ SharedAddress rows(int stage) const {
    return weights(stage) + kWideWeightRows * kStageValues;
  }
  __device__ __forceinline__ SharedAddress scales(int stage) const {
    return start + layout.scales_at + stage * layout.scale_bytes;
  }
  __device__ __forceinline__ SharedAddress staged() const { return start + layout.staged_at; }
  __device__ __forceinline__ SharedAddress full(int stage) const {
    return start + layout.control_at + stage * 16;
  }
  __device__ __forceinline__ SharedAddress empty(int stage) const { return full(stage) + 8; }
  __device__ __forceinline__ int exchanged_at() const { return layout.control_at + 128; }
  // Words of the tokens, three sets in turn, and one more.
  __device__ __forceinline__ int largest_at(int turn) const {
    return layout.control_at + 256 + turn * kWideMostRows * 4;
  }
  __device__ __forceinline__ SharedAddress factors() const { return start + largest_at(3); }

  // By one thread. Exchanging: threads that tell each other magnitudes.
  __device__ __forceinline__ void init(int arrivals_to_fill, int exchanging) const {
#pragma unroll 1
    for (int i = 0; i < layout.stages; ++i) {
      init_barrier(full(i), arrivals_to_fill);
      init_barrier(empty(i), kWideConsumerWarps);
    }
    init_barrier(start + exchanged_at(), exchanging);
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

// A CTA's tasks: neighbours of a cluster have neighbouring parts of a tile.
template <int Cluster>
class WideWalk {
 public:
  // Of `extent` weight rows or columns, of which a CTA has `cta_extent`.
  __device__ __forceinline__ WideWalk(const Index& index, int extent, int cta_extent)
      : walk_(index, nullptr, ceil_div(extent, Cluster * cta_extent),
              static_cast<int>(blockIdx.x) / Cluster, static_cast<int>(gridDim.x) / Cluster),
        rank_(Cluster > 1 ? static_cast<int>(cluster_rank()) : 0) {}

  // A part may lie behind all columns, in the second CTA of a cluster.
  __device__ __forceinline__ bool next(Tile& tile, int& part) {
    if (!walk_.next(tile, part)) return false;
    part = part * Cluster + rank_;
    return true;
  }

 private:
  TaskWalk walk_;
  int rank_;
};

__device__ __forceinline__ int wide_steps(const Tile& tile) {
  return ceil_div(tile.rows, kWideStep);
}

// By one thread: 128 weight rows, `groups` groups of them.
template <class Walk>
__device__ __forceinline__ void copy_wide_weights(const WideMemory& memory, Walk walk, int turns,
                                                  int groups, const CUtensorMap* map,
                                                  uint64_t policy) {
  WidePlace place;
  Tile tile;
  int part;
  while (walk.next(tile, part)) {
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn, place.advance(memory.layout.stages)) {
      wait(memory.empty(place.stage), place.parity ^ 1);
      const SharedAddress full = memory.full(place.stage);
      arrive_expecting(full, kWideWeightRows * kStageValues);
      copy_wide_weights(memory.weights(place.stage), map, full, turn * kStageValues, part * groups,
                        tile.expert, policy);
    }
  }
}

// By one thread: a tile's rows. What lies behind its last row is nobody's business.
template <class Walk>
__device__ __forceinline__ void copy_wide_rows(const WideMemory& memory, Walk walk, int turns,
                                               const CUtensorMap* map) {
  constexpr int kBoxBytes = kWideBoxRows * kStageValues;
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
        copy_tile(memory.rows(place.stage) + i * kBoxBytes, map, full, turn * kStageValues,
                  tile.first_row + i * kWideBoxRows);
      }
    }
  }
}

// Scales of a task's tokens and weights, multiplied beforehand: Count products of a token, with as
// many weights. By two warps, whose lanes have three tokens each; those of the next turn are read
// before there is room for them.
template <int Count>
class WideScales {
 public:
  __device__ __forceinline__ WideScales(const WideMemory& memory, int warp, int lane)
      : memory_(memory), first_(warp * kWarpSize + lane) {}

  // Of turn i, token scales lie `stride` floats apart.
  __device__ __forceinline__ void copy_task(const float* rows, int stride, int tokens,
                                            const float* const (&weights)[Count], int turns) {
    read(rows, stride, tokens, weights, 0);
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn, place_.advance(memory_.layout.stages)) {
      float row[kTokens];
      float weight[Count];
#pragma unroll
      for (int i = 0; i < kTokens; ++i) row[i] = next_row_[i];
#pragma unroll
      for (int i = 0; i < Count; ++i) weight[i] = next_weight_[i];
      if (turn + 1 < turns) read(rows, stride, tokens, weights, turn + 1);
      wait(memory_.empty(place_.stage), place_.parity ^ 1);
      const SharedAddress to = memory_.scales(place_.stage);
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        const int token = first_ + i * kStride;
        if (token * Count * 4 >= memory_.layout.scale_bytes) continue;
        if constexpr (Count == 2) {
          store_shared_pair(to + token * 8, {row[i] * weight[0], row[i] * weight[1]});
        } else {
          store_shared_float(to + token * 4, row[i] * weight[0]);
        }
      }
      // All that wrote arrive: racecheck credits a lane that arrives for others with its own alone.
      arrive(memory_.full(place_.stage));
    }
  }

 private:
  static constexpr int kStride = kWideScaleWarps * kWarpSize;
  static constexpr int kTokens = kWideMostRows / kStride;

  __device__ __forceinline__ void read(const float* rows, int stride, int tokens,
                                       const float* const (&weights)[Count], int turn) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int token = first_ + i * kStride;
      next_row_[i] = token < tokens ? rows[int64_t{token} * stride + turn] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < Count; ++i) next_weight_[i] = weights[i][turn];
  }

  const WideMemory& memory_;
  int first_;
  WidePlace place_;
  float next_row_[kTokens];
  float next_weight_[Count];
};

// Of no scale, of one of each token, and of two: of gate rows and of up rows.
template <int Count, int Rows>
__device__ __forceinline__ void add_wide(SharedAddress scales, const Fragment& f,
                                         const float (&sums)[Rows / 2], float (&totals)[Rows / 2]) {
#pragma unroll
  for (int j = 0; j < Rows / 8; ++j) {
    if constexpr (Count == 0) {
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; ++i) totals[i] += sums[i];
    } else if constexpr (Count == 1) {
      const float2 scale = load_shared_pair(scales + (8 * j + f.token0) * 4);
      totals[4 * j] += sums[4 * j] * scale.x;
      totals[4 * j + 1] += sums[4 * j + 1] * scale.y;
      totals[4 * j + 2] += sums[4 * j + 2] * scale.x;
      totals[4 * j + 3] += sums[4 * j + 3] * scale.y;
    } else {
      const float4 scale = load_shared(scales + (8 * j + f.token0) * 8);
      totals[4 * j] += sums[4 * j] * scale.x;
      totals[4 * j + 1] += sums[4 * j + 1] * scale.z;
      totals[4 * j + 2] += sums[4 * j + 2] * scale.y;
      totals[4 * j + 3] += sums[4 * j + 3] * scale.w;
    }
  }
}

// A task's products.
template <int Count, int Rows>
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
    if constexpr (Count == 0) memory.release(place.stage, f.lane);
    add_wide<Count, Rows>(memory.scales(place.stage), f, sums, totals);
    if constexpr (Count > 0) memory.release(place.stage, f.lane);
  }
}

// Calls task.run<Rows>() with the least number of rows that a tile fits into.
template <int Steps = 1, class Task>
__device__ __forceinline__ void run_wide(int steps, const Task& task) {
  if constexpr (Steps == kWideSteps) {
    task.template run<Steps * kWideStep>();
  } else if (steps == Steps) {
    task.template run<Steps * kWideStep>();
  } else {
    run_wide<Steps + 1>(steps, task);
  }
}

// At a kernel's start and end, by all threads: a CTA may be reached from now on, or no longer.
template <int Cluster>
__device__ __forceinline__ void meet_cluster() {
  if constexpr (Cluster > 1) {
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

}  // namespace jax_hpc::fused_moe
