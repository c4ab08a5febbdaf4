// The end of a task: the warps that shared out its tokens add up what they hold, and all write.
#pragma once

#include "decode_attention/rows.cuh"

namespace jax_hpc::decode_attention {

template <class Cache, int D, int N>
class Ending {
 public:
  __device__ __forceinline__ Ending(const Arguments& a, const Shared& shared, const Task& task,
                                    Turn turn, Thread thread)
      : a_(a), shared_(shared), task_(task), turn_(turn), thread_(thread) {
    constexpr int kOfPlace = Layout::kStateBytes / int{sizeof(float2)};
    states_ = shared.state + turn.stage() * kOfPlace;
    const int place = N == 1 ? turn.stage() : 0;
    sums_ = shared.merge + place * kWarps * 8 * kMergeRow;
  }

  // Tasks take turns with two places for the warps' states, and with one column tile for their
  // sums: a warp may be at the end of the next task while another still reads those of this one.
  __device__ __forceinline__ void run(const Rows<Cache, D, N>& rows) const {
    const int lane = thread_.lane;
    float2* const own = states_ + thread_.warp * 8 * N;
    if constexpr (N == 1) share_sums<0>(rows);
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

  // With one column tile the compiler knows it, and unrolls what goes over the warps.
  __device__ __forceinline__ int row_groups() const { return N == 1 ? 1 : a_.row_groups; }

  // By recursion: a loop with barriers is not unrolled, and would index registers.
  template <int n>
  __device__ __forceinline__ void run_tile(const Rows<Cache, D, N>& rows) const {
    if constexpr (n < N) {
      if constexpr (N > 1) {
        consumer_barrier(kWarps * kWarpSize);  // the tile before has been read
        share_sums<n>(rows);
      }
      consumer_barrier(kWarps * kWarpSize);
      write_rows(n);
      run_tile<n + 1>(rows);
    }
  }

  // Of a warp, its row `row` of tile n.
  __device__ __forceinline__ float2 state_of(int warp, int n, int row) const {
    return states_[warp * 8 * N + 8 * n + row];
  }

  template <int n>
  __device__ __forceinline__ void share_sums(const Rows<Cache, D, N>& rows) const {
    const int lane = thread_.lane;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = lane % 4 * 2 + c;
      float* const to = sums_ + (thread_.warp * 8 + row) * kMergeRow + Cache::first_dim(lane);
#pragma unroll
      for (int m = 0; m < D / 16; ++m) {
        const float first = rows.sum[m][n][c];
        const float second = rows.sum[m][n][c + 2];
        if constexpr (Cache::kSecondDim == 1) {
          *reinterpret_cast<float2*>(to + 16 * m) = {first, second};
        } else {
          to[16 * m] = first;
          to[16 * m + Cache::kSecondDim] = second;
        }
      }
    }
  }

  // Every thread takes four neighbouring values of a row, of all warps that have some.
  __device__ __forceinline__ void write_rows(int n) const {
    constexpr int kUnits = D / 4;
    for (int i = thread_.warp * kWarpSize + thread_.lane; i < row_groups() * 8 * kUnits;
         i += kWarps * kWarpSize) {
      const int unit = i % kUnits;
      const int tile_row = i / kUnits % 8;
      const int row_group = N == 1 ? 0 : i / (kUnits * 8);
      const int row = (row_group * N + n) * 8 + tile_row;
      if (row >= a_.problem.rows()) continue;
      float base = kNoBase;
#pragma unroll
      for (int w = row_group; w < kWarps; w += row_groups()) {
        base = fmaxf(base, state_of(w, n, tile_row).x);
      }
      float total = 0;
      float4 sum{0, 0, 0, 0};
#pragma unroll
      for (int w = row_group; w < kWarps; w += row_groups()) {
        const float2 state = state_of(w, n, tile_row);
        const float shrink = power_of_2(state.x - base);
        const float4 part =
            *reinterpret_cast<const float4*>(sums_ + (w * 8 + tile_row) * kMergeRow + unit * 4);
        total = fmaf(shrink, state.y, total);
        sum.x = fmaf(shrink, part.x, sum.x);
        sum.y = fmaf(shrink, part.y, sum.y);
        sum.z = fmaf(shrink, part.z, sum.z);
        sum.w = fmaf(shrink, part.w, sum.w);
      }
      if (task_.slot >= 0) {
        write_partial(row, unit, base, total, sum);
      } else {
        write_output(row, unit, base, total, sum);
      }
    }
  }

  __device__ __forceinline__ void write_partial(int row, int unit, float base, float total,
                                                float4 sum) const {
    const int64_t at = int64_t{task_.slot} * a_.problem.rows() + row;
    *reinterpret_cast<float4*>(a_.partial_out + at * D + unit * 4) = sum;
    if (unit == 0) a_.partial_state[at] = {base, total};
  }

  __device__ __forceinline__ void write_output(int row, int unit, float base, float total,
                                               float4 sum) const {
    const int q_head =
        task_.head * a_.problem.group + row - a_.by_group.divide(row) * a_.problem.group;
    const Closing closing = close_row(base, total, sink_power(a_.sinks, q_head));
    float weight = closing.weight;
    if (Cache::kBytes == 1 && is_common(a_.problem.v_scale)) {
      weight *= shared_.scales[turn_.index].values;
    }
    const int64_t at = output_row(a_, task_.sequence, task_.head, row);
    *reinterpret_cast<uint2*>(a_.out + at * D + unit * 4) = {
        pack_bf16(sum.x * weight, sum.y * weight), pack_bf16(sum.z * weight, sum.w * weight)};
    if (unit == 0 && a_.lse != nullptr) a_.lse[at] = closing.log_sum_exp();
  }

  const Arguments& a_;
  const Shared& shared_;
  const Task& task_;
  Turn turn_;
  Thread thread_;
  float2* states_;
  float* sums_;
};

}  // namespace jax_hpc::decode_attention
