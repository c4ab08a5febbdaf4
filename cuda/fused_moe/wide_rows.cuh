// What the wide products of block-scaled experts share: tokens are the rows of the tensor cores'
// product, and 128 weight rows its columns.
//
// A thread's sums are those of two tokens, so that it needs two scales of a stage, or two pairs.
// With the weights as rows it needed all of its 48 tokens', and reading those from shared memory
// took as long as a stage's products: a load of 16 bytes occupies it for four cycles, of 8 for two,
// however many lanes read the same.
#pragma once

#include "fused_moe/wide.cuh"

namespace jax_hpc::fused_moe {

constexpr int kRowGroups = 3;  // warpgroups that multiply, 64 tokens each
constexpr int kRowConsumers = kRowGroups * kWarpgroup;
constexpr int kRowConsumerWarps = kRowConsumers / kWarpSize;
constexpr int kRowThreads = kRowConsumers + kWarpgroup;
constexpr int kRowWeightWarp = kRowConsumerWarps;
constexpr int kRowRowWarp = kRowWeightWarp + 1;
constexpr int kRowScaleWarp = kRowRowWarp + 1;  // and the next
constexpr int kScaleWarps = 2;
constexpr int kScaleArrivals = kScaleWarps * kWarpSize;  // of a stage
constexpr int kRowConsumerRegisters = 160;
constexpr int kRowProducerRegisters = 32;
constexpr int kRowsOfGroup = 64;
constexpr int kRowsOfWarp = 16;
constexpr int kRowSums = kWideWeightRows / 2;  // of a thread
static_assert(kRowGroups * kRowsOfGroup == kWideMostRows);

// A warp turns its results over in shared memory of its own, 64 bytes of a token at a time; padded,
// so that what it writes or reads at once lies in different banks.
constexpr int kRowStagedToken = 64;
constexpr int kRowStagedStride = kRowStagedToken + 16;
constexpr int kRowStagedWarp = kRowsOfWarp * kRowStagedStride;
constexpr int kRowStagedBytes = kRowConsumerWarps * kRowStagedWarp;

// Scales of a task's tokens and weights, multiplied beforehand: Count products of a token, with as
// many weights. By two warps, whose lanes have three tokens each; those of the next turn are read
// before there is room for them.
template <int Count>
class TaskScales {
 public:
  __device__ __forceinline__ TaskScales(const WideMemory& memory, int warp, int lane)
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
  static constexpr int kStride = kScaleWarps * kWarpSize;
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

// A consumer's thread holds, of each eight columns, two products of a token and two of the token
// eight below, in columns 2 * (lane % 4) and the next.
struct RowFragment {
  int group;  // warpgroup
  int warp;   // of all consumers
  int lane;
  int token;    // of the tile
  int column0;  // 2 * (lane % 4)
  __device__ __forceinline__ explicit RowFragment(int thread)
      : group(thread / kWarpgroup),
        warp(thread / kWarpSize),
        lane(thread % kWarpSize),
        token(warp * kRowsOfWarp + lane / 4),
        column0(lane % 4 * 2) {}
};

// Scales of a stage: of one column's kind or, of gate-up, of two, eight columns each in turn.
template <int Count>
struct RowScales {
  float of[2][Count];  // of two tokens

  __device__ __forceinline__ RowScales(SharedAddress scales, int token) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const SharedAddress from = scales + (token + 8 * i) * Count * int{sizeof(float)};
      if constexpr (Count == 2) {
        const float2 pair = load_shared_pair(from);
        of[i][0] = pair.x;
        of[i][1] = pair.y;
      } else {
        of[i][0] = __uint_as_float(load_shared_word(from));
      }
    }
  }
};

// A task's products. A warpgroup without tokens frees the stages alone.
template <int Count>
__device__ __forceinline__ void multiply_rows(const WideMemory& memory, int turns, bool has_tokens,
                                              const RowFragment& f, WidePlace& place,
                                              float (&totals)[kRowSums]) {
#pragma unroll
  for (int i = 0; i < kRowSums; ++i) totals[i] = 0;
  if (!has_tokens) {
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn, place.advance(memory.layout.stages)) {
      wait(memory.full(place.stage), place.parity);
      memory.release(place.stage, f.lane);
    }
    return;
  }
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn, place.advance(memory.layout.stages)) {
    wait(memory.full(place.stage), place.parity);
    float sums[kRowSums];
    wgmma_fence();
    multiply<kWideWeightRows>(memory.rows(place.stage) + f.group * kRowsOfGroup * kStageRow,
                              memory.weights(place.stage), sums);
    wgmma_commit();
    const RowScales<Count> scales(memory.scales(place.stage), f.token);
    wgmma_wait<0>();
    hold_all(sums);
    memory.release(place.stage, f.lane);
#pragma unroll
    for (int i = 0; i < kRowSums; ++i) totals[i] += sums[i] * scales.of[i / 2 % 2][i / 4 % Count];
  }
}

// Writes what a warp has gathered, 64 bytes of each of its tokens: `to` is the first one's, tokens
// lie `stride` bytes apart, and 16 bytes at `within` exist where exists(within) says.
template <class Exists>
__device__ __forceinline__ void write_staged(SharedAddress staged, const RowFragment& f, int tokens,
                                             uint8_t* to, int64_t stride, const Exists& exists) {
  constexpr int kUnit = 16;
  constexpr int kUnits = kRowStagedToken / kUnit;
  constexpr int kTokensAtOnce = kWarpSize / kUnits;
  const int within = f.lane % kUnits * kUnit;
  if (!exists(within)) return;
#pragma unroll
  for (int i = 0; i < kRowsOfWarp; i += kTokensAtOnce) {
    const int token = i + f.lane / kUnits;
    if (token >= tokens) continue;
    *reinterpret_cast<uint4*>(to + token * stride + within) =
        load_shared_words(staged + token * kRowStagedStride + within);
  }
}

}  // namespace jax_hpc::fused_moe
