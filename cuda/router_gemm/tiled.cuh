// Router product for many tokens: the copy engine fills a ring of tiles in shared memory, two
// consumer warpgroups multiply them, and the CTAs of a cluster share the hidden axis.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include "common/launch.h"
#include "common/ptx.cuh"
#include "common/wgmma.cuh"
#include "router_gemm/config.h"

namespace jax_hpc::router_gemm {

constexpr int kTileTokens = 128;
constexpr int kTileHidden = 64;  // 128 bytes: one row of the swizzle
constexpr int kConsumers = 2;    // warpgroups, 64 tokens each
constexpr int kTiledThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kRowBytes = kTileHidden * 2;

// The tensor cores round sums towards zero, so a long sum of positive terms comes out low. One and
// two terms claim 2^-16: their sums move to float32 registers every 512 hidden values. Three terms
// claim 2^-21: there the first term's move every 64, the other two's, 256 times smaller, every 512,
// and the sums over 512 are added up in shared memory, since 96 additions in a row lose too much.
template <int Terms, int Experts>
struct TiledShape {
  static constexpr bool kExact = Terms == 3;
  static constexpr int kRows = Terms * Experts;  // of the weight tile: all experts of each term
  // The first product is of the first term alone, or of all terms at once.
  static constexpr int kFirstWidth = kExact ? Experts : kRows;
  static constexpr int kRestWidth = kExact ? 2 * Experts : 8;
  static constexpr int kTurnsPerSum = 512 / kTileHidden;
  static constexpr int kTokenBytes = kTileTokens * kRowBytes;
  static constexpr int kWeightBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kTokenBytes + kWeightBytes;
  static constexpr int kTotals = Experts / 2;  // floats of one thread
  static constexpr int kTotalBytes =
      kExact ? kConsumers * kWarpgroup * kTotals * int{sizeof(float)} : 0;
  static constexpr int kAlignment = 1024;
  static constexpr int kStages = (224 * 1024 - kTotalBytes) / kStageBytes;
  static constexpr int kBarrierBytes = 2 * kStages * int{sizeof(uint64_t)};
  static constexpr int kReceivedBytes = kTileTokens * Experts * int{sizeof(float)};
  static constexpr int kSharedBytes =
      kStages * kStageBytes + kTotalBytes + kBarrierBytes + kAlignment;
  static_assert(kRows % 8 == 0 && kFirstWidth <= 256 && kRestWidth <= 256, "widths of wgmma");
  static_assert(kStageBytes % kAlignment == 0, "tiles start at multiples of the swizzle");
  static_assert(kReceivedBytes <= kStages * kStageBytes, "the ring holds the cluster's sums");
};

// Grid: x = expert tiles * cluster, y = token tiles.
template <int Terms, int Experts>
__global__ void __launch_bounds__(kTiledThreads, 1)
    tiled_kernel(Problem p, int cluster, const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap parts_map, float* __restrict__ logits) {
  using Shape = TiledShape<Terms, Experts>;
  constexpr int kProducerRegisters = 24;
  constexpr int kConsumerRegisters = 240;

  // Shared memory: the ring of tiles, the totals of three terms, the ring's barriers.
  extern __shared__ uint8_t unaligned[];
  const uint32_t misalignment = shared_address(unaligned) % Shape::kAlignment;
  uint8_t* ring = unaligned + (misalignment ? Shape::kAlignment - misalignment : 0);
  float* totals = reinterpret_cast<float*>(ring + Shape::kStages * Shape::kStageBytes);
  uint64_t* full = reinterpret_cast<uint64_t*>(totals + Shape::kTotalBytes / int{sizeof(float)});
  uint64_t* empty = full + Shape::kStages;

  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  const int rank = cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int expert0 = static_cast<int>(blockIdx.x) / cluster * Experts;
  const int token0 = static_cast<int>(blockIdx.y) * kTileTokens;
  const int tiles = ceil_div(p.hidden, kTileHidden);
  const int first = tiles * rank / cluster;
  const int last = tiles * (rank + 1) / cluster;

  if (threadIdx.x == 0) {
    prefetch_descriptor(&x_map);
    prefetch_descriptor(&parts_map);
    for (int i = 0; i < Shape::kStages; ++i) {
      init_barrier(&full[i], 1);
      init_barrier(&empty[i], kConsumers * kWarpgroup / kWarpSize);
    }
    fence_barrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {  // producer
    leave_registers<kProducerRegisters>();
    if (threadIdx.x < kWarpSize && elect_one()) {
      for (int tile = first; tile < last; ++tile) {
        const int turn = tile - first;
        const int stage = turn % Shape::kStages;
        const int round = turn / Shape::kStages;
        if (round > 0) wait(&empty[stage], static_cast<uint32_t>(round - 1) & 1u);
        arrive_expecting(&full[stage], Shape::kStageBytes);
        uint8_t* to = ring + stage * Shape::kStageBytes;
        copy_tile(to, &x_map, &full[stage], tile * kTileHidden, token0);
        copy_tile(to + Shape::kTokenBytes, &parts_map, &full[stage], tile * kTileHidden, expert0,
                  0);
      }
    }
    __syncwarp();
    if (cluster > 1) {
      cluster_arrive();
      cluster_wait();
      cluster_arrive();
      cluster_wait();
    }
    return;
  }

  // consumers
  take_registers<kConsumerRegisters>();
  const int consumer = warpgroup - 1;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int lane = thread % kWarpSize;
  // Products still in the tensor cores' sums: of the first term or all of them, of the rest.
  float first_products[Shape::kFirstWidth / 2] = {};
  float rest_products[Shape::kRestWidth / 2] = {};
  float sums[Experts / 2] = {};
  totals += static_cast<int>(threadIdx.x) - kWarpgroup;  // [i][thread]
  constexpr int kNextTotal = kConsumers * kWarpgroup;

  const auto multiply_tile = [&](int stage, bool continues) {
    const uint8_t* tokens = ring + stage * Shape::kStageBytes + consumer * 64 * kRowBytes;
    const uint8_t* weights = ring + stage * Shape::kStageBytes + Shape::kTokenBytes;
    const uint64_t a = swizzled_tile(tokens);
    const uint64_t b = swizzled_tile(weights);
    wgmma_fence();
    // 16 hidden values are 32 bytes, two of the descriptor's units of 16.
#pragma unroll
    for (int k = 0; k < kTileHidden / 16; ++k) {
      const bool adds = Shape::kExact ? k > 0 : continues || k > 0;
      Wgmma<Shape::kFirstWidth>::multiply(first_products, a + 2 * k, b + 2 * k, adds);
    }
    wgmma_commit();
    if constexpr (Shape::kExact) {
      const uint64_t rest = swizzled_tile(weights + Experts * kRowBytes);
#pragma unroll
      for (int k = 0; k < kTileHidden / 16; ++k) {
        Wgmma<Shape::kRestWidth>::multiply(rest_products, a + 2 * k, rest + 2 * k,
                                           continues || k > 0);
      }
      wgmma_commit();
    }
  };
  // What is summed outside the tensor cores after 512 hidden values.
  const auto fold = [&](bool is_first) {
#pragma unroll
    for (int i = 0; i < Experts / 2; ++i) {
      if constexpr (Shape::kExact) {
        const float rest =
            (rest_products[i] + rest_products[Experts / 2 + i] / 256) / 256 + sums[i];
        sums[i] = 0.0f;
        totals[i * kNextTotal] = is_first ? rest : totals[i * kNextTotal] + rest;
      } else {
        float sum = first_products[i];
        if constexpr (Terms == 2) sum += first_products[Experts / 2 + i] / 256;
        sums[i] += sum;
      }
    }
  };
  // Every warp tells that it is done with a stage: one may still read what another has left.
  const auto release = [&](int turn) {
    if (lane == 0) arrive(&empty[turn % Shape::kStages]);
  };

  const int turns = last - first;
  for (int start = 0; start < turns; start += Shape::kTurnsPerSum) {
    const int end = min(start + Shape::kTurnsPerSum, turns);
    for (int turn = start; turn < end; ++turn) {
      const int stage = turn % Shape::kStages;
      wait(&full[stage], static_cast<uint32_t>(turn / Shape::kStages) & 1u);
      multiply_tile(stage, turn > start);
      wgmma_wait<1>();
      if (turn > start) release(turn - 1);
      if constexpr (Shape::kExact) {
        // The rest's products run on meanwhile.
#pragma unroll
        for (int i = 0; i < Experts / 2; ++i) sums[i] += first_products[i];
      }
    }
    wgmma_wait<0>();
    release(end - 1);
    fold(start == 0);
  }
  if constexpr (Shape::kExact) {
#pragma unroll
    for (int i = 0; i < Experts / 2; ++i) sums[i] = turns > 0 ? totals[i * kNextTotal] : 0.0f;
  }

  // A thread holds the logits of two rows, 16 * warp + lane / 4 and eight below.
  const int row0 = consumer * 64 + thread / kWarpSize * 16 + lane / 4;
  const int column0 = lane % 4 * 2;
  const auto write = [&](int row, int column, float2 value) {
    const int token = token0 + row;
    const int expert = expert0 + column;
    if (token >= p.tokens || expert >= p.experts) return;
    float* to = logits + static_cast<int64_t>(token) * p.experts + expert;
    if (p.experts % 2 == 0) {
      *reinterpret_cast<float2*>(to) = value;
    } else {
      to[0] = value.x;
      if (expert + 1 < p.experts) to[1] = value.y;
    }
  };
  if (cluster == 1) {
#pragma unroll
    for (int i = 0; i < Experts / 4; ++i) {
      write(row0 + i % 2 * 8, i / 2 * 8 + column0, {sums[2 * i], sums[2 * i + 1]});
    }
    return;
  }

  // Each CTA owns some rows of the tile and is sent everybody's sums of them:
  // [sender][row][expert], in the ring, which no copy fills any more once all CTAs are here.
  const int rows = kTileTokens / cluster;
  cluster_arrive();
  cluster_wait();
#pragma unroll
  for (int i = 0; i < Experts / 4; ++i) {
    const int row = row0 + i % 2 * 8;
    const float* place = reinterpret_cast<const float*>(ring) +
                         (rank * rows + row % rows) * Experts + i / 2 * 8 + column0;
    store_in_cluster(address_in_cluster(place, static_cast<uint32_t>(row / rows)),
                     float2{sums[2 * i], sums[2 * i + 1]});
  }
  cluster_arrive();
  cluster_wait();
  const float2* received = reinterpret_cast<const float2*>(ring);
  const int pairs = rows * Experts / 2;
  for (int i = consumer * kWarpgroup + thread; i < pairs; i += kConsumers * kWarpgroup) {
    float2 sum = received[i];
    for (int sender = 1; sender < cluster; ++sender) {
      const float2 next = received[sender * pairs + i];
      sum = {sum.x + next.x, sum.y + next.y};
    }
    write(rank * rows + i / (Experts / 2), i % (Experts / 2) * 2, sum);
  }
}

}  // namespace jax_hpc::router_gemm
