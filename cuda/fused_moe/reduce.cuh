// The weighted sum of a token's experts in the order of its choices, what is added to it, and one
// rounding.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "common/ptx.cuh"
#include "fused_moe/instructions.cuh"
#include "fused_moe/launch.h"
#include "fused_moe/quantize.cuh"

namespace jax_hpc::fused_moe {

constexpr int kReduceValues = 8;  // of a thread, 16 bytes of bf16
constexpr int kReduceThreads = 64;
static_assert(kReduceThreads * kReduceValues == kSliceUnit);

// What is added to a token's experts, as it lies in memory: eight columns.
struct Addends {
  uint4 shared;
  uint4 x;
  float x_scale;
  float identity_weight;
};

__device__ __forceinline__ Addends read_addends(const Problem& p, const Arrays& a, int64_t token,
                                                int column) {
  Addends addends{};
  const int64_t place = (token * p.hidden + column) / kReduceValues;
  if (a.shared_output != nullptr) {
    addends.shared = __ldcg(static_cast<const uint4*>(a.shared_output) + place);
  }
  if (a.identity_weight == nullptr) return addends;
  addends.identity_weight = __ldcg(a.identity_weight + token);
  if (!a.x_is_fp8) {
    addends.x = __ldcg(static_cast<const uint4*>(a.x) + place);
    return addends;
  }
  const uint2 packed = __ldcg(static_cast<const uint2*>(a.x) + place);
  addends.x = uint4{packed.x, packed.y, 0, 0};
  const int64_t group = token * blocks_of(p.hidden, kBlock) + column / kBlock;
  addends.x_scale = __ldcg(p.format == Format::kBlock ? a.x_scale + group : a.weights.input_scale);
  return addends;
}

// Eight columns of x, dequantised where it is fp8.
__device__ __forceinline__ void unpack_x(const Addends& addends, bool is_fp8,
                                         float (&values)[kReduceValues]) {
  if (!is_fp8) {
    unpack_bf16(addends.x, values);
    return;
  }
#pragma unroll
  for (int i = 0; i < kReduceValues; ++i) {
    __nv_fp8_e4m3 value;
    value.__x =
        static_cast<__nv_fp8_storage_t>((i < 4 ? addends.x.x : addends.x.y) >> (8 * (i % 4)));
    values[i] = static_cast<float>(value) * addends.x_scale;
  }
}

__device__ __forceinline__ void add(float (&sum)[kReduceValues], float factor,
                                    const float (&values)[kReduceValues]) {
#pragma unroll
  for (int i = 0; i < kReduceValues; ++i) sum[i] += factor * values[i];
}

// An expert's outputs as they lie in memory: eight columns of bf16, or of float32.
template <bool kFloats>
struct Outputs;

template <>
struct Outputs<false> {
  static constexpr int kBytes = 2;  // of a value
  uint4 packed{};

  __device__ __forceinline__ void read(const void* outputs, int64_t place) {
    packed = static_cast<const uint4*>(outputs)[place / kReduceValues];
  }
  __device__ __forceinline__ void unpack(float (&values)[kReduceValues]) const {
    unpack_bf16(packed, values);
  }
};

template <>
struct Outputs<true> {
  static constexpr int kBytes = 4;
  float4 low{};
  float4 high{};

  __device__ __forceinline__ void read(const void* outputs, int64_t place) {
    const float* from = static_cast<const float*>(outputs) + place;
    low = load_float4(from);
    high = load_float4(from + 4);
  }
  __device__ __forceinline__ void unpack(float (&values)[kReduceValues]) const {
    const float all[] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < kReduceValues; ++i) values[i] = all[i];
  }
};

// Grid: tokens, then columns of the slice. What the index holds was written before gate-up, which
// has ended when the first down lets the next kernel start: so it is there before this kernel's
// wait, in the L2 cache, past an L1 that may hold what an earlier call left. The next slice's down
// does not depend on this kernel, and may start at once; what follows the call is an ordinary
// launch. kAtOnce choices are under way together: of float32 they need registers for fewer CTAs
// than the compiler would aim at.
//
// The L2 cache would write outputs that nobody reads again back to memory, while later kernels read
// weights; so where they are whole lines (`discards`) it is told to forget what has been read. Of
// 4096 rows x 4096 of bf16 writing took 8 us.
template <int kAtOnce, bool kFloats>
__global__ __launch_bounds__(kReduceThreads, kFloats ? 8 : 0) void reduce_kernel(
    const __grid_constant__ Problem p, const __grid_constant__ Arrays a,
    const __grid_constant__ Slice slice, bool discards) {
  let_next_kernel_start();
  const int column =
      slice.first + static_cast<int>(blockIdx.y * kReduceThreads + threadIdx.x) * kReduceValues;
  const int64_t token = blockIdx.x;
  const bool exists = column < p.hidden;
  Addends addends{};
  if (exists) addends = read_addends(p, a, token, column);
  float sum[kReduceValues] = {};
  bool has_waited = false;
  for (int first = 0; first < p.top_k; first += kAtOnce) {
    int rows[kAtOnce];
    float weights[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool is_choice = exists && first + i < p.top_k;
      rows[i] = is_choice ? __ldcg(a.workspace.pair_row + token * p.top_k + first + i) : -1;
      weights[i] = is_choice ? __ldcg(a.topk_weights + token * p.top_k + first + i) : 0.0f;
    }
    if (!has_waited) {
      has_waited = true;
      wait_for_previous_kernel();
    }
    Outputs<kFloats> outputs[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (rows[i] < 0) continue;
      outputs[i].read(a.workspace.rows.outputs, int64_t{rows[i]} * p.hidden + column);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (rows[i] < 0) continue;
      float values[kReduceValues];
      outputs[i].unpack(values);
      add(sum, weights[i], values);
    }
    if (!discards) continue;
    constexpr int kLanes = kLineBytes / (kReduceValues * Outputs<kFloats>::kBytes);  // of a line
    __syncwarp();  // all of them have read it
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (rows[i] < 0 || threadIdx.x % kLanes != 0) continue;
      discard_line(static_cast<const uint8_t*>(a.workspace.rows.outputs) +
                   (int64_t{rows[i]} * p.hidden + column) * Outputs<kFloats>::kBytes);
    }
  }
  if (!exists) return;
  float values[kReduceValues];
  if (a.shared_output != nullptr) {
    unpack_bf16(addends.shared, values);
    add(sum, 1.0f, values);
  }
  if (a.identity_weight != nullptr) {
    unpack_x(addends, a.x_is_fp8, values);
    add(sum, addends.identity_weight, values);
  }
  uint32_t out[kReduceValues / 2];
#pragma unroll
  for (int i = 0; i < kReduceValues / 2; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
    out[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  const int64_t place = (token * p.hidden + column) / kReduceValues;
  static_cast<uint4*>(a.out)[place] = uint4{out[0], out[1], out[2], out[3]};
}

}  // namespace jax_hpc::fused_moe
