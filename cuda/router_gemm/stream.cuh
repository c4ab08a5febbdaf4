// Router product for few tokens: every lane streams its piece of the weights through shared memory
// into tensor-core operands, and the pieces of the hidden axis are added up afterwards.
#pragma once

#include <cuda_bf16.h>

#include "common/launch.h"
#include "common/ptx.cuh"
#include "router_gemm/config.h"

namespace jax_hpc::router_gemm {

constexpr int kStreamWarps = 8;
constexpr int kStreamThreads = kStreamWarps * kWarpSize;
constexpr int kStepHidden = 32;  // hidden values of one step of a warp: 8 in each lane of a quad
constexpr int kLaneHidden = 8;   // 16 bytes

// One expert tile is the 16 rows, one token tile the 8 columns of mma.m16n8k16.
template <int Terms, int ExpertTiles, int TokenTiles>
struct StreamShape {
  static constexpr int kExperts = 16 * ExpertTiles;
  static constexpr int kTokens = 8 * TokenTiles;
  // Vectors of 16 bytes that a lane needs for one step; a stage of the ring holds one step.
  static constexpr int kWeightVectors = 2 * ExpertTiles * Terms;
  static constexpr int kVectors = kWeightVectors + TokenTiles;
  static constexpr int kStageBytes = kVectors * kStreamThreads * 16;
  // Four steps where two CTAs of an SM have room for them: at H 4096, E 192, T 8 and a cluster of
  // 4 four took 3.92 us, three 4.21 on an H200.
  static constexpr int kStages = kStageBytes * 4 <= 96 * 1024 ? 4 : 2;
  // A row of partial sums of one token; four more floats keep the warp's stores free of bank
  // conflicts and the rows 16-byte aligned.
  static constexpr int kRow = kExperts + 4;
  static constexpr int kPartials = kTokens * kRow;
  static constexpr int kUnits = kTokens * kExperts / 4;  // float4 units of the CTA's tile
  // Terms below the first are scaled before the product and share its accumulator. Three terms
  // claim more than the tensor cores' rounding towards zero allows: there the first term has an
  // accumulator of its own, which is emptied into a float32 sum every kStepsPerSum steps.
  static constexpr bool kExact = Terms == 3;
  static constexpr int kStepsPerSum = 2;
  // The sums that other CTAs send must not lie where this one's ring still is in use.
  static constexpr int kPartialBytes = kStreamWarps * kPartials * int{sizeof(float)};
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kFrontBytes = kRingBytes > kPartialBytes ? kRingBytes : kPartialBytes;
  static constexpr int kSharedBytes = kFrontBytes + kUnits * int{sizeof(float4)};
};

using Pairs = uint4;  // eight bf16 of one row

// x * 2^-8 for two bf16 values, exact but for subnormals.
__device__ __forceinline__ uint32_t scale_pair(uint32_t pair, float factor) {
  const __nv_bfloat162 scale = __float2bfloat162_rn(factor);
  __nv_bfloat162 value = *reinterpret_cast<__nv_bfloat162*>(&pair);
  value = __hmul2(value, scale);
  return *reinterpret_cast<uint32_t*>(&value);
}

__device__ __forceinline__ Pairs scale_pairs(Pairs v, float factor) {
  return {scale_pair(v.x, factor), scale_pair(v.y, factor), scale_pair(v.z, factor),
          scale_pair(v.w, factor)};
}

__device__ __forceinline__ void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Eight values of a row by single loads, zeros beyond the row's end: for rows that are not 16-byte
// aligned.
__device__ __forceinline__ Pairs load_unaligned(const __nv_bfloat16* row, int values) {
  const auto* bits = reinterpret_cast<const uint16_t*>(row);
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = 2 * i < values ? bits[2 * i] : 0u;
    const uint32_t high = 2 * i + 1 < values ? bits[2 * i + 1] : 0u;
    word[i] = low | high << 16;
  }
  return {word[0], word[1], word[2], word[3]};
}

// Grid: x = expert tiles * cluster, y = token tiles. Which hidden values a lane holds does not
// matter as long as weights and activations agree: lane t of a quad takes the eight from 8t on and
// feeds them to two products, so that every copy is 16 bytes wide and lands in operand registers.
// The ring in shared memory is private to each thread: ptxas would not keep the loads of several
// steps in flight through registers (it sinks them to their uses).
template <int Terms, int ExpertTiles, int TokenTiles, bool Aligned>
__global__ void __launch_bounds__(kStreamThreads)
    stream_kernel(Problem p, int cluster, const __nv_bfloat16* __restrict__ x,
                  const __nv_bfloat16* __restrict__ parts, float* __restrict__ logits) {
  using Shape = StreamShape<Terms, ExpertTiles, TokenTiles>;
  extern __shared__ float4 shared[];
  float* partials = reinterpret_cast<float*>(shared);
  float4* received = shared + Shape::kFrontBytes / int{sizeof(float4)};
  Pairs* ring = reinterpret_cast<Pairs*>(shared) + threadIdx.x;

  // The other CTAs' shared memory may be written once they run; asked now, needed much later.
  if (cluster > 1) cluster_arrive();

  const int rank = cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int group = lane / 4;
  const int quad = lane % 4;
  const int expert0 = static_cast<int>(blockIdx.x) / cluster * Shape::kExperts;
  const int token0 = static_cast<int>(blockIdx.y) * Shape::kTokens;

  // Vector v of a step: the weights' rows term by term, then the tokens' rows.
  const auto place_of = [&](int v, int k, bool& valid) {
    const bool is_weight = v < Shape::kWeightVectors;
    const int row = is_weight ? expert0 + v % (2 * ExpertTiles) * 8 + group
                              : token0 + (v - Shape::kWeightVectors) * 8 + group;
    const int rows = is_weight ? p.experts : p.tokens;
    valid = row < rows && k < p.hidden;
    if (!valid) return is_weight ? parts : x;
    const int64_t base = is_weight ? static_cast<int64_t>(v / (2 * ExpertTiles)) * p.experts : 0;
    return (is_weight ? parts : x) + (base + row) * p.hidden + k;
  };

  float sums[ExpertTiles][TokenTiles][4] = {};
  float firsts[Shape::kExact ? ExpertTiles : 1][TokenTiles][4] = {};
  float rests[Shape::kExact ? ExpertTiles : 1][TokenTiles][4] = {};
  const auto add_firsts = [&] {
#pragma unroll
    for (int e = 0; e < ExpertTiles; ++e) {
#pragma unroll
      for (int t = 0; t < TokenTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[e][t][i] += firsts[e][t][i];
          firsts[e][t][i] = 0.0f;
        }
      }
    }
  };
  // All vectors of a step in registers first: reading the weights' as they are needed is 5 % slower
  // from 32 tokens on.
  const auto multiply_step = [&](const Pairs(&v)[Shape::kVectors]) {
    constexpr float kFactor[3] = {1.0f, 1.0f / 256, 1.0f / 65536};
#pragma unroll
    for (int i = 0; i < Terms; ++i) {
#pragma unroll
      for (int e = 0; e < ExpertTiles; ++e) {
        auto& into = !Shape::kExact ? sums[e] : i == 0 ? firsts[e] : rests[e];
        Pairs low = v[2 * (i * ExpertTiles + e)];
        Pairs high = v[2 * (i * ExpertTiles + e) + 1];
        if (i > 0) {
          low = scale_pairs(low, kFactor[i]);
          high = scale_pairs(high, kFactor[i]);
        }
#pragma unroll
        for (int t = 0; t < TokenTiles; ++t) {
          const Pairs b = v[Shape::kWeightVectors + t];
          multiply(into[t], low.x, high.x, low.y, high.y, b.x, b.y);
          multiply(into[t], low.z, high.z, low.w, high.w, b.z, b.w);
        }
      }
    }
  };

  const int steps = ceil_div(p.hidden, kStepHidden);
  const int stride = kStreamWarps * cluster;
  const int first = rank * kStreamWarps + warp;
  const auto hidden_of = [&](int step) { return step * kStepHidden + quad * kLaneHidden; };
  if constexpr (Aligned) {
    const auto fetch = [&](int turn) {
      const int step = first + turn * stride;
      if (step < steps) {
        Pairs* to = ring + turn % Shape::kStages * (Shape::kVectors * kStreamThreads);
#pragma unroll
        for (int v = 0; v < Shape::kVectors; ++v) {
          bool valid;
          const __nv_bfloat16* from = place_of(v, hidden_of(step), valid);
          copy_16(to + v * kStreamThreads, from, valid);
        }
      }
      commit_copies();
    };
#pragma unroll
    for (int turn = 0; turn < Shape::kStages; ++turn) fetch(turn);
    for (int turn = 0; first + turn * stride < steps; ++turn) {
      wait_copies<Shape::kStages - 1>();
      const Pairs* from = ring + turn % Shape::kStages * (Shape::kVectors * kStreamThreads);
      Pairs v[Shape::kVectors];
#pragma unroll
      for (int i = 0; i < Shape::kVectors; ++i) v[i] = from[i * kStreamThreads];
      multiply_step(v);
      fetch(turn + Shape::kStages);
      if (Shape::kExact && turn % Shape::kStepsPerSum == Shape::kStepsPerSum - 1) add_firsts();
    }
    wait_copies<0>();
    __syncthreads();  // the sums below take the place of the ring
  } else {
    for (int step = first; step < steps; step += stride) {
      const int k = hidden_of(step);
      Pairs v[Shape::kVectors];
#pragma unroll
      for (int i = 0; i < Shape::kVectors; ++i) {
        bool valid;
        const __nv_bfloat16* from = place_of(i, k, valid);
        v[i] = load_unaligned(from, valid ? p.hidden - k : 0);
      }
      multiply_step(v);
      if constexpr (Shape::kExact) add_firsts();
    }
  }

  // The warps' sums side by side in shared memory: [warp][token][expert].
#pragma unroll
  for (int e = 0; e < ExpertTiles; ++e) {
#pragma unroll
    for (int t = 0; t < TokenTiles; ++t) {
      float* to =
          partials + warp * Shape::kPartials + (8 * t + 2 * quad) * Shape::kRow + 16 * e + group;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float sum = sums[e][t][i];
        if constexpr (Shape::kExact) sum += firsts[e][t][i] + rests[e][t][i];
        to[(i % 2) * Shape::kRow + (i / 2) * 8] = sum;
      }
    }
  }
  __syncthreads();

  const auto add_warps = [&](int unit) {
    constexpr int kUnitsOfRow = Shape::kExperts / 4;
    const float4* from = shared + (unit / kUnitsOfRow) * (Shape::kRow / 4) + unit % kUnitsOfRow;
    float4 sum = from[0];
#pragma unroll
    for (int i = 1; i < kStreamWarps; ++i) {
      const float4 next = from[i * Shape::kPartials / 4];
      sum = {sum.x + next.x, sum.y + next.y, sum.z + next.z, sum.w + next.w};
    }
    return sum;
  };
  const auto write = [&](int unit, float4 sum) {
    constexpr int kUnitsOfRow = Shape::kExperts / 4;
    const int token = token0 + unit / kUnitsOfRow;
    const int expert = expert0 + unit % kUnitsOfRow * 4;
    if (token >= p.tokens) return;
    float* to = logits + static_cast<int64_t>(token) * p.experts + expert;
    if (p.experts % 4 == 0) {
      if (expert < p.experts) *reinterpret_cast<float4*>(to) = sum;
      return;
    }
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (expert + i < p.experts) to[i] = values[i];
    }
  };

  if (cluster == 1) {
    for (int unit = static_cast<int>(threadIdx.x); unit < Shape::kUnits; unit += kStreamThreads) {
      write(unit, add_warps(unit));
    }
    return;
  }
  // Each CTA owns a slice of the tile and is sent everybody's sums of it: [sender][unit].
  const int slice = Shape::kUnits / cluster;
  cluster_wait();
  for (int unit = static_cast<int>(threadIdx.x); unit < Shape::kUnits; unit += kStreamThreads) {
    const int owner = unit / slice;
    const uint32_t to =
        address_in_cluster(received + rank * slice + unit % slice, static_cast<uint32_t>(owner));
    store_in_cluster(to, add_warps(unit));
  }
  cluster_arrive();
  cluster_wait();
  for (int i = static_cast<int>(threadIdx.x); i < slice; i += kStreamThreads) {
    float4 sum = received[i];
    for (int sender = 1; sender < cluster; ++sender) {
      const float4 next = received[sender * slice + i];
      sum = {sum.x + next.x, sum.y + next.y, sum.z + next.z, sum.w + next.w};
    }
    write(rank * slice + i, sum);
  }
}

}  // namespace jax_hpc::router_gemm
