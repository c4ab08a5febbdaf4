// Router product for a few tokens, and for rows that are not 16-byte aligned: every lane streams
// its piece of the weights through shared memory into tensor-core operands, and the pieces of the
// hidden axis are added up afterwards.
#pragma once

#include <cuda_bf16.h>

#include "common/launch.h"
#include "common/ptx.cuh"
#include "router_gemm/config.h"
#include "router_gemm/exchange.cuh"

namespace jax_hpc::router_gemm {

constexpr int kStreamWarps = 8;
constexpr int kStreamThreads = kStreamWarps * kWarpSize;
// Experts of a CTA: the rows of mma.m16n8k16, whose columns are 8 tokens.
constexpr int kStreamExperts = 16;
// Hidden values of one step of a warp, and of one lane of a quad in it: 16 bytes.
constexpr int kStepHidden = 32;
constexpr int kLaneHidden = 8;

template <int Terms, int TokenTiles, bool Aligned>
struct StreamShape {
  static constexpr int kTokens = 8 * TokenTiles;
  // Vectors of 16 bytes that a lane needs for one step; a stage of the ring holds one step.
  static constexpr int kWeightVectors = 2 * Terms;
  static constexpr int kVectors = kWeightVectors + TokenTiles;
  static constexpr int kStageBytes = kVectors * kStreamThreads * 16;
  static constexpr int kStages = 4;
  // A row of partial sums of one token; four more floats keep the warp's stores free of bank
  // conflicts and the rows 16-byte aligned.
  static constexpr int kRow = kStreamExperts + 4;
  static constexpr int kPartials = kTokens * kRow;
  static constexpr int kUnitsOfRow = kStreamExperts / 4;
  static constexpr int kUnits = kTokens * kUnitsOfRow;  // float4 units of the CTA's tile
  // Terms below the first are scaled before the product and share its accumulator, which is emptied
  // into a float32 sum every 512 hidden values. Three terms claim more than the tensor cores'
  // rounding towards zero allows: there the first term has an accumulator of its own, emptied every
  // 64 into a sum of 512, and the totals are sums of those.
  static constexpr bool kExact = Terms == 3;
  static constexpr int kStepsOfFirst = 2;
  static constexpr int kStepsOfTotal = 16;
  // Shared memory: the ring, the warps' sums, what the cluster sends, its barrier.
  static constexpr int kPartialsAt = Aligned ? kStages * kStageBytes : 0;
  static constexpr int kPartialBytes = kStreamWarps * kPartials * int{sizeof(float)};
  static constexpr int kReceivedAt = kPartialsAt + kPartialBytes;
  static constexpr int kReceivedBytes = kUnits * int{sizeof(float4)};
  static constexpr int kBarrierAt = kReceivedAt + kReceivedBytes;
  static constexpr int kSharedBytes = kBarrierAt + int{sizeof(uint64_t)};
  static_assert(kUnits <= kStreamThreads, "a thread for each unit");
};

using Pairs = uint4;  // eight bf16 of one row

// x * factor for two bf16 values; exact for powers of two but where the result is subnormal.
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

// Grid: x = expert tiles << cluster_log2, y = token tiles. Which hidden values a lane holds does
// not matter as long as weights and activations agree: lane t of a quad takes the eight from 8t on
// and feeds them to two products, so that every copy is 16 bytes wide and lands in operand
// registers. The ring in shared memory is private to each thread: ptxas would not keep the loads of
// several steps in flight through registers (it sinks them to their uses).
template <int Terms, int TokenTiles, bool Aligned>
__global__ void __launch_bounds__(kStreamThreads)
    stream_kernel(Problem p, int cluster_log2, const __nv_bfloat16* __restrict__ x,
                  const __nv_bfloat16* __restrict__ parts, float* __restrict__ logits) {
  using Shape = StreamShape<Terms, TokenTiles, Aligned>;
  extern __shared__ float4 stream_memory[];
  const SharedAddress memory = shared_address(stream_memory);

  const int rank = cluster_log2 > 0 ? static_cast<int>(cluster_rank()) : 0;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int group = lane / 4;
  const int quad = lane % 4;
  const int expert0 = (static_cast<int>(blockIdx.x) >> cluster_log2) * kStreamExperts;
  const int token0 = static_cast<int>(blockIdx.y) * Shape::kTokens;

  // The warps of the cluster take steps in turn. The lane's place in its first row of weights and
  // of tokens moves on from one of its steps to the next.
  const int step_hidden = (kStepHidden * kStreamWarps) << cluster_log2;
  int k = (rank * kStreamWarps + warp) * kStepHidden + quad * kLaneHidden;
  const int first_k = k - quad * kLaneHidden;
  const __nv_bfloat16* weights = parts + static_cast<int64_t>(expert0 + group) * p.hidden + k;
  const __nv_bfloat16* tokens = x + static_cast<int64_t>(token0 + group) * p.hidden + k;
  const int64_t next_term = static_cast<int64_t>(p.experts) * p.hidden;
  const int64_t next_tile = static_cast<int64_t>(8) * p.hidden;
  // Vector v of a step: the weights' rows term by term, then the tokens' rows.
  const auto place_of = [&](int v, bool& valid) {
    if (v < Shape::kWeightVectors) {
      valid = expert0 + v % 2 * 8 + group < p.experts && k < p.hidden;
      return valid ? weights + v / 2 * next_term + v % 2 * next_tile : parts;
    }
    const int tile = v - Shape::kWeightVectors;
    valid = token0 + tile * 8 + group < p.tokens && k < p.hidden;
    return valid ? tokens + tile * next_tile : x;
  };
  const auto move_on = [&] {
    k += step_hidden;
    weights += step_hidden;
    tokens += step_hidden;
  };

  float totals[TokenTiles][4] = {};
  float sums[TokenTiles][4] = {};  // of three terms
  float firsts[TokenTiles][4] = {};
  float rests[TokenTiles][4] = {};  // of three terms
  const auto move = [](float (&from)[TokenTiles][4], float (&to)[TokenTiles][4]) {
#pragma unroll
    for (int t = 0; t < TokenTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[t][i] += from[t][i];
        from[t][i] = 0.0f;
      }
    }
  };
  const auto move_to_totals = [&] {
    if constexpr (Shape::kExact) {
      move(firsts, sums);
      move(rests, sums);
      move(sums, totals);
    } else {
      move(firsts, totals);
    }
  };
  const auto multiply_step = [&](const Pairs(&v)[Shape::kVectors], int turn) {
    constexpr float kFactor[3] = {1.0f, 1.0f / 256, 1.0f / 65536};
#pragma unroll
    for (int i = 0; i < Terms; ++i) {
      auto& into = Shape::kExact && i > 0 ? rests : firsts;
      Pairs low = v[2 * i];
      Pairs high = v[2 * i + 1];
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
    if (Shape::kExact && turn % Shape::kStepsOfFirst == Shape::kStepsOfFirst - 1) {
      move(firsts, sums);
    }
    if (turn % Shape::kStepsOfTotal == Shape::kStepsOfTotal - 1) move_to_totals();
  };

  // Nothing may be sent to a CTA that has no barrier yet. The wait costs nothing while the first
  // copies are under way.
  const auto open_exchange = [&] {
    if (cluster_log2 == 0) return;
    if (threadIdx.x == 0) {
      init_barrier(memory + Shape::kBarrierAt, 1);
      fence_barrier_init();
      arrive_expecting(memory + Shape::kBarrierAt, Shape::kReceivedBytes);
    }
    __syncwarp();
    cluster_arrive_relaxed();
    cluster_wait();
  };

  // All lanes of a warp make the same turns.
  const int turns = first_k < p.hidden ? (p.hidden - 1 - first_k) / step_hidden + 1 : 0;
  if constexpr (Aligned) {
    const SharedAddress ring = memory + static_cast<int>(threadIdx.x) * int{sizeof(Pairs)};
    constexpr int kNextVector = kStreamThreads * int{sizeof(Pairs)};
    const auto fetch = [&](int stage) {
#pragma unroll
      for (int v = 0; v < Shape::kVectors; ++v) {
        bool valid;
        const __nv_bfloat16* from = place_of(v, valid);
        copy_16(ring + stage * Shape::kStageBytes + v * kNextVector, from, valid);
      }
      commit_copies();
      move_on();
    };
#pragma unroll 1
    for (int turn = 0; turn < Shape::kStages; ++turn) {
      if (turn < turns) {
        fetch(turn);
      } else {
        commit_copies();
      }
    }
    open_exchange();
    int stage = 0;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      wait_copies<Shape::kStages - 1>();
      const auto* from = reinterpret_cast<const Pairs*>(stream_memory) + threadIdx.x +
                         stage * Shape::kVectors * kStreamThreads;
      Pairs v[Shape::kVectors];
#pragma unroll
      for (int i = 0; i < Shape::kVectors; ++i) v[i] = from[i * kStreamThreads];
      multiply_step(v, turn);
      if (turn + Shape::kStages < turns) {
        fetch(stage);
      } else {
        commit_copies();
      }
      stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
    }
  } else {
    open_exchange();
    for (int turn = 0; turn < turns; ++turn) {
      Pairs v[Shape::kVectors];
#pragma unroll
      for (int i = 0; i < Shape::kVectors; ++i) {
        bool valid;
        const __nv_bfloat16* from = place_of(i, valid);
        v[i] = load_unaligned(from, valid ? p.hidden - k : 0);
      }
      multiply_step(v, turn);
      move_on();
    }
  }
  let_next_kernel_start();
  move_to_totals();

  // The warps' sums side by side in shared memory: [warp][token][expert].
  float4* partials = stream_memory + Shape::kPartialsAt / int{sizeof(float4)};
#pragma unroll
  for (int t = 0; t < TokenTiles; ++t) {
    float* to = reinterpret_cast<float*>(partials) + warp * Shape::kPartials +
                (8 * t + 2 * quad) * Shape::kRow + group;
#pragma unroll
    for (int i = 0; i < 4; ++i) to[(i % 2) * Shape::kRow + (i / 2) * 8] = totals[t][i];
  }
  __syncthreads();
  const int unit = static_cast<int>(threadIdx.x);
  if (unit >= Shape::kUnits) return;

  const auto add_warps = [&](int unit) {
    const float4* from =
        partials + unit / Shape::kUnitsOfRow * (Shape::kRow / 4) + unit % Shape::kUnitsOfRow;
    float4 sum = from[0];
#pragma unroll
    for (int i = 1; i < kStreamWarps; ++i) sum = add(sum, from[i * Shape::kPartials / 4]);
    return sum;
  };
  const auto write = [&](int unit, float4 sum) {
    const int token = token0 + unit / Shape::kUnitsOfRow;
    if (token >= p.tokens) return;
    write_logits(logits, p, token, expert0 + unit % Shape::kUnitsOfRow * 4, sum);
  };
  if (cluster_log2 == 0) {
    write(unit, add_warps(unit));
    return;
  }
  // Each CTA owns a slice of the tile and is sent everybody's sums of it: [sender][unit].
  constexpr int kUnitsLog2 = log2_of(Shape::kUnits);
  const int slice_log2 = kUnitsLog2 - cluster_log2;
  const auto owner = static_cast<uint32_t>(unit >> slice_log2);
  const int place = (rank << slice_log2) + (unit & ((1 << slice_log2) - 1));
  send(address_in_cluster(memory + Shape::kReceivedAt + place * int{sizeof(float4)}, owner),
       add_warps(unit), address_in_cluster(memory + Shape::kBarrierAt, owner));
  if (unit >= 1 << slice_log2) return;
  wait_for_cluster(memory + Shape::kBarrierAt, 0);
  const float4 sum = add_senders(memory + Shape::kReceivedAt + unit * int{sizeof(float4)},
                                 int{sizeof(float4)} << slice_log2, cluster_log2);
  write((rank << slice_log2) + unit, sum);
}

}  // namespace jax_hpc::router_gemm
