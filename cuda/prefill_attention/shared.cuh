// A CTA's shared memory: tiles of queries, keys and values, tasks, and the barriers between the
// warps that fill them and those that use them.
#pragma once

#include "prefill_attention/arguments.cuh"

namespace jax_hpc::prefill_attention {

// A tile of 128 tokens or rows lies as columns of 128 bytes, each token one row of the copy
// engine's swizzle.
template <int D>
struct Tile {
  static constexpr int kRowBytes = 128;
  static constexpr int kColumnBytes = kTileTokens * kRowBytes;
  static constexpr int kColumns = D * 2 / kRowBytes;
  static constexpr int kBytes = kColumns * kColumnBytes;
  static constexpr int kVectors = D * 2 / 16;  // of a token

  // Of the 16 bytes `vector` of a row.
  static __device__ __forceinline__ int offset(int row, int vector) {
    return vector / 8 * kColumnBytes + row * kRowBytes + ((vector ^ row) & 7) * 16;
  }
};

constexpr int kQueryStages = 2;
constexpr int kKeyStages = 2;
constexpr int kValueStages = 2;
constexpr int kTaskSlots = 2;
constexpr int kCheckers = 2;  // warps that look after values that some row must not see

// A place in a ring and the parity of its barriers' phase.
template <int Stages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <int D>
struct Shared {
  static constexpr int kAlignment = 1024;
  static constexpr int kQueryAt = 0;
  static constexpr int kKeyAt = kQueryAt + kQueryStages * Tile<D>::kBytes;
  static constexpr int kValueAt = kKeyAt + kKeyStages * Tile<D>::kBytes;
  static constexpr int kQueryFullAt = kValueAt + kValueStages * Tile<D>::kBytes;
  static constexpr int kQueryEmptyAt = kQueryFullAt + kQueryStages * 8;
  static constexpr int kKeyFullAt = kQueryEmptyAt + kQueryStages * 8;
  static constexpr int kKeyEmptyAt = kKeyFullAt + kKeyStages * 8;
  static constexpr int kValueFullAt = kKeyEmptyAt + kKeyStages * 8;
  static constexpr int kValueCheckedAt = kValueFullAt + kValueStages * 8;
  static constexpr int kValueEmptyAt = kValueCheckedAt + kValueStages * 8;
  static constexpr int kTaskFullAt = kValueEmptyAt + kValueStages * 8;
  static constexpr int kTaskEmptyAt = kTaskFullAt + kTaskSlots * 8;
  static constexpr int kLiveAt = kTaskEmptyAt + kTaskSlots * 8;
  static constexpr int kBadAt = (kLiveAt + kKeyStages * 4 + 15) / 16 * 16;
  static constexpr int kTaskAt = kBadAt + kValueStages * kCheckers * 16;
  static constexpr int kTaskBytes = 48;
  static constexpr int kEnd = kTaskAt + kTaskSlots * kTaskBytes;
  static constexpr int kBytes = kEnd + kAlignment;
  static_assert(kBytes <= 227 * 1024);

  SharedAddress start;  // a multiple of kAlignment

  __device__ __forceinline__ SharedAddress query(int stage) const {
    return start + kQueryAt + stage * Tile<D>::kBytes;
  }
  __device__ __forceinline__ SharedAddress key(int stage) const {
    return start + kKeyAt + stage * Tile<D>::kBytes;
  }
  __device__ __forceinline__ SharedAddress value(int stage) const {
    return start + kValueAt + stage * Tile<D>::kBytes;
  }
  __device__ __forceinline__ SharedAddress query_full(int stage) const {
    return start + kQueryFullAt + stage * 8;
  }
  __device__ __forceinline__ SharedAddress query_empty(int stage) const {
    return start + kQueryEmptyAt + stage * 8;
  }
  __device__ __forceinline__ SharedAddress key_full(int stage) const {
    return start + kKeyFullAt + stage * 8;
  }
  __device__ __forceinline__ SharedAddress key_empty(int stage) const {
    return start + kKeyEmptyAt + stage * 8;
  }
  __device__ __forceinline__ SharedAddress value_full(int stage) const {
    return start + kValueFullAt + stage * 8;
  }
  // Of tiles that hold a token hidden from some row, instead of value_full.
  __device__ __forceinline__ SharedAddress value_checked(int stage) const {
    return start + kValueCheckedAt + stage * 8;
  }
  __device__ __forceinline__ SharedAddress value_empty(int stage) const {
    return start + kValueEmptyAt + stage * 8;
  }
  __device__ __forceinline__ SharedAddress task_full(int slot) const {
    return start + kTaskFullAt + slot * 8;
  }
  __device__ __forceinline__ SharedAddress task_empty(int slot) const {
    return start + kTaskEmptyAt + slot * 8;
  }
  // Bit g: the 16 tokens g of the tile of keys are on a page that exists.
  __device__ __forceinline__ SharedAddress live(int stage) const {
    return start + kLiveAt + stage * 4;
  }
  // Four words a checker: bit t % 32 of word t / 32 for a token t whose value is not finite.
  __device__ __forceinline__ SharedAddress bad(int stage, int checker) const {
    return start + kBadAt + (stage * kCheckers + checker) * 16;
  }
  __device__ __forceinline__ SharedAddress task(int slot) const {
    return start + kTaskAt + slot * kTaskBytes;
  }
};

// By one thread.
template <int D>
__device__ __forceinline__ void init_barriers(const Shared<D>& shared) {
#pragma unroll
  for (int i = 0; i < kQueryStages; ++i) {
    init_barrier(shared.query_full(i), 1);
    init_barrier(shared.query_empty(i), kConsumerWarps);
  }
#pragma unroll
  for (int i = 0; i < kKeyStages; ++i) {
    init_barrier(shared.key_full(i), 1);
    init_barrier(shared.key_empty(i), kConsumerWarps);
  }
#pragma unroll
  for (int i = 0; i < kValueStages; ++i) {
    init_barrier(shared.value_full(i), 1);
    init_barrier(shared.value_checked(i), kCheckers);
    init_barrier(shared.value_empty(i), kConsumerWarps);
  }
#pragma unroll
  for (int i = 0; i < kTaskSlots; ++i) {
    init_barrier(shared.task_full(i), 1);
    init_barrier(shared.task_empty(i), kConsumerWarps + kCheckers + 1);
  }
  fence_barrier_init();
}

// A warp lets go of what it has read.
__device__ __forceinline__ void release(SharedAddress barrier) {
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) arrive(barrier);
}

// The tasks of a CTA as all warps but the one that takes them see them.
template <int D>
struct TaskReader {
  const Shared<D>& shared;
  RingPlace<kTaskSlots> place;

  __device__ __forceinline__ Task next() {
    wait(shared.task_full(place.stage), place.parity);
    const SharedAddress at = shared.task(place.stage);
    const uint4 a = load_shared_16(at);
    const uint4 b = load_shared_16(at + 16);
    const uint32_t c = load_shared_4(at + 32);
    release(shared.task_empty(place.stage));
    place.advance();
    const auto i = [](uint32_t x) { return static_cast<int>(x); };
    return {{i(a.x), i(a.y), i(a.z), i(a.w), i(b.x), i(b.y), i(b.z), i(b.w)}, i(c)};
  }
};

}  // namespace jax_hpc::prefill_attention
