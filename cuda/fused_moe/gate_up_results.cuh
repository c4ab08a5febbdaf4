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
        act_reciprocal(1.0f / weights.act_scale_of(expert)) {}
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
// share a scale, which find the same scale from them. Nobody waits for the others' at once: the
// products of the next task come first.
template <class Shape>
struct Unscaled {
  float act[Shape::kRows / 4];  // of each 8 tokens two, Fragment::token0 and the next
  Tile tile;
  int part;
  int task;
};

// Two places alternate between tasks: a warp sends the magnitudes of the next task but one only
// after it has those of the next from all warps, which have read the last ones by then.
template <class Shape>
__device__ __forceinline__ SharedAddress exchange_barrier(const StageMemory<Shape>& memory,
                                                          int task) {
  return memory.extra() + Shape::kExchangeAt + task % 2 * 8;
}
template <class Shape>
__device__ __forceinline__ SharedAddress magnitudes(const StageMemory<Shape>& memory, int task) {
  return memory.extra() + Shape::kMagnitudesAt + task % 2 * Shape::kMagnitudeBytes;
}

template <class Shape>
__device__ __forceinline__ void send_magnitudes(const StageMemory<Shape>& memory, const Fragment& f,
                                                int member, const float (&totals)[Shape::kRows / 2],
                                                Unscaled<Shape>& unscaled) {
  constexpr int kFloat = int{sizeof(float)};
  const SharedAddress barrier = exchange_barrier(memory, unscaled.task);
  if (f.warp == 0 && f.lane == 0) arrive_expecting(barrier, Shape::kMagnitudeBytes);
  __syncwarp();  // all its lanes have read the last ones
  // Lanes of rows 0 to 3 send to one CTA each.
  const auto peer = static_cast<uint32_t>(f.row % kScaleTeam);
  const int sender = member * (kConsumers / kWarpSize) + f.warp;
  const SharedAddress to = address_in_cluster(
      magnitudes(memory, unscaled.task) + (sender * Shape::kTileRows + f.token0) * kFloat, peer);
  const SharedAddress barrier_there = address_in_cluster(barrier, peer);
#pragma unroll
  for (int j = 0; j < Shape::kRows / 8; ++j) {
    const float2 act = {silu_times(totals[4 * j], totals[4 * j + 2]),
                        silu_times(totals[4 * j + 1], totals[4 * j + 3])};
    unscaled.act[2 * j] = act.x;
    unscaled.act[2 * j + 1] = act.y;
    float2 most = {fabsf(act.x), fabsf(act.y)};
#pragma unroll
    for (int distance = 4; distance < kWarpSize; distance *= 2) {
      most.x = larger_magnitude(most.x, __shfl_xor_sync(0xffffffff, most.x, distance));
      most.y = larger_magnitude(most.y, __shfl_xor_sync(0xffffffff, most.y, distance));
    }
    if (f.row < kScaleTeam) send(to + 8 * j * kFloat, most, barrier_there);
  }
}

template <class Shape>
__device__ __forceinline__ void write_scaled(const StageMemory<Shape>& memory, const Problem& p,
                                             const RowBuffers& rows, const Fragment& f, int member,
                                             const Unscaled<Shape>& unscaled) {
  constexpr int kFloat = int{sizeof(float)};
  wait_for_cluster(exchange_barrier(memory, unscaled.task),
                   static_cast<uint32_t>(unscaled.task / 2 % 2));
  const SharedAddress from = magnitudes(memory, unscaled.task);
  const Tile& tile = unscaled.tile;
  const int column0 = (unscaled.part * kScaleTeam + member) * Shape::kColumns;
  const int column = column0 + f.warp * kGroupRows + f.row;
  const int groups = ceil_div(p.inter, kBlock);
#pragma unroll
  for (int j = 0; j < Shape::kRows / 8; ++j) {
    const int token = 8 * j + f.token0;
    float2 most = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kSenders; ++i) {
      const float2 one = load_shared_pair(from + (i * Shape::kTileRows + token) * kFloat);
      most = {larger_magnitude(most.x, one.x), larger_magnitude(most.y, one.y)};
    }
    const float2 scale = {scale_of_largest(most.x), scale_of_largest(most.y)};
    if (member == 0 && f.warp == 0 && f.row == 0) {
      float* out =
          rows.act_scale + static_cast<int64_t>(tile.first_row + token) * groups + unscaled.part;
      if (token < tile.rows) out[0] = scale.x;
      if (token + 1 < tile.rows) out[groups] = scale.y;
    }
    if (column >= p.inter) continue;
    write_column(p, rows, tile, token, column, {unscaled.act[2 * j], unscaled.act[2 * j + 1]},
                 {1.0f / scale.x, 1.0f / scale.y});
  }
}

}  // namespace jax_hpc::fused_moe
