// The decode schedule in one CTA: a sum and a scan over the sequences, a search for every cut.
#pragma once

#include "common/launch.h"
#include "common/ptx.cuh"
#include "decode_schedule/config.h"

namespace jax_hpc::decode_schedule {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kSharedBounds = 2048;  // spans are searched in shared memory up to this many

// Total over the block, the same in every thread. `scratch` holds kWarps values.
__device__ __forceinline__ int64_t block_sum(int64_t value, int64_t* scratch) {
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(~0u, value, step);
  }
  if (threadIdx.x % kWarpSize == 0) scratch[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  value = scratch[threadIdx.x % kWarpSize];
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(~0u, value, step);
  }
  return value;
}

__device__ __forceinline__ int warp_scan(int value) {
  const int lane = threadIdx.x % kWarpSize;
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int below = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += below;
  }
  return value;
}

// ends[t] = sum of the values of threads 0 to t. `scratch` holds kWarps values.
__device__ __forceinline__ void block_scan(int value, int* ends, int* scratch) {
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  value = warp_scan(value);
  if (lane == kWarpSize - 1) scratch[warp] = value;
  __syncthreads();
  const int totals = warp_scan(scratch[lane]);
  const int before = __shfl_sync(~0u, totals, max(warp - 1, 0));
  ends[threadIdx.x] = value + (warp > 0 ? before : 0);
  __syncthreads();
}

// Number of the `size` rising values at or below `value`.
__device__ __forceinline__ int count_at_most(const int* values, int size, int value) {
  int low = 0;
  while (size > 0) {
    const int half = size / 2;
    if (values[low + half] <= value) {
      low += half + 1;
      size -= half + 1;
    } else {
      size = half;
    }
  }
  return low;
}

// The cost axis: what one thread needs to place a cut. Costs are in units of 2^shift, so that the
// longest axis fits int32.
struct Axis {
  Problem p;
  const int* kv_lens;
  int shift;
  int per_thread;   // sequences of one thread
  const int* ends;  // of the threads' sequences, in shared memory

  __device__ int tiles(int sequence) const {
    return count_tiles(max(kv_lens[sequence], 0), p.q_len, p.window);
  }
  __device__ int cost(int tiles) const {
    return (pair_cost(tiles, p.task_cost) + (1 << shift) - 1) >> shift;
  }
};

struct Boundary {
  int pair;
  int tile;
};

__device__ __forceinline__ Boundary place(const Axis& axis, int cut) {
  const Problem& p = axis.p;
  const int chunk = count_at_most(axis.ends, kThreads, cut);
  if (chunk == kThreads) return {p.batch * p.kv_heads, 0};
  int start = chunk > 0 ? axis.ends[chunk - 1] : 0;
  int sequence = chunk * axis.per_thread;
  int tiles = axis.tiles(sequence);
  int cost = axis.cost(tiles);
  while (start + cost * p.kv_heads <= cut) {
    start += cost * p.kv_heads;
    tiles = axis.tiles(++sequence);
    cost = axis.cost(tiles);
  }
  const int head = (cut - start) / cost;
  const int within = cut - start - head * cost;
  // To the nearest tile; an arithmetic shift divides towards minus infinity.
  static_assert(kTileCost == 8);
  int tile = ((within << axis.shift) - p.task_cost + kTileCost / 2) >> 3;
  tile = min(max(tile, 0), tiles);
  const int pair = sequence * p.kv_heads + head;
  // A cut behind a pair's last tile is a cut before the next pair.
  if (tile == tiles && tile > 0) return {pair + 1, 0};
  return {pair, tile};
}

__global__ void __launch_bounds__(kThreads)
    schedule_kernel(Problem p, const int* kv_lens, int* span_pair, int* span_tile,
                    int* merge_last) {
  __shared__ int64_t sums[kWarps];
  __shared__ int scans[kWarps];
  __shared__ int ends[kThreads];
  __shared__ int pairs[kSharedBounds];
  __shared__ int tiles[kSharedBounds];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int thread = static_cast<int>(threadIdx.x);
  Axis axis{p, kv_lens, 0, ceil_div(p.batch, kThreads), ends};
  const int begin = min(thread * axis.per_thread, p.batch);
  const int end = min(begin + axis.per_thread, p.batch);

  int64_t exact = 0;
  for (int i = begin; i < end; ++i) exact += pair_cost(axis.tiles(i), p.task_cost);
  const int64_t total_cost = block_sum(exact, sums);
  // total * heads < 2^bits
  const int bits = (32 - __clz(static_cast<int>(total_cost >> 16))) + 16 + (32 - __clz(p.kv_heads));
  axis.shift = max(bits - kAxisBits, 0);
  int scaled = 0;
  for (int i = begin; i < end; ++i) scaled += axis.cost(axis.tiles(i)) * p.kv_heads;
  block_scan(scaled, ends, scans);

  const int total = ends[kThreads - 1];
  const int working = min(max(total / min_cta_cost(p.task_cost), 1), p.num_ctas);
  const int share = total / working;
  const int rest = total - share * working;
  const bool in_shared = p.num_ctas < kSharedBounds;
  for (int i = thread; i <= p.num_ctas; i += kThreads) {
    const int index = min(i, working);
    const Boundary boundary = place(axis, index * share + min(index, rest));
    span_pair[i] = boundary.pair;
    span_tile[i] = boundary.tile;
    if (in_shared) {
      pairs[i] = boundary.pair;
      tiles[i] = boundary.tile;
    }
  }
  __syncthreads();
  const int* all_pairs = in_shared ? pairs : span_pair;
  const int* all_tiles = in_shared ? tiles : span_tile;
  for (int i = thread; i < p.num_ctas; i += kThreads) {
    const int cut_pair = all_pairs[i + 1];
    const bool starts_here = all_pairs[i] < cut_pair || all_tiles[i] == 0;
    int last = -1;
    if (all_tiles[i + 1] > 0 && starts_here) {
      last = count_at_most(all_pairs, p.num_ctas + 1, cut_pair) - 1;
    }
    merge_last[i] = last;
  }
}

}  // namespace jax_hpc::decode_schedule
