// The attention prologue: a warp takes several heads at a time, of one token or of several, turn
// after turn, with the next turns' values and rows of the table under way to shared memory. Lanes
// meet only to add up squares and to find the largest magnitude.
#pragma once

#include "qk_norm_rope_append/config.h"
#include "qk_norm_rope_append/launch.h"
#include "qk_norm_rope_append/rotation.cuh"
#include "qk_norm_rope_append/stages.cuh"
#include "qk_norm_rope_append/values.cuh"

namespace jax_hpc::qk_norm_rope_append {

__device__ __forceinline__ float reciprocal_of(Scale kind, const float* scale, int head) {
  if (kind == Scale::kNone) return 1.0f;
  return __frcp_rn(__ldg(scale + (kind == Scale::kHead ? head : 0)));
}

// Where a lane's heads of one kind (queries, keys or values) go, and how.
struct Target {
  int head;                // the lane's next of its token, or of a token behind
  int token = 0;           // counted from the warp's first
  int until = 0;           // the first head of another kind or token
  bool is_turned = false;  // and normalised
  bool is_written = false;
  bool is_fp8;
  bool is_dynamic;  // fp8 with a scale of its own
  uint32_t row;     // of the array; of 64 bytes or more, 2^32 of them are in no memory
  uint32_t step;    // to the row of the lane's next head
  float factor;     // fp8 with a scale of others': its reciprocal
  uint8_t* to;      // the lane's first value of row 0
  float* scales;    // of row 0
  SharedAddress weight;
  SharedAddress row_of_table;

  __device__ explicit Target(int first_head) : head(first_head) {}

  template <int kHeadDim>
  __device__ void aim(const Problem& p, const Arrays& a, Divisor page_size, int first_token,
                      int value, const StageAddresses<kHeadDim>& stage) {
    constexpr int kHeads = heads_of_warp(kHeadDim);
#pragma unroll 1
    for (; head >= p.heads(); head -= p.heads()) ++token;
    row_of_table = stage.row(token);
    void* base;
    factor = 1;
    if (head < p.q_heads) {
      row = static_cast<uint32_t>(first_token + token) * p.q_heads + head;
      step = kHeads;
      base = a.q;
      scales = a.q_scale;
      is_turned = is_written = true;
      is_fp8 = is_dynamic = p.fp8_q;
      until = p.q_heads;
      weight = stage.weight(true);
    } else {
      const bool is_k = head < p.q_heads + p.kv_heads;
      const int kv_head = head - p.q_heads - (is_k ? 0 : p.kv_heads);
      const int slot = load_shared_int(stage.slot(token));
      is_written = slot >= 0 && slot < p.pages * p.page_size;
      const uint32_t page = page_size.quotient(is_written ? slot : 0);
      row = (page * (p.kv_heads - 1) + kv_head) * p.page_size + slot;
      step = kHeads * p.page_size;
      base = is_k ? a.k_pages : a.v_pages;
      scales = a.k_scale_pages;
      is_turned = is_k;
      is_fp8 = is_k ? p.fp8_k : p.fp8_v;
      is_dynamic = is_k && p.k_scale_per_token;
      until = is_k ? p.q_heads + p.kv_heads : p.heads();
      weight = stage.weight(false);
      if (is_fp8 && !is_dynamic) {
        const Scale kind = is_k ? p.k_scale : p.v_scale;
        factor = reciprocal_of(kind, is_k ? a.k_scale : a.v_scale, kv_head);
        if (kind == Scale::kHead) until = head + 1;
      }
    }
    to = static_cast<uint8_t*>(base) + value * (is_fp8 ? 1 : 2);
  }

  // Writes a lane's two chunks, `apart` values from each other, times `scale`, and goes on to its
  // next head. `most` is the head's largest magnitude before that.
  template <int kHeadDim, bool kQuantizes>
  __device__ void write_head(float (&x)[kValues], int apart, float scale, float most,
                             bool is_first_lane) {
    if (kQuantizes && is_fp8) {
      const float own = scale_of_largest(most * scale);
      if (is_dynamic && is_first_lane) store(scales + row, own);
      scale = finite(scale * (is_dynamic ? quick_reciprocal(own) : factor));
      uint8_t* const at = to + uint64_t{row} * kHeadDim;
      write_fp8(at, x, scale);
      write_fp8(at + apart, x + kChunk, scale);
    } else {
      uint8_t* const at = to + uint64_t{row} * (2 * kHeadDim);
      write_bf16(at, x, scale);
      write_bf16(at + 2 * apart, x + kChunk, scale);
    }
    row += step;
  }
};

constexpr int kMostThreads = 32 * kMostWarps;

// kQuantizes: some of q, k and v are fp8.
template <int kHeadDim, bool kQuantizes, class Rotation>
__global__ __launch_bounds__(kMostThreads, Rotation::kMostCtasOfSm) void prologue_kernel(
    const __grid_constant__ Problem p, const __grid_constant__ Arrays a,
    const __grid_constant__ Config config, const __grid_constant__ Divisor heads_divisor,
    const __grid_constant__ Divisor page_size) {
  constexpr int kLanes = lanes_of_head(kHeadDim);
  constexpr int kHeads = heads_of_warp(kHeadDim);
  constexpr int kAhead = kStages - 1;
  extern __shared__ uint4 stages_of_cta[];
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int begin = (blockIdx.x * config.warps + warp) * config.turns * kHeads;
  const int rest = p.tokens * p.heads() - begin;
  if (rest <= 0) return;
  const auto turns_of_rest = [&](int heads) {
    return min(config.turns, (heads + kHeads - 1) / kHeads);
  };
  const int count = turns_of_rest(rest);
  const int count_of_lane = turns_of_rest(rest - lane / kLanes);
  const int first_token = heads_divisor.quotient(begin);
  const Places at = Rotation::places(p, kept(lane % kLanes));
  constexpr int kBytes = sizeof(Stages<kHeadDim>);
  const StageAddresses<kHeadDim> stage(shared_address(stages_of_cta) + warp * kBytes, lane);

  // What waits for no other value is asked for first.
  Asker<kHeadDim, Rotation> asker(p, a, begin, first_token, lane, at);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i < count_of_lane) asker.ask_values(stage.chunks(i));
  }
  copy_4(stage.slot(lane), a.slots + min(first_token + lane, p.tokens - 1));
  const WeightCopy<kHeadDim> q_weight(p.q_weight, a.q_norm, lane);
  const WeightCopy<kHeadDim> k_weight(p.k_weight, a.k_norm, lane);
#pragma unroll 1
  for (int i = 0; i < kAhead; ++i) {
    if (i < count) asker.ask_rows((i + 1) * kHeads, stage);
    commit_copies();
  }
  q_weight.write(stage.weight(true));
  k_weight.write(stage.weight(false));

  const Norm norm = Rotation::kIsPlain ? Norm::kBeforeRope : p.options.norm;
  const Rotation rotation(warp * kHeads + lane / kLanes);
  Target target(begin - first_token * p.heads() + lane / kLanes);
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    if (i + kAhead < count_of_lane) asker.ask_values(stage.chunks(i + kAhead));
    if (i + kAhead < count) asker.ask_rows((i + kAhead + 1) * kHeads, stage);
    commit_copies();
    wait_copies<kAhead>();
    __syncwarp();  // rows and slots are of all lanes' copies
    const bool has_head = i < count_of_lane;
    if (has_head && target.head >= target.until) {
      target.aim(p, a, page_size, first_token, at.first, stage);
    }
    float x[kValues];
    read_chunk(stage.chunks(i), x);
    read_chunk(stage.chunks(i) + stage.kSecondChunk, x + kChunk);
    // The norm's factor, one for the head, is left to the end.
    float sum = sum_of_squares(x);
    rotation.turn(p, target.row_of_table, target.weight, norm == Norm::kBeforeRope, at, x,
                  target.is_turned);
    if (norm == Norm::kAfterRope) {
      sum = sum_of_squares(x);
      if (target.is_turned) weigh<kHeadDim>(target.weight, at, x);
    }
    float most = kQuantizes ? largest(x) : 0;
    join_head<kLanes, kQuantizes>(sum, most);
    float scale = 1;
    if (norm != Norm::kNone && target.is_turned) {
      scale = rsqrtf(sum * (1.0f / kHeadDim) + p.options.eps);
    }
    if (has_head && target.is_written) {
      target.write_head<kHeadDim, kQuantizes>(x, at.second - at.first, scale, most, at.first == 0);
    }
    target.head += kHeads;
  }
}

}  // namespace jax_hpc::qk_norm_rope_append
