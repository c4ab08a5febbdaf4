// From gate-up's sums to the intermediate: SiLU(gate) * up, requantised, or rounded to bf16.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "common/fp8.cuh"
#include "fused_moe/gate_up_shape.cuh"
#include "fused_moe/scales.cuh"

namespace jax_hpc::fused_moe {

__device__ __forceinline__ float silu_times(float gate, float up) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// Writes a column of the intermediate of two tokens of a tile, times `factor` each.
__device__ __forceinline__ void write_column(const Problem& p, const RowBuffers& rows,
                                             const Tile& tile, int token, int column, float2 act,
                                             float2 factor) {
  const uint32_t pair = pack_fp8(act.x * factor.x, act.y * factor.y, 0.0f, 0.0f, 1.0f);
  auto* to = static_cast<uint8_t*>(rows.act) +
             static_cast<int64_t>(tile.first_row + token) * p.inter + column;
  if (token < tile.rows) to[0] = static_cast<uint8_t>(pair);
  if (token + 1 < tile.rows) to[p.inter] = static_cast<uint8_t>(pair >> 8);
}

// The same of bf16, of eight columns and eight tokens, two neighbouring columns at once.
__device__ __forceinline__ void write_columns(const Problem& p, const RowBuffers& rows,
                                              const Tile& tile, int token0, int column0,
                                              const Fragment& f, float2 act) {
  const uint32_t columns = transpose(pack_bf16(act.x, act.y));
  const int token = token0 + f.row;
  if (token >= tile.rows) return;
  auto* to = static_cast<__nv_bfloat16*>(rows.act) +
             static_cast<int64_t>(tile.first_row + token) * p.inter + column0 + f.token0;
  *reinterpret_cast<uint32_t*>(to) = columns;
}

// Static scales of a tile's expert.
struct TensorScales {
  float gate;
  float up;
  float act_reciprocal;

  __device__ __forceinline__ TensorScales(float gate_scale, float up_scale, float act_scale,
                                          float input_scale)
      : gate(input_scale * gate_scale),
        up(input_scale * up_scale),
        act_reciprocal(1.0f / act_scale) {}
  __device__ __forceinline__ TensorScales(const Weights& weights, int expert)
      : TensorScales(__ldcg(weights.gate_scale + expert), __ldcg(weights.up_scale + expert),
                     act_scale_of(weights, expert), __ldcg(weights.input_scale)) {}
};

// Those of bf16.
struct NoScales {
  static constexpr float gate = 1.0f;
  static constexpr float up = 1.0f;
};

template <class Shape>
using Scales = std::conditional_t<Shape::kFormat == Format::kBf16, NoScales, TensorScales>;

// Those of a task's note (copy_gate_up_note()).
template <class Shape>
__device__ __forceinline__ Scales<Shape> read_scales(const StageMemory<Shape>& memory, int stage) {
  if constexpr (Shape::kFormat == Format::kBf16) {
    return {};
  } else {
    const float4 scales = load_shared(memory.note(stage) + int{sizeof(Tile)});
    return {scales.x, scales.y, scales.z, scales.w};
  }
}

// Of eight columns and eight tokens, of which the thread's products are a fragment's.
template <class Shape>
__device__ __forceinline__ void write_act(const Problem& p, const RowBuffers& rows,
                                          const Tile& tile, const Scales<Shape>& scales, int token0,
                                          int column0, const Fragment& f, float4 products) {
  const float2 act = {silu_times(products.x * scales.gate, products.z * scales.up),
                      silu_times(products.y * scales.gate, products.w * scales.up)};
  if constexpr (Shape::kFormat == Format::kBf16) {
    write_columns(p, rows, tile, token0, column0, f, act);
  } else {
    write_column(p, rows, tile, token0 + f.token0, column0 + f.row, act,
                 {scales.act_reciprocal, scales.act_reciprocal});
  }
}

template <class Shape>
__device__ __forceinline__ void write_tile(const Problem& p, const RowBuffers& rows,
                                           const Tile& tile, const Scales<Shape>& scales,
                                           int column0, const Fragment& f,
                                           const float (&totals)[Shape::kRows / 2]) {
  const int first = column0 + f.warp * kGroupRows;
  if (first + f.row >= p.inter) return;  // all of the warp: columns are a multiple of 16
#pragma unroll
  for (int j = 0; j < Shape::kRows / 8; ++j) {
    write_act<Shape>(p, rows, tile, scales, 8 * j, first, f,
                     {totals[4 * j], totals[4 * j + 1], totals[4 * j + 2], totals[4 * j + 3]});
  }
}

// With four pieces a warp's own totals are those of its piece's tokens; the first warp adds them up
// in the order of the pieces. `turn` alternates two places for them.
template <class Shape>
__device__ __forceinline__ void write_pieces(const StageMemory<Shape>& memory, const Problem& p,
                                             const RowBuffers& rows, const Tile& tile,
                                             const Scales<Shape>& scales, int column0,
                                             const Fragment& f, int turn,
                                             const float (&totals)[Shape::kRows / 2]) {
  float4 own{};
#pragma unroll
  for (int i = 0; i < Shape::kPieces; ++i) {
    if (f.warp == i) own = {totals[4 * i], totals[4 * i + 1], totals[4 * i + 2], totals[4 * i + 3]};
  }
  constexpr int kVector = int{sizeof(float4)};
  const SharedAddress place =
      memory.extra() + Shape::kExchangeAt + (turn * kWarpgroup + f.lane) * kVector;
  store_shared(place + f.warp * kWarpSize * kVector, own);
  sync_threads<kWarpgroup>(1);
  if (f.warp > 0) return;
  float4 sum = own;
#pragma unroll
  for (int i = 1; i < Shape::kPieces; ++i) {
    const float4 part = load_shared(place + i * kWarpSize * kVector);
    sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
  }
  if (column0 + f.row >= p.inter) return;
  write_act<Shape>(p, rows, tile, scales, 0, column0, f, sum);
}

// Dynamic scales: a task leaves its columns in float32, and the last of the tasks that share scales
// finds these and quantises the columns of all. No task waits for another.
template <class Shape>
__device__ __forceinline__ void leave_unscaled(const Problem& p, const RowBuffers& rows,
                                               const Tile& tile, int column0, const Fragment& f,
                                               const float (&totals)[Shape::kRows / 2]) {
  const int column = column0 + f.warp * kGroupRows + f.row;
  if (column >= p.inter) return;
  float* to = static_cast<float*>(rows.outputs) +
              static_cast<int64_t>(tile.first_row + f.token0) * p.inter + column;
#pragma unroll
  for (int j = 0; j < Shape::kRows / 8; ++j) {
    const int token = 8 * j + f.token0;
    float* at = to + static_cast<int64_t>(8 * j) * p.inter;
    if (token < tile.rows) at[0] = silu_times(totals[4 * j], totals[4 * j + 2]);
    if (token + 1 < tile.rows) at[p.inter] = silu_times(totals[4 * j + 1], totals[4 * j + 3]);
  }
}

// True in all consumers if no other task of the group is missing.
template <class Shape>
__device__ __forceinline__ bool is_last_of_group(const StageMemory<Shape>& memory, const Problem& p,
                                                 const RowBuffers& rows, const Tile& tile,
                                                 int group) {
  const SharedAddress place = memory.extra() + Shape::kExchangeAt;
  sync_threads<Shape::kGroups * kWarpgroup>(1);
  if (threadIdx.x == 0) {
    const int parts =
        min(Shape::kScaleParts, ceil_div(p.inter, Shape::kColumns) - group * Shape::kScaleParts);
    const unsigned before = count_arrival(
        rows.arrivals + static_cast<int64_t>(tile.number) * ceil_div(p.inter, kBlock) + group);
    store_shared_word(place, before + 1 == static_cast<unsigned>(parts) ? 1 : 0);
  }
  sync_threads<Shape::kGroups * kWarpgroup>(1);
  return load_shared_word(place) != 0;
}

// A warp takes every fourth or eighth row, of which a lane has four columns.
template <class Shape>
__device__ __forceinline__ void quantize_group(const Problem& p, const RowBuffers& rows,
                                               const Tile& tile, int group, const Fragment& f) {
  constexpr int kWarps = Shape::kGroups * kGroupWarps;
  constexpr int kAtOnce = 4;  // rows whose reads are under way
  const int column = group * kBlock + f.lane * 4;
  const bool has_columns = column < p.inter;
  const int groups = ceil_div(p.inter, kBlock);
  const auto* from = static_cast<const float*>(rows.outputs) + column;
  auto* to = static_cast<uint8_t*>(rows.act) + column;
#pragma unroll 1
  for (int first = f.group * kGroupWarps + f.warp; first < tile.rows; first += kAtOnce * kWarps) {
    float4 act[kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t row = tile.first_row + first + i * kWarps;
      if (has_columns && first + i * kWarps < tile.rows) act[i] = load_float4(from + row * p.inter);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t row = tile.first_row + first + i * kWarps;
      float most = larger_magnitude(larger_magnitude(act[i].x, act[i].y),
                                    larger_magnitude(act[i].z, act[i].w));
#pragma unroll
      for (int distance = 1; distance < kWarpSize; distance *= 2) {
        most = larger_magnitude(most, __shfl_xor_sync(kWholeWarp, most, distance));
      }
      if (first + i * kWarps >= tile.rows) continue;
      const float scale = scale_of_largest(most);
      if (f.lane == 0) rows.act_scale[row * groups + group] = scale;
      if (!has_columns) continue;
      *reinterpret_cast<uint32_t*>(to + row * p.inter) =
          pack_fp8(act[i].x, act[i].y, act[i].z, act[i].w, 1.0f / scale);
    }
  }
}

}  // namespace jax_hpc::fused_moe
