// The warp that brings the queries of the next task while this one is under way.
#pragma once

#include "prefill_attention/shared.cuh"

namespace jax_hpc::prefill_attention {

template <class Cache, int D>
class QueryWarp {
  using Memory = Shared<Cache, D>;
  using TileOf = Tile<Cache, D>;
  static constexpr int kVectors = TileOf::kVectors;

 public:
  __device__ QueryWarp(const Arguments& a, const CUtensorMap* map, const Memory& shared)
      : a_(a), map_(map), shared_(shared), lane_(threadIdx.x % kWarpSize) {}

  __device__ __forceinline__ void run() {
    TaskReader<Memory> reader{shared_, {}};
    for (;;) {
      const Task task = reader.next();
      if (task.tile.rows == 0) return;
      wait(shared_.query_empty(place_.stage), place_.parity ^ 1);
      if (Memory::kFp8 && a_.problem.fp8_query) copy_scales(task);
      if (a_.query_boxes) {
        send(task);
      } else {
        if (!Memory::kFp8 || a_.problem.fp8_query) {
          copy(task);
        } else {
          quantize(task);
        }
        fence_shared_writes();
        arrive(shared_.query_full(place_.stage));
      }
      place_.advance();
    }
  }

 private:
  // Index of a row of the task in [T, Hq]; of its first row for one that does not exist.
  __device__ __forceinline__ int64_t index_of(const Task& task, int row) const {
    const Problem& p = a_.problem;
    const int head_row = task.tile.first_head + (row < task.tile.rows ? row : 0);
    const int token = token_of(a_, head_row);
    const int head = task.kv_head * p.group + head_row - token * p.group;
    return (int64_t{task.tile.first_q} + token) * p.q_heads() + head;
  }

  __device__ __forceinline__ void send(const Task& task) const {
    const SharedAddress full = shared_.query_full(place_.stage);
    if (lane_ < TileOf::kColumns) {
      arrive_expecting(full, TileOf::kColumnBytes);
      copy_tile(shared_.query(place_.stage) + lane_ * TileOf::kColumnBytes, map_, full, 0, 0, lane_,
                task.kv_head, task.tile.first_q);
    } else {
      arrive(full);
    }
  }

  __device__ __forceinline__ void copy_scales(const Task& task) const {
    for (int row = lane_; row < kTileRows; row += kWarpSize) {
      store_scale(row, a_.q_scale[index_of(task, row)]);
    }
  }

  __device__ __forceinline__ void copy(const Task& task) const {
    const SharedAddress to = shared_.query(place_.stage);
    const int vector = lane_ % kVectors;
#pragma unroll 4
    for (int row = lane_ / kVectors; row < kTileRows; row += kWarpSize / kVectors) {
      const uint8_t* const from =
          static_cast<const uint8_t*>(a_.q) + index_of(task, row) * TileOf::kTokenBytes;
      copy_16(to + TileOf::offset(row, vector), from + vector * 16, row < task.tile.rows);
    }
    commit_copies();
    wait_copies<0>();
  }

  __device__ __forceinline__ void store_scale(int row, float scale) const {
    store_shared_4(shared_.query_scale(place_.stage, row), __float_as_uint(scale));
  }

  // bf16 queries of an fp8 cache become e4m3 as jax_hpc.fp8 does it, bit for bit. Four lanes share
  // a row, each a quarter of its dimensions.
  __device__ __forceinline__ void quantize(const Task& task) const {
    constexpr int kPairs = D / 8;  // of a lane
    constexpr int kBytes = D / 4;
    const int quarter = lane_ % 4;
#pragma unroll 1
    for (int row = lane_ / 4; row < kTileRows; row += kWarpSize / 4) {
      const uint4* const from = reinterpret_cast<const uint4*>(
          static_cast<const uint8_t*>(a_.q) + (index_of(task, row) * D + quarter * kBytes) * 2);
      uint32_t pairs[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs / 4; ++i) {
        const uint4 four = from[i];
        pairs[4 * i] = four.x;
        pairs[4 * i + 1] = four.y;
        pairs[4 * i + 2] = four.z;
        pairs[4 * i + 3] = four.w;
      }
      const float scale = scale_of(pairs);
      const float reciprocal = __fdiv_rn(1.0f, scale);
#pragma unroll
      for (int i = 0; i < kPairs / 8; ++i) {
        uint32_t words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const uint32_t* const at = pairs + 8 * i + 2 * w;
          words[w] = pack_e4m3(low(at[0]) * reciprocal, high(at[0]) * reciprocal,
                               low(at[1]) * reciprocal, high(at[1]) * reciprocal);
        }
        store_shared_16(
            shared_.query(place_.stage) + TileOf::offset(row, quarter * (kBytes / 16) + i),
            uint4{words[0], words[1], words[2], words[3]});
      }
      // A NaN is in the row itself already, and hidden keys must stay hidden from it.
      if (quarter == 0) store_scale(row, scale != scale ? 1.0f : scale);
    }
  }

  __device__ __forceinline__ static float low(uint32_t pair) { return __uint_as_float(pair << 16); }
  __device__ __forceinline__ static float high(uint32_t pair) {
    return __uint_as_float(pair & 0xffff0000u);
  }

  template <int Pairs>
  __device__ __forceinline__ static float scale_of(const uint32_t (&pairs)[Pairs]) {
    float largest = 0;
    bool is_nan = false;
#pragma unroll
    for (int i = 0; i < Pairs; ++i) {
      const float x = low(pairs[i]);
      const float y = high(pairs[i]);
      largest = fmaxf(largest, fmaxf(fabsf(x), fabsf(y)));
      is_nan = is_nan || x != x || y != y;
    }
    if (is_nan) largest = NAN;
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const float other = __shfl_xor_sync(~0u, largest, step);
      largest = largest != largest || other != other ? NAN : fmaxf(largest, other);
    }
    constexpr float kSmallestScale = 0x1p-126f;
    const float scale = largest * (1.0f / 448.0f);
    return scale < kSmallestScale ? 1.0f : scale;
  }

  const Arguments& a_;
  const CUtensorMap* map_;
  const Memory& shared_;
  int lane_;
  RingPlace<kQueryStages> place_;
};

}  // namespace jax_hpc::prefill_attention
