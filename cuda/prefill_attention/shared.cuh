// A CTA's shared memory: tiles of queries, keys and values, tasks, and the barriers between the
// warps that fill them and those that use them.
#pragma once

#include <cstddef>

#include "prefill_attention/arguments.cuh"
#include "prefill_attention/cache_types.cuh"

namespace jax_hpc::prefill_attention {

// A tile of 128 tokens or rows lies as columns of 128 bytes (64 where a row has no more), each
// token one row of the copy engine's swizzle.
template <class Cache, int D>
struct Tile {
  static constexpr int kTokenBytes = D * Cache::kBytes;
  static constexpr int kRowBytes = kTokenBytes < 128 ? kTokenBytes : 128;
  static constexpr int kColumnBytes = kTileTokens * kRowBytes;
  static constexpr int kColumns = kTokenBytes / kRowBytes;
  static constexpr int kBytes = kColumns * kColumnBytes;
  static constexpr int kVectors = kTokenBytes / 16;  // of a token
  static constexpr int kSteps = kTokenBytes / 32;    // products over the head dimension

  // Of the 16 bytes `vector` of a row.
  static __device__ __forceinline__ int offset(int row, int vector) {
    constexpr int kInRow = kRowBytes / 16;
    const int swizzled = kRowBytes == 128 ? vector ^ row : vector ^ row / 2;
    return vector / kInRow * kColumnBytes + row * kRowBytes + swizzled % kInRow * 16;
  }
  // Descriptor of a tile: groups of eight rows lie 8 kRowBytes apart. Its lower half holds the
  // place in units of 16 bytes, so that other places are an addition away.
  static __device__ __forceinline__ uint64_t descriptor(uint32_t swizzled_tile) {
    constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2;
    return kSwizzle << 62 | uint64_t{kRowBytes * 8 / 16} << 32 | swizzled_tile;
  }
  // Of step k's 32 bytes of each row, in units of 16 bytes.
  __host__ __device__ static constexpr int step(int k) {
    constexpr int kInRow = kRowBytes / 32;
    return k / kInRow * (kColumnBytes / 16) + k % kInRow * 2;
  }
};

// Values of an fp8 cache, transposed: a dimension is a row of 128 tokens.
struct TransposedTile {
  static constexpr int kRowBytes = kTileTokens;
  static __device__ __forceinline__ int offset(int dimension, int vector) {
    return dimension * kRowBytes + ((vector ^ dimension) & 7) * 16;
  }
};

constexpr int kQueryStages = 2;
constexpr int kTaskSlots = 4;
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

template <class Cache_, int D>
struct Shared {
  using Cache = Cache_;
  using TileOf = Tile<Cache, D>;
  static constexpr int kTileBytes = TileOf::kBytes;
  static constexpr int kKeyStages = Cache::kKeyStages;
  static constexpr int kValueStages = Cache::kValueStages;
  static constexpr int kRawStages = Cache::kRawStages;
  static constexpr bool kFp8 = Cache::kBytes == 1;
  static constexpr int kAlignment = 1024;
  static constexpr int kQueryAt = 0;
  static constexpr int kKeyAt = kQueryAt + kQueryStages * kTileBytes;
  static constexpr int kValueAt = kKeyAt + kKeyStages * kTileBytes;
  static constexpr int kRawAt = kValueAt + kValueStages * kTileBytes;
  static constexpr int kQueryFullAt = kRawAt + kRawStages * kTileBytes;
  static constexpr int kQueryEmptyAt = kQueryFullAt + kQueryStages * 8;
  static constexpr int kKeyFullAt = kQueryEmptyAt + kQueryStages * 8;
  static constexpr int kKeyEmptyAt = kKeyFullAt + kKeyStages * 8;
  static constexpr int kValueFullAt = kKeyEmptyAt + kKeyStages * 8;
  static constexpr int kValueCheckedAt = kValueFullAt + kValueStages * 8;
  static constexpr int kValueEmptyAt = kValueCheckedAt + kValueStages * 8;
  static constexpr int kRawFullAt = kValueEmptyAt + kValueStages * 8;
  static constexpr int kRawEmptyAt = kRawFullAt + kRawStages * 8;
  static constexpr int kTaskFullAt = kRawEmptyAt + kRawStages * 8;
  static constexpr int kTaskEmptyAt = kTaskFullAt + kTaskSlots * 8;
  static constexpr int kLiveAt = kTaskEmptyAt + kTaskSlots * 8;
  static constexpr int kBadAt = (kLiveAt + kKeyStages * 4 + 15) / 16 * 16;
  static constexpr int kTaskAt = kBadAt + kValueStages * kCheckers * 16;
  static constexpr int kTaskBytes = 48;
  static constexpr int kQueryScaleAt = kTaskAt + kTaskSlots * kTaskBytes;
  static constexpr int kTokenScaleAt = kQueryScaleAt + (kFp8 ? kQueryStages * kTileRows * 4 : 0);
  static constexpr int kEnd = kTokenScaleAt + (kFp8 ? kKeyStages * kTileTokens * 4 : 0);
  static constexpr int kBytes = kEnd + kAlignment;
  static_assert(kBytes <= 227 * 1024);

  SharedAddress start;  // a multiple of kAlignment

  __device__ __forceinline__ SharedAddress query(int stage) const {
    return start + kQueryAt + stage * kTileBytes;
  }
  __device__ __forceinline__ SharedAddress key(int stage) const {
    return start + kKeyAt + stage * kTileBytes;
  }
  __device__ __forceinline__ SharedAddress value(int stage) const {
    return start + kValueAt + stage * kTileBytes;
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
  // Of tiles that hold a token hidden from some row, instead of value_full; of all tiles of an fp8
  // cache, which have been transposed then.
  __device__ __forceinline__ SharedAddress value_checked(int stage) const {
    return start + kValueCheckedAt + stage * 8;
  }
  __device__ __forceinline__ SharedAddress value_empty(int stage) const {
    return start + kValueEmptyAt + stage * 8;
  }
  // Values as they are in an fp8 cache.
  __device__ __forceinline__ SharedAddress raw(int stage) const {
    return start + kRawAt + stage * kTileBytes;
  }
  __device__ __forceinline__ SharedAddress raw_full(int stage) const {
    return start + kRawFullAt + stage * 8;
  }
  __device__ __forceinline__ SharedAddress raw_empty(int stage) const {
    return start + kRawEmptyAt + stage * 8;
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
  // By one lane, which then arrives: to racecheck, an arrival tells of its own lane's writes alone.
  __device__ __forceinline__ void write(int slot, const Task& t) const {
    const auto word = [](int x) { return static_cast<uint32_t>(x); };
    const RowTile& r = t.tile;
    const SharedAddress at = task(slot);
    store_shared_16(at, {word(r.sequence), word(r.first_q), word(r.first_head), word(r.rows)});
    store_shared_16(at + 16, {word(r.first_position), word(r.last_position), word(r.first_tile),
                              word(r.last_tile)});
    store_shared_4(at + 32, word(t.kv_head));
  }
  // float32, on an fp8 cache.
  __device__ __forceinline__ SharedAddress query_scale(int stage, int row) const {
    return start + kQueryScaleAt + (stage * kTileRows + row) * 4;
  }
  __device__ __forceinline__ SharedAddress token_scale(int stage, int token) const {
    return start + kTokenScaleAt + (stage * kTileTokens + token) * 4;
  }
};

// By one thread.
template <class Memory>
__device__ __forceinline__ void init_barriers(const Memory& shared) {
#pragma unroll
  for (int i = 0; i < kQueryStages; ++i) {
    init_barrier(shared.query_full(i), kWarpSize);
    init_barrier(shared.query_empty(i), kConsumerWarps);
  }
#pragma unroll
  for (int i = 0; i < Memory::kKeyStages; ++i) {
    init_barrier(shared.key_full(i), 1);
    init_barrier(shared.key_empty(i), kConsumerWarps);
  }
#pragma unroll
  for (int i = 0; i < Memory::kValueStages; ++i) {
    init_barrier(shared.value_full(i), 1);
    init_barrier(shared.value_checked(i), kCheckers);
    init_barrier(shared.value_empty(i), kConsumerWarps + (Memory::kFp8 ? 0 : kCheckers));
  }
#pragma unroll
  for (int i = 0; i < Memory::kRawStages; ++i) {
    init_barrier(shared.raw_full(i), 1);
    init_barrier(shared.raw_empty(i), kCheckers);
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
template <class Memory>
struct TaskReader {
  const Memory& shared;
  RingPlace<kTaskSlots> place;

  __device__ __forceinline__ Task next() {
    wait(shared.task_full(place.stage), place.parity);
    const Task task = read();
    finish();
    return task;
  }

  // Whether there is one.
  __device__ __forceinline__ bool wait_for_task() const {
    wait(shared.task_full(place.stage), place.parity);
    return load_shared_4(shared.task(place.stage) + offsetof(RowTile, rows)) != 0;
  }

  __device__ __forceinline__ Task read() const {
    const SharedAddress at = shared.task(place.stage);
    const uint4 a = load_shared_16(at);
    const uint4 b = load_shared_16(at + 16);
    const uint32_t c = load_shared_4(at + 32);
    const auto i = [](uint32_t x) { return static_cast<int>(x); };
    return {{i(a.x), i(a.y), i(a.z), i(a.w), i(b.x), i(b.y), i(b.z), i(b.w)}, i(c)};
  }

  __device__ __forceinline__ void finish() {
    release(shared.task_empty(place.stage));
    place.advance();
  }
};

}  // namespace jax_hpc::prefill_attention
