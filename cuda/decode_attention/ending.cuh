// The end of a task: the warps that shared out its tokens add up what they hold, and all write.
#pragma once

#include "decode_attention/rows.cuh"

namespace jax_hpc::decode_attention {

template <class Cache, int D, int N>
class Ending {
 public:
  // Tasks take turns with two places for the warps' states: a warp may be at the end of the next
  // task while another still reads those of this one.
  __device__ __forceinline__ Ending(const Arguments& a, const Shared& shared, const Task& task,
                                    int place, Thread thread)
      : a_(a),
        shared_(shared),
        task_(task),
        thread_(thread),
        states_(shared.state + place * (Layout::kStateBytes / int{sizeof(float2)})) {}

  __device__ __forceinline__ void run(const Rows<Cache, D, N>& rows) const {
    const int lane = thread_.lane;
    float2* const own = states_ + thread_.warp * 8 * N;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float total = rows.total[n][c];
#pragma unroll
        for (int step = 4; step < kWarpSize; step *= 2) {
          total += __shfl_xor_sync(~0u, total, step);
        }
        if (lane < 4) own[8 * n + lane * 2 + c] = {rows.base[n][c], total};
      }
    }
    run_tile<0>(rows);
  }

 private:
  static constexpr int kMergeRow = D + 4;  // floats; the four keep the stores free of conflicts

  // By recursion: a loop with barriers is not unrolled, and would index registers.
  template <int n>
  __device__ __forceinline__ void run_tile(const Rows<Cache, D, N>& rows) const {
    if constexpr (n < N) {
      const int consumers = a_.warps * kWarpSize;
      consumer_barrier(consumers);  // states are there, or the tile before has been read
      share_sums<n>(rows);
      consumer_barrier(consumers);
      write_rows(n);
      run_tile<n + 1>(rows);
    }
  }

  // Of a warp, its row `row` of tile n.
  __device__ __forceinline__ float2 state_of(int warp, int n, int row) const {
    return states_[warp * 8 * N + 8 * n + row];
  }
  __device__ __forceinline__ float common_base(int row_group, int n, int row) const {
    float base = kNoBase;
    for (int w = row_group; w < a_.warps; w += a_.row_groups) {
      base = fmaxf(base, state_of(w, n, row).x);
    }
    return base;
  }

  template <int n>
  __device__ __forceinline__ void share_sums(const Rows<Cache, D, N>& rows) const {
    const int warp = thread_.warp;
    const int lane = thread_.lane;
    const int row_group = warp & (a_.row_groups - 1);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = lane % 4 * 2 + c;
      const float shrink = power_of_2(rows.base[n][c] - common_base(row_group, n, row));
      float* const to = shared_.merge + (warp * 8 + row) * kMergeRow + Cache::first_dim(lane);
#pragma unroll
      for (int m = 0; m < D / 16; ++m) {
        const float first = rows.sum[m][n][c] * shrink;
        const float second = rows.sum[m][n][c + 2] * shrink;
        if constexpr (Cache::kSecondDim == 1) {
          *reinterpret_cast<float2*>(to + 16 * m) = {first, second};
        } else {
          to[16 * m] = first;
          to[16 * m + Cache::kSecondDim] = second;
        }
      }
    }
  }

  // Every thread takes eight neighbouring values of a row, of all warps that have some.
  __device__ __forceinline__ void write_rows(int n) const {
    constexpr int kUnits = D / 8;
    for (int i = thread_.warp * kWarpSize + thread_.lane; i < a_.row_groups * 8 * kUnits;
         i += a_.warps * kWarpSize) {
      const int unit = i % kUnits;
      const int tile_row = i / kUnits % 8;
      const int row_group = i / (kUnits * 8);
      const int row = (row_group * N + n) * 8 + tile_row;
      if (row >= a_.problem.rows()) continue;
      const float base = common_base(row_group, n, tile_row);
      float total = 0;
      float values[8] = {};
      for (int w = row_group; w < a_.warps; w += a_.row_groups) {
        const float2 state = state_of(w, n, tile_row);
        total += power_of_2(state.x - base) * state.y;
        const float4* const from = reinterpret_cast<const float4*>(
            shared_.merge + (w * 8 + tile_row) * kMergeRow + unit * 8);
        const float4 low = from[0];
        const float4 high = from[1];
        values[0] += low.x, values[1] += low.y, values[2] += low.z, values[3] += low.w;
        values[4] += high.x, values[5] += high.y, values[6] += high.z, values[7] += high.w;
      }
      if (task_.slot >= 0) {
        write_partial(row, unit, base, total, values);
      } else {
        write_output(row, unit, base, total, values);
      }
    }
  }

  __device__ __forceinline__ void write_partial(int row, int unit, float base, float total,
                                                const float (&values)[8]) const {
    const int64_t at = int64_t{task_.slot} * a_.problem.rows() + row;
    float4* const to = reinterpret_cast<float4*>(a_.partial_out + at * D + unit * 8);
    to[0] = {values[0], values[1], values[2], values[3]};
    to[1] = {values[4], values[5], values[6], values[7]};
    if (unit == 0) a_.partial_state[at] = {base, total};
  }

  __device__ __forceinline__ void write_output(int row, int unit, float base, float total,
                                               const float (&values)[8]) const {
    const int q_head =
        task_.head * a_.problem.group + row - a_.by_group.divide(row) * a_.problem.group;
    const Closing closing = close_row(base, total, a_.sinks, q_head);
    const float weight = closing.weight * value_scale(a_, task_.head);
    const int64_t at = output_row(a_, task_.sequence, task_.head, row);
    uint4 packed;
    packed.x = pack_bf16(values[0] * weight, values[1] * weight);
    packed.y = pack_bf16(values[2] * weight, values[3] * weight);
    packed.z = pack_bf16(values[4] * weight, values[5] * weight);
    packed.w = pack_bf16(values[6] * weight, values[7] * weight);
    *reinterpret_cast<uint4*>(a_.out + at * D + unit * 8) = packed;
    if (unit == 0 && a_.lse != nullptr) a_.lse[at] = closing.lse;
  }

  const Arguments& a_;
  const Shared& shared_;
  const Task& task_;
  Thread thread_;
  float2* states_;
};

}  // namespace jax_hpc::decode_attention
