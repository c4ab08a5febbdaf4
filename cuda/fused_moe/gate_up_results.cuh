// From gate-up's sums to the intermediate: SiLU(gate) * up, requantised.
#pragma once

#include "common/fp8.cuh"
#include "fused_moe/gate_up_shape.cuh"

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

// Static scales of a tile's expert.
struct TensorScales {
  float gate;
  float up;
  float act_reciprocal;

  __device__ __forceinline__ TensorScales(const Weights& weights, int expert)
      : gate(*weights.input_scale * weights.gate_scale[expert]),
        up(*weights.input_scale * weights.up_scale[expert]),
        act_reciprocal(1.0f / weights.act_scale[expert]) {}
};

template <class Shape>
__device__ __forceinline__ void write_tensor(const Problem& p, const RowBuffers& rows,
                                             const Tile& tile, const TensorScales& scales,
                                             int column0, const Fragment& f,
                                             const float (&totals)[Shape::kRows / 2]) {
  const int column = column0 + f.warp * kGroupRows + f.row;
  if (column >= p.inter) return;
#pragma unroll
  for (int j = 0; j < Shape::kRows / 8; ++j) {
    const float2 act = {silu_times(totals[4 * j] * scales.gate, totals[4 * j + 2] * scales.up),
                        silu_times(totals[4 * j + 1] * scales.gate, totals[4 * j + 3] * scales.up)};
    write_column(p, rows, tile, 8 * j + f.token0, column, act,
                 {scales.act_reciprocal, scales.act_reciprocal});
  }
}

// With four pieces a warp's own totals are those of its piece's tokens; the first warp adds them up
// in the order of the pieces. `turn` alternates two places for them.
template <class Shape>
__device__ __forceinline__ void write_pieces(const StageMemory<Shape>& memory, const Problem& p,
                                             const RowBuffers& rows, const Tile& tile,
                                             const TensorScales& scales, int column0,
                                             const Fragment& f, int turn,
                                             const float (&totals)[Shape::kRows / 2]) {
  float4 own{};
#pragma unroll
  for (int i = 0; i < Shape::kPieces; ++i) {
    if (f.warp == i) own = {totals[4 * i], totals[4 * i + 1], totals[4 * i + 2], totals[4 * i + 3]};
  }
  constexpr int kVector = int{sizeof(float4)};
  const SharedAddress place =
      memory.extra() + Shape::kExchangeAt + (turn * kConsumers + f.lane) * kVector;
  store_shared(place + f.warp * kWarpSize * kVector, own);
  sync_threads<kConsumers>(1);
  if (f.warp > 0) return;
  float4 sum = own;
#pragma unroll
  for (int i = 1; i < Shape::kPieces; ++i) {
    const float4 part = load_shared(place + i * kWarpSize * kVector);
    sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
  }
  const int column = column0 + f.row;
  if (column >= p.inter) return;
  write_column(p, rows, tile, f.token0, column,
               {silu_times(sum.x * scales.gate, sum.z * scales.up),
                silu_times(sum.y * scales.gate, sum.w * scales.up)},
               {scales.act_reciprocal, scales.act_reciprocal});
}

// Dynamic scales: every warp sends its tokens' largest magnitudes to the four CTAs whose columns
// share a scale, which find the same scale from them. Two places alternate between tasks: a CTA
// sends those of the next task but one only after it has those of the next from all others, which
// have read the last ones by then.
template <class Shape>
__device__ __forceinline__ void write_block(const StageMemory<Shape>& memory, const Problem& p,
                                            const RowBuffers& rows, const Tile& tile, int part,
                                            int member, const Fragment& f, int task,
                                            float (&totals)[Shape::kRows / 2]) {
  constexpr int kFloat = int{sizeof(float)};
  const int place = task % 2;
  const SharedAddress barrier = memory.extra() + Shape::kExchangeAt + place * 8;
  const SharedAddress magnitudes =
      memory.extra() + Shape::kMagnitudesAt + place * Shape::kMagnitudeBytes;
  if (f.warp == 0 && f.lane == 0) arrive_expecting(barrier, Shape::kMagnitudeBytes);
  // Lanes of rows 0 to 3 send to one CTA each.
  const auto peer = static_cast<uint32_t>(f.row % kScaleTeam);
  const int sender = member * (kConsumers / kWarpSize) + f.warp;
  const SharedAddress to =
      address_in_cluster(magnitudes + (sender * Shape::kTileRows + f.token0) * kFloat, peer);
  const SharedAddress barrier_there = address_in_cluster(barrier, peer);
#pragma unroll
  for (int j = 0; j < Shape::kRows / 8; ++j) {
    totals[4 * j] = silu_times(totals[4 * j], totals[4 * j + 2]);
    totals[4 * j + 1] = silu_times(totals[4 * j + 1], totals[4 * j + 3]);
    float2 most = {fabsf(totals[4 * j]), fabsf(totals[4 * j + 1])};
#pragma unroll
    for (int distance = 4; distance < kWarpSize; distance *= 2) {
      most.x = larger_magnitude(most.x, __shfl_xor_sync(0xffffffff, most.x, distance));
      most.y = larger_magnitude(most.y, __shfl_xor_sync(0xffffffff, most.y, distance));
    }
    if (f.row < kScaleTeam) send(to + 8 * j * kFloat, most, barrier_there);
  }
  wait_for_cluster(barrier, static_cast<uint32_t>(task / 2 % 2));
  const int column = (part * kScaleTeam + member) * Shape::kColumns + f.warp * kGroupRows + f.row;
  const int groups = ceil_div(p.inter, kBlock);
#pragma unroll
  for (int j = 0; j < Shape::kRows / 8; ++j) {
    float2 most = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kSenders; ++i) {
      const float2 one =
          load_shared_pair(magnitudes + (i * Shape::kTileRows + 8 * j + f.token0) * kFloat);
      most = {larger_magnitude(most.x, one.x), larger_magnitude(most.y, one.y)};
    }
    const float2 scale = {scale_of_largest(most.x), scale_of_largest(most.y)};
    const int token = 8 * j + f.token0;
    if (member == 0 && f.warp == 0 && f.row == 0) {
      float* out = rows.act_scale + static_cast<int64_t>(tile.first_row + token) * groups + part;
      if (token < tile.rows) out[0] = scale.x;
      if (token + 1 < tile.rows) out[groups] = scale.y;
    }
    if (column < p.inter) {
      write_column(p, rows, tile, token, column, {totals[4 * j], totals[4 * j + 1]},
                   {1.0f / scale.x, 1.0f / scale.y});
    }
  }
  // Nobody of this CTA sends for the next task but one before all of it have read.
  sync_threads<kConsumers>(1);
}

}  // namespace jax_hpc::fused_moe
