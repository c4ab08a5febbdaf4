// A CTA's shared memory and the order in which it is filled and read.
#pragma once

#include "decode_attention/arguments.cuh"
#include "decode_attention/tasks.cuh"

namespace jax_hpc::decode_attention {

// A task's head's, where its tokens have common ones. Beside the task: a read from global memory
// waits behind all tiles that are under way.
struct Scales {
  float keys;
  float values;
};

// Pointers into shared memory. The ring holds half tiles: K of a tile, then V of it, then K of the
// next, on across tasks. `live` says which groups of 16 tokens of a tile lie on pages that exist.
struct Shared {
  SharedAddress start;
  SharedAddress ring;
  float* merge;
  uint8_t* query;
  float* query_scale;
  float2* state;
  float* token_scale;
  Task* tasks;
  Scales* scales;
  uint32_t* live;
  int query_stride;

  __device__ Shared(uint8_t* memory, const Layout& l)
      : start(static_cast<SharedAddress>(keep(static_cast<int>(shared_address(memory))))),
        ring(start + Layout::kRing),
        merge(reinterpret_cast<float*>(memory + l.merge)),
        query(memory + l.query),
        query_scale(reinterpret_cast<float*>(memory + Layout::kQueryScale)),
        state(reinterpret_cast<float2*>(memory + Layout::kState)),
        token_scale(reinterpret_cast<float*>(memory + l.token_scale)),
        tasks(reinterpret_cast<Task*>(memory + Layout::kTasks)),
        scales(reinterpret_cast<Scales*>(memory + Layout::kScales)),
        live(reinterpret_cast<uint32_t*>(memory + Layout::kLive)),
        query_stride(l.query_stride) {}

  // Barriers.
  __device__ SharedAddress full(int slot) const { return start + Layout::kFull + 8 * slot; }
  __device__ SharedAddress empty(int slot) const { return start + Layout::kEmpty + 8 * slot; }
  __device__ SharedAddress query_full(int stage) const {
    return start + Layout::kQueryFull + 8 * stage;
  }
  __device__ SharedAddress query_empty(int stage) const {
    return start + Layout::kQueryEmpty + 8 * stage;
  }
};

static_assert(sizeof(Task) <= 32);

struct Thread {
  int warp;
  int lane;
};

// Arrivals that complete a phase: of queries, every lane of the producer after its copies and one
// for the task; of a half tile, one besides the bytes; each consumer warp (of a half tile, of the
// team whose tile it is) when it has read.
constexpr int kQueryArrivals = kWarpSize + 1;

// Shared out among the first four consumer warps, one thread each: an initialisation takes 40 ns
// in a rolled loop. What lies beyond the ring's slots is initialised as well, and not used.
__device__ __forceinline__ void init_barriers(const Shared& shared, int warp, int team) {
  constexpr int kEach = kMostSlots / 2;  // half of `full` or of `empty`
  static_assert(Layout::kEmpty == Layout::kFull + 8 * kMostSlots &&
                Layout::kQueryEmpty == Layout::kQueryFull + 8 * 2);
  if (warp >= 4 || !elect_one()) return;
  const bool fills = warp < 2;
  const SharedAddress first = shared.full(warp * kEach);
#pragma unroll
  for (int i = 0; i < kEach; ++i) init_barrier(first + 8 * i, fills ? 1 : team);
  init_barrier(shared.query_full(warp), fills ? kQueryArrivals : kWarps);
  fence_barrier_init();
}

// The turn of a task, counted from 0 to 3: two stages of queries take turns, and four places of
// tasks, so that a task can still be read at its end, when its stage holds another query.
struct Turn {
  int index = 0;

  __device__ __forceinline__ int stage() const { return index & 1; }
  __device__ __forceinline__ uint32_t parity() const { return static_cast<uint32_t>(index) >> 1; }
  __device__ __forceinline__ void advance() { index = (index + 1) & 3; }
};

// A place in a ring of some size and the parity of its current use, in one number: it counts two
// rounds.
struct Place {
  int count = 0;

  __device__ __forceinline__ int index(int size) const {
    return count < size ? count : count - size;
  }
  __device__ __forceinline__ uint32_t parity(int size) const { return count < size ? 0 : 1; }
  __device__ __forceinline__ void advance(int size) {
    if (++count == 2 * size) count = 0;
  }
  // On by several places, at most two rounds.
  __device__ __forceinline__ void skip(int steps, int size) {
    count += steps;
    if (count >= 2 * size) count -= 2 * size;
  }
  // The place `steps` before, at most `size`.
  __device__ __forceinline__ Place before(int steps, int size) const {
    return {count >= steps ? count - steps : count - steps + 2 * size};
  }
};

// Bytes of 64 tokens as the copy engine lays them down: pages (or parts of one) of up to 64 tokens
// one after the other; in each, rows of 128 bytes at most, the second half of wider ones behind
// all first halves; 16-byte columns swizzled by row.
template <class Cache, int D>
struct HalfTile {
  static constexpr int kTokenBytes = D * Cache::kBytes;
  static constexpr int kRowBytes = kTokenBytes < 128 ? kTokenBytes : 128;
  static constexpr int kHalves = kTokenBytes / kRowBytes;
  static constexpr int kBytes = kTileTokens * kTokenBytes;
  static_assert(kRowBytes == 64 || kRowBytes == 128);

  // Of the 16-byte column that lane's row gives for a load of columns 0 and 1; for columns 2j and
  // 2j + 1 the address differs in the bits of 32 j only.
  static __device__ __forceinline__ int offset(int token, int column) {
    const int twist = kRowBytes == 128 ? token % 8 : token / 2 % 4;
    return token * kRowBytes + (column ^ twist) * 16;
  }
};

}  // namespace jax_hpc::decode_attention
