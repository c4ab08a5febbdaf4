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
  int ctas;      // of the attention, each of which has its first task
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

// What the CTA that lists the row tiles holds, of a thousand sequences at a time.
struct ListMemory {
  Chunk chunks[kPlanThreads];
  int ends[kPlanThreads];     // of the sequences' row tiles
  int classes[kPlanThreads];  // row tiles of each class; later, where the next of it goes
  int sums[kPlanWarps];
  int longest;  // tokens of a sequence
};

struct Lister {
  const PlanArguments& a;
  ListMemory& memory;

  // The sequences from `base` on, and how many row tiles they have.
  __device__ __forceinline__ int load(int base) const {
    const int sequence = base + static_cast<int>(threadIdx.x);
    Chunk chunk{};
    if (sequence < a.problem.batch) chunk = chunk_of(a, sequence);
    const int tiles = ceil_div(chunk.tokens * a.problem.group, kTileRows);
    memory.chunks[threadIdx.x] = chunk;
    if (tiles > 0) atomicMax(&memory.longest, chunk.first_position + chunk.tokens);
    const Scanned scanned = scan(tiles, memory.sums);
    memory.ends[threadIdx.x] = scanned.before + tiles;
    __syncthreads();
    return scanned.total;
  }

  template <class Take>
  __device__ __forceinline__ void for_each_tile(int base, int tiles, const Take& take) const {
    const int* const ends = memory.ends;
    for (int i = threadIdx.x; i < tiles; i += kPlanThreads) {
      int low = 0;  // the first sequence whose tiles end behind i
      for (int step = kPlanThreads / 2; step > 0; step /= 2) {
        if (ends[low + step - 1] <= i) low += step;
      }
      const int first = low > 0 ? ends[low - 1] : 0;
      take(row_tile(a.problem, base + low, memory.chunks[low], i - first));
    }
    __syncthreads();
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
    const int token_bytes = a.problem.head_dim * (a.problem.fp8_cache ? 2 : 4);
    int heads = a.problem.kv_heads;
    while (heads % 2 == 0 && int64_t{memory.longest} * token_bytes * heads > kCacheBytes) {
      heads /= 2;
    }
    return heads;
  }

  __device__ __forceinline__ void run() const {
    const int batch = a.problem.batch;
    memory.classes[threadIdx.x] = 0;
    memory.longest = 1;
    __syncthreads();
    int tiles = 0;
    for (int base = 0; base < batch; base += kPlanThreads) {
      tiles = load(base);
      for_each_tile(base, tiles,
                    [&](const RowTile& t) { atomicAdd(&memory.classes[class_of(t)], 1); });
    }
    const Scanned places = scan(memory.classes[threadIdx.x], memory.sums);
    memory.classes[threadIdx.x] = places.before;
    __syncthreads();
    if (threadIdx.x == 0) {
      *reinterpret_cast<PlanHeader*>(a.plan) = {
          .taken = a.ctas, .count = min(places.total, a.capacity), .heads = heads_at_a_time()};
    }
    RowTile* const listed = reinterpret_cast<RowTile*>(a.plan) + 1;
    for (int base = 0; base < batch; base += kPlanThreads) {
      if (batch > kPlanThreads) tiles = load(base);
      for_each_tile(base, tiles, [&](const RowTile& t) {
        const int place = atomicAdd(&memory.classes[class_of(t)], 1);
        if (place < a.capacity) listed[place] = t;
      });
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
  __shared__ ListMemory memory;
  __shared__ uint32_t owned[kFillRows / 32];
  let_next_kernel_start();
  if (blockIdx.x == 0) {
    Lister{a, memory}.run();
  } else {
    fill_rows(a, (static_cast<int>(blockIdx.x) - 1) * kFillRows, owned);
  }
}

}  // namespace jax_hpc::prefill_attention
