// The plan of a call, made on the device from its lengths: which tiles of rows there are, those
// with most keys first, and zeros for the rows that no sequence has.
#pragma once

#include <cuda_bf16.h>

#include "prefill_attention/config.h"
#include "prefill_attention/instructions.cuh"

namespace jax_hpc::prefill_attention {

constexpr int kPlanThreads = 1024;
constexpr int kPlanWarps = kPlanThreads / kWarpSize;
constexpr int kFillRows = 256;  // that one CTA looks after

struct PlanArguments {
  Problem problem;
  int capacity;  // row tiles that the plan has room for
  const int* q_starts;
  const int* q_lens;
  const int* kv_lens;
  int* plan;
  __nv_bfloat16* out;
  float* lse;  // null where it is not asked for
};

// A chunk of rows: those that exist in q and that the caller asked for.
struct Chunk {
  int first_q;
  int tokens;
  int first_position;
};

__device__ __forceinline__ Chunk chunk_of(const PlanArguments& a, int sequence) {
  const int start = a.q_starts[sequence];
  const int length = a.q_lens[sequence];
  const int64_t first = max(start, 0);
  const int64_t end =
      min(int64_t{start} + min(length, a.problem.max_q_len), int64_t{a.problem.tokens});
  const int skipped = static_cast<int>(first - start);
  const int position = max(a.kv_lens[sequence], 0) - max(length, 0);
  return {static_cast<int>(first), end > first ? static_cast<int>(end - first) : 0,
          position + skipped};
}

__device__ __forceinline__ RowTile row_tile(const Problem& p, int sequence, const Chunk& chunk,
                                            int index) {
  const int first_row = index * kTileRows;
  const int first_token = first_row / p.group;
  const int rows = min(chunk.tokens * p.group - first_row, kTileRows);
  const int last_token = (first_row + rows - 1) / p.group;
  RowTile t;
  t.sequence = sequence;
  t.first_q = chunk.first_q + first_token;
  t.first_head = first_row - first_token * p.group;
  t.rows = rows;
  t.first_position = chunk.first_position + first_token;
  t.last_position = chunk.first_position + last_token;
  t.last_tile = max(t.last_position, 0) / kTileTokens;
  const int first_key = p.window > 0 ? max(t.first_position - p.window + 1, 0) : 0;
  t.first_tile = min(first_key / kTileTokens, t.last_tile);
  return t;
}

// Sums of the values of all threads before this one, and of all.
struct Scanned {
  int before;
  int total;
};

__device__ __forceinline__ Scanned scan(int value, int* warp_sums) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  int sum = value;
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();  // the last scan has been read
  if (lane == kWarpSize - 1) warp_sums[warp] = sum;
  __syncthreads();
  int before = 0;
  int total = 0;
#pragma unroll
  for (int i = 0; i < kPlanWarps; ++i) {
    if (i == warp) before = total;
    total += warp_sums[i];
  }
  return {before + sum - value, total};
}

// Lists the row tiles; by one CTA, a thousand sequences at a time.
struct Lister {
  const PlanArguments& a;
  int* ends;     // [kPlanThreads] of the sequences' row tiles
  int* classes;  // [kPlanThreads] row tiles of each class; later, where the next of it goes
  int* sums;     // [kPlanWarps]
  int* longest_seen;

  template <class Take>
  __device__ __forceinline__ void for_each_tile(const Take& take) const {
    const Problem& p = a.problem;
    for (int base = 0; base < p.batch; base += kPlanThreads) {
      const int sequence = base + static_cast<int>(threadIdx.x);
      int tiles = 0;
      if (sequence < p.batch) {
        tiles = ceil_div(chunk_of(a, sequence).tokens * p.group, kTileRows);
      }
      const Scanned scanned = scan(tiles, sums);
      ends[threadIdx.x] = scanned.before + tiles;
      __syncthreads();
      for (int i = threadIdx.x; i < scanned.total; i += kPlanThreads) {
        int low = 0;  // the first sequence whose tiles end behind i
        for (int step = kPlanThreads / 2; step > 0; step /= 2) {
          if (ends[low + step - 1] <= i) low += step;
        }
        const int first = low > 0 ? ends[low - 1] : 0;
        take(row_tile(p, base + low, chunk_of(a, base + low), i - first));
      }
      __syncthreads();
    }
  }

  // Eight classes for each doubling of the tiles of keys, the largest first. Within one, the row
  // tiles of a sequence stay about together, and so do the keys that they read.
  __device__ __forceinline__ static int class_of(const RowTile& t) {
    const auto cost = static_cast<float>(t.last_tile - t.first_tile + 1);
    return kPlanThreads - 1 - (__float_as_int(cost) - __float_as_int(1.0f) >> 20);
  }

  // The most KV heads whose keys and values of the longest sequence are not more than kCacheBytes.
  __device__ __forceinline__ int heads_at_a_time() const {
    constexpr int64_t kCacheBytes = 32 << 20;
    int longest = 1;
    for (int b = threadIdx.x; b < a.problem.batch; b += kPlanThreads) {
      if (a.q_lens[b] > 0) longest = max(longest, a.kv_lens[b]);
    }
    *longest_seen = 1;
    __syncthreads();
    atomicMax(longest_seen, longest);
    __syncthreads();
    const int64_t head_bytes = int64_t{*longest_seen} * a.problem.head_dim * 4;
    int heads = a.problem.kv_heads;
    while (heads % 2 == 0 && heads * head_bytes > kCacheBytes) heads /= 2;
    return heads;
  }

  __device__ __forceinline__ void run() const {
    classes[threadIdx.x] = 0;
    __syncthreads();
    for_each_tile([&](const RowTile& t) { atomicAdd(&classes[class_of(t)], 1); });
    const Scanned places = scan(classes[threadIdx.x], sums);
    classes[threadIdx.x] = places.before;
    __syncthreads();
    RowTile* const tiles = reinterpret_cast<RowTile*>(a.plan) + 1;
    for_each_tile([&](const RowTile& t) {
      const int place = atomicAdd(&classes[class_of(t)], 1);
      if (place < a.capacity) tiles[place] = t;
    });
    const int heads = heads_at_a_time();
    if (threadIdx.x == 0) {
      PlanHeader* const header = reinterpret_cast<PlanHeader*>(a.plan);
      header->taken = 0;
      header->heads = heads;
      header->count = min(places.total, a.capacity);
    }
  }
};

// Zeros for the rows of no sequence among kFillRows.
__device__ __forceinline__ void fill_rows(const PlanArguments& a, int first, uint32_t* owned) {
  const Problem& p = a.problem;
  constexpr int kWords = kFillRows / 32;
  if (threadIdx.x < kWords) owned[threadIdx.x] = 0;
  __syncthreads();
  for (int b = threadIdx.x; b < p.batch; b += kPlanThreads) {
    const Chunk chunk = chunk_of(a, b);
    const int begin = max(chunk.first_q - first, 0);
    const int64_t end = min(int64_t{chunk.first_q} + chunk.tokens - first, int64_t{kFillRows});
    for (int word = begin / 32; word * 32 < end; ++word) {
      const int low = max(begin - word * 32, 0);
      const int high = min(static_cast<int>(end) - word * 32, 32);
      if (low < high) atomicOr(&owned[word], (~0u >> (32 - (high - low))) << low);
    }
  }
  __syncthreads();
  const int lane = threadIdx.x % kWarpSize;
  const int rows = min(p.tokens - first, kFillRows);
  for (int row = threadIdx.x / kWarpSize; row < rows; row += kPlanWarps) {
    if (owned[row / 32] >> row % 32 & 1) continue;
    const int64_t q_row = int64_t{first} + row;
    const int vectors = p.q_heads() * p.head_dim / 8;
    uint4* const to = reinterpret_cast<uint4*>(a.out) + q_row * vectors;
    for (int i = lane; i < vectors; i += kWarpSize) to[i] = uint4{0, 0, 0, 0};
    if (a.lse == nullptr) continue;
    for (int head = lane; head < p.q_heads(); head += kWarpSize) {
      a.lse[q_row * p.q_heads() + head] = -INFINITY;
    }
  }
}

__global__ void __launch_bounds__(kPlanThreads, 1)
    prefill_plan_kernel(const __grid_constant__ PlanArguments a) {
  __shared__ int ends[kPlanThreads];
  __shared__ int classes[kPlanThreads];
  __shared__ int sums[kPlanWarps];
  __shared__ int longest_seen;
  __shared__ uint32_t owned[kFillRows / 32];
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (blockIdx.x == 0) {
    Lister{a, ends, classes, sums, &longest_seen}.run();
  } else {
    fill_rows(a, (static_cast<int>(blockIdx.x) - 1) * kFillRows, owned);
  }
}

}  // namespace jax_hpc::prefill_attention
