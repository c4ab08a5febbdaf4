// What the two grouped products share: a CTA's ring of stages in shared memory, its tasks, and the
// product of a stage.
//
// Weights are the 64 rows of the tensor cores' product, tokens its columns, so that few tokens
// waste little. One warp copies weights, one, or two of gate-up with tiles of 64 rows, the rows of
// tokens, and one, two or of bf16 four warpgroups multiply, each 64 weight rows of its own. With
// small tiles several CTAs share an SM, and while one ends a task, the others' copies are under
// way. A CTA's ring runs on across its tasks.
#pragma once

#include "common/launch.h"
#include "common/ptx.cuh"
#include "common/wgmma_fp8.cuh"
#include "fused_moe/config.h"
#include "fused_moe/few_pairs.cuh"
#include "fused_moe/instructions.cuh"
#include "fused_moe/narrow_product.cuh"
#include "fused_moe/stage.h"

namespace jax_hpc::fused_moe {

constexpr int kGroupWarps = kWarpgroup / kWarpSize;

// A stage of either product: 128 bytes of 64 weight rows, and of up to `Rows` rows of tokens.
constexpr int kStageValues = kStageRow;                // of e4m3; of bf16 there are half as many
constexpr int kWeightBytes = kWeightRows * kStageRow;  // of a warpgroup

// What the consumers need to know of a task comes with its first stage, a note by a thread that
// copies rows: its tile, and up to four scales. Loads of their own they would have to wait for
// before the next product, for ptxas lets none be under way then: that was a third to a half of
// their time in down.
constexpr int kNoteBytes = int{sizeof(Tile) + sizeof(float4)};

// Groups: warpgroups that multiply. Scales: floats that come with a stage. ExtraBytes: what the
// kernel needs beside the ring. Beside each stage there is room for a task's note.
template <int Groups, int CtasOfSm, int WeightBytes, int RowBytes, int Scales, int ExtraBytes>
struct StageShape {
  static constexpr int kGroups = Groups;
  static constexpr int kWeightWarp = Groups * kGroupWarps;
  static constexpr int kRowWarp = kWeightWarp + 1;
  static constexpr int kThreads = (kRowWarp + 1) * kWarpSize;
  static constexpr int kCtasOfSm = CtasOfSm;
  static constexpr int kRowsAt = WeightBytes;
  static constexpr int kStageBytes = WeightBytes + RowBytes;
  static constexpr int kScaleBytes = Scales * int{sizeof(float)};
  static constexpr int kAlignment = kGroupBytes;
  static constexpr int kBudget = 228 * 1024 / kCtasOfSm - 1024 - kAlignment - ExtraBytes;
  static constexpr int kFitting = kBudget / (kStageBytes + kScaleBytes + 16 + kNoteBytes);
  static constexpr int kStages = kFitting < 8 ? kFitting : 8;
  static constexpr int kScalesAt = kStages * kStageBytes;
  static constexpr int kBarriersAt = kScalesAt + kStages * kScaleBytes;
  static constexpr int kNotesAt = kBarriersAt + kStages * 16;
  static constexpr int kExtraAt = kNotesAt + kStages * kNoteBytes;
  static constexpr int kSharedBytes = kExtraAt + ExtraBytes + kAlignment;
  static_assert(kStageBytes % kAlignment == 0 && kScaleBytes % 16 == 0 && ExtraBytes % 16 == 0);
  static_assert(kStages >= 3);
};

// As many as registers allow; in blocks those of tiles of 64 rows do not suffice for three. 192
// experts of 192 columns, T = 1024, per tensor: gate-up 99 us with two, 88 with three: its 1152
// tasks are 4.4 rounds of 264 CTAs, and 2.9 of 396.
constexpr int ctas_of_sm(Format format, int tile_rows) {
  if (tile_rows > 64) return 1;
  return tile_rows == 64 && format == Format::kBlock ? 2 : 3;
}

template <Format format, int Rows, int TileRows, int Scales, int ExtraBytes>
struct SquareStageShape : StageShape<warpgroups_of(format, TileRows), ctas_of_sm(format, TileRows),
                                     warpgroups_of(format, TileRows) * kWeightBytes,
                                     Rows * kStageRow, Scales, ExtraBytes> {
  static constexpr Format kFormat = format;
  static constexpr bool kHasBlocks = format == Format::kBlock;
  static constexpr int kRows = Rows;
};

template <class Shape>
struct StageMemory {
  SharedAddress start;

  __device__ __forceinline__ SharedAddress weights(int stage) const {
    return start + stage * Shape::kStageBytes;
  }
  __device__ __forceinline__ SharedAddress rows(int stage) const {
    return weights(stage) + Shape::kRowsAt;
  }
  __device__ __forceinline__ SharedAddress scales(int stage) const {
    return start + Shape::kScalesAt + stage * Shape::kScaleBytes;
  }
  // Passed when a stage's copies are there, and when the consumers have read it.
  __device__ __forceinline__ SharedAddress full(int stage) const {
    return start + Shape::kBarriersAt + stage * 16;
  }
  __device__ __forceinline__ SharedAddress empty(int stage) const { return full(stage) + 8; }
  // Of a task whose first stage this is.
  __device__ __forceinline__ SharedAddress note(int stage) const {
    return start + Shape::kNotesAt + stage * kNoteBytes;
  }
  __device__ __forceinline__ SharedAddress extra() const { return start + Shape::kExtraAt; }
};

// The CTA's dynamic shared memory from its first multiple of 1024. By way of a shuffle, so that it
// stays in a register.
__device__ __forceinline__ SharedAddress stages_start(const uint8_t* dynamic) {
  const SharedAddress start = shared_address(dynamic);
  const uint32_t aligned = (start + kGroupBytes - 1) / kGroupBytes * kGroupBytes;
  return __shfl_sync(kWholeWarp, aligned, 0);
}

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

// By one thread. Unrolled: every turn of a loop would be fenced.
template <class Shape>
__device__ __forceinline__ void init_stages(const StageMemory<Shape>& memory,
                                            uint32_t arrivals_to_fill) {
#pragma unroll
  for (int i = 0; i < Shape::kStages; ++i) {
    init_barrier(memory.full(i), arrivals_to_fill);
    init_barrier(memory.empty(i), Shape::kGroups * kGroupWarps);
  }
}

// A CTA's tasks. They are numbered tile by tile, `parts` to a tile from `first_part` on, and a CTA
// takes every `ctas`-th.
class Tasks {
 public:
  // How many there are is not known yet.
  __device__ __forceinline__ explicit Tasks(int parts, int first_part = 0)
      : parts_(static_cast<unsigned>(parts)), first_part_(first_part), task_(blockIdx.x) {}
  // `few`, if not null, holds the index.
  __device__ __forceinline__ void read_count(const Index& index, const FewPairs* few) {
    const int tiles = few != nullptr ? few->num_tiles : load_int(index.header);
    count_ = static_cast<unsigned>(tiles) * parts_;  // the host sees to it that they fit
  }
  __device__ __forceinline__ bool has_next() const { return task_ < count_; }
  // Tile and part of the next task, if there were one.
  __device__ __forceinline__ void read(int& tile, int& part) const {
    const unsigned number = task_ / parts_;
    tile = static_cast<int>(number);
    part = first_part_ + static_cast<int>(task_ - number * parts_);
  }
  __device__ __forceinline__ void advance(unsigned tasks = 1) { task_ += tasks * gridDim.x; }

 private:
  unsigned parts_;
  int first_part_;
  unsigned task_;
  unsigned count_ = 0;
};

// The same with their tiles, of which the next one is read a task ahead.
class TaskWalk {
 public:
  __device__ __forceinline__ TaskWalk(const Index& index, const FewPairs* few, int parts)
      : tiles_(index.tiles), few_(few), tasks_(parts) {
    // Together with the number of tiles: the host starts no CTA whose first tile could not exist.
    read_next();
    tasks_.read_count(index, few);
  }
  // The next task, false when there is none.
  __device__ __forceinline__ bool next(Tile& tile, int& part) {
    if (!tasks_.has_next()) return false;
    tile = next_tile_;
    part = next_part_;
    tasks_.advance();
    if (tasks_.has_next()) read_next();
    return true;
  }
  // Of the task after the one that next() gave last; before that, of the first.
  __device__ __forceinline__ bool has_next() const { return tasks_.has_next(); }
  __device__ __forceinline__ const Tile& next_tile() const { return next_tile_; }

 private:
  __device__ __forceinline__ void read_next() {
    int number;
    tasks_.read(number, next_part_);
    next_tile_ = few_ != nullptr ? few_->tiles[number] : load_tile(tiles_ + number);
    next_tile_.number = number;
  }

  const Tile* tiles_;
  const FewPairs* few_;
  Tasks tasks_;
  Tile next_tile_{};
  int next_part_ = 0;
};

struct NoFactor {
  __device__ __forceinline__ float operator()(int) const { return 1.0f; }
};

// The same for tasks that are over in less time than a read takes: the first tile is read as above,
// and then a warp reads the tiles of its next 32 tasks at once, one a lane, and what Factor gives
// for their experts. By the whole warp.
template <class Factor = NoFactor>
class TaskBatch {
 public:
  __device__ __forceinline__ TaskBatch(const Index& index, const Tasks& tasks,
                                       const Factor& factor_of = {})
      : tiles_(index.tiles), factor_of_(factor_of), tasks_(tasks) {
    int number;
    int part;
    tasks_.read(number, part);
    first_ = load_tile(tiles_ + number);
    tasks_.read_count(index, nullptr);
    // Without a task the tile is whatever memory held.
    first_factor_ = factor_of_(tasks_.has_next() ? first_.expert : 0);
    read_tiles(1);
  }
  __device__ __forceinline__ bool next(Tile& tile, int& part, float& factor) {
    if (!tasks_.has_next()) return false;
    if (is_first_) {
      is_first_ = false;
      tile = first_;
      factor = first_factor_;
    } else {
      if (given_ == kWarpSize) read_tiles(0);
      if (given_ == 0) own_factor_ = factor_of_(own_.expert);
      tile.expert = __shfl_sync(kWholeWarp, own_.expert, given_);
      tile.first_row = __shfl_sync(kWholeWarp, own_.first_row, given_);
      tile.rows = __shfl_sync(kWholeWarp, own_.rows, given_);
      factor = __shfl_sync(kWholeWarp, own_factor_, given_);
      ++given_;
    }
    tasks_.read(tile.number, part);
    tasks_.advance();
    return true;
  }
  __device__ __forceinline__ bool next(Tile& tile, int& part) {
    float factor;
    return next(tile, part, factor);
  }

 private:
  // From `ahead` tasks behind the next one.
  __device__ __forceinline__ void read_tiles(unsigned ahead) {
    given_ = 0;
    Tasks own = tasks_;
    own.advance(ahead + threadIdx.x % kWarpSize);
    if (!own.has_next()) return;
    int number;
    int part;
    own.read(number, part);
    own_ = load_tile(tiles_ + number);
  }

  const Tile* tiles_;
  Factor factor_of_;
  Tasks tasks_;
  Tile first_{};
  float first_factor_ = 1.0f;
  bool is_first_ = true;
  Tile own_{};
  float own_factor_ = 1.0f;
  int given_ = 0;  // of the lanes'
};

// By a warp of which one thread copies to the stage: a lane that looked after the consumers'
// release would wait for the stage's next use.
template <class Shape>
__device__ __forceinline__ void wait_for_room(const StageMemory<Shape>& memory,
                                              const RingPlace<Shape::kStages>& place) {
  wait(memory.empty(place.stage), place.parity ^ 1);
  __syncwarp();
}

// sums = weights times rows of a stage, and waits for it. A fresh sum for each stage, since the
// tensor cores keep 14 bits of it: the caller adds stages up in float32.
template <int Rows, int Steps = 4>
__device__ __forceinline__ void multiply(SharedAddress weights, SharedAddress rows,
                                         float (&sums)[Rows / 2]) {
  const uint32_t a = swizzled_tile(weights);
  const uint32_t b = swizzled_tile(rows);
#pragma unroll
  for (int k = 0; k < Steps; ++k) {  // 32 values each, two units of a descriptor
    WgmmaE4m3<Rows>::multiply(sums, descriptor(a + 2 * k), descriptor(b + 2 * k), k > 0);
  }
}

template <int Count>
__device__ __forceinline__ void hold_all(float (&values)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) hold(values[i]);
}

// sums += weights times rows of a stage of bf16, and waits for it. The sums stay in the tensor
// cores: of bf16 they keep 24 bits, and what comes of them is rounded to 8.
template <int Rows>
__device__ __forceinline__ void accumulate(SharedAddress weights, SharedAddress rows,
                                           float (&sums)[Rows / 2]) {
  constexpr int kSteps = 4;  // 16 values each
  const uint32_t a = swizzled_tile(weights);
  const uint32_t b = swizzled_tile(rows);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    Wgmma<Rows>::multiply(sums, descriptor(a + 2 * k), descriptor(b + 2 * k), true);
  }
  wgmma_commit();
  wgmma_wait<0>();
  hold_all(sums);
}

// Tells that this warp, all of it, is done with a stage.
template <class Shape>
__device__ __forceinline__ void release(const StageMemory<Shape>& memory, int stage, int lane) {
  __syncwarp();
  if (lane == 0) arrive(memory.empty(stage));
}

// A consumer's thread holds, of each 8 tokens, two products of weight row 16 * warp + lane / 4 and
// two of the row eight below: of tokens 2 * (lane % 4) and the next.
struct Fragment {
  int group;  // warpgroup
  int warp;   // of it
  int lane;
  int row;     // lane / 4
  int token0;  // 2 * (lane % 4)
  __device__ __forceinline__ Fragment(int thread, int groups)
      : group(groups == 1 ? 0 : thread / kWarpgroup),
        warp(thread / kWarpSize - group * kGroupWarps),
        lane(thread % kWarpSize),
        row(lane / 4),
        token0(lane % 4 * 2) {}
};

}  // namespace jax_hpc::fused_moe
