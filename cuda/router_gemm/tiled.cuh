// The router product on warpgroups: the copy engine fills a ring of tiles in shared memory,
// consumer warpgroups multiply them, and the CTAs of a cluster share the hidden axis.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include "common/launch.h"
#include "common/ptx.cuh"
#include "common/wgmma.cuh"
#include "router_gemm/config.h"
#include "router_gemm/exchange.cuh"

namespace jax_hpc::router_gemm {

constexpr int kWarpgroupTokens = 64;
constexpr int kTileHidden = 64;  // 128 bytes: one row of the swizzle
constexpr int kRowBytes = kTileHidden * 2;

// The tensor cores round sums towards zero, so a long sum of positive terms comes out low. One and
// two terms claim 2^-16: their sums move to float32 registers every 512 hidden values. Three terms
// claim 2^-21: there the first term's move every 64, the other two's, 256 times smaller, every 512,
// and the sums over 512 are added up in shared memory, since 96 additions in a row lose too much.
template <int Terms, int Experts, int Tokens>
struct TiledShape {
  static constexpr bool kExact = Terms == 3;
  static constexpr int kConsumers = Tokens / kWarpgroupTokens;
  static constexpr int kConsumerThreads = kConsumers * kWarpgroup;
  // Two warps fill the ring, one with weights, one with activations. Two consumers need more
  // registers than an equal share: there a whole warpgroup stands behind, to hand over its own.
  static constexpr bool kMovesRegisters = kConsumers > 1;
  static constexpr int kThreads = kConsumerThreads + (kMovesRegisters ? kWarpgroup : 2 * kWarpSize);
  static constexpr int kRows = Terms * Experts;  // of the weight tile: all experts of each term
  // The first product is of the first term alone, or of all terms at once.
  static constexpr int kFirstWidth = kExact ? Experts : kRows;
  static constexpr int kRestWidth = kExact ? 2 * Experts : 8;
  static constexpr int kTurnsPerSum = 512 / kTileHidden;
  // Sums that take turns, where registers last: a narrow product takes less time than its sum needs
  // to be ready for the next. At H 4096, E 192 and 64 tokens: 4.19 us with one, 4.09 with four.
  static constexpr int kSumRegisters = (kFirstWidth + (kExact ? kRestWidth : 0)) / 2;
  static constexpr int kChains =
      kConsumers > 1 || kSumRegisters > 64 ? 1 : (kSumRegisters > 32 ? 2 : 4);

  static constexpr int kTokenBytes = Tokens * kRowBytes;
  static constexpr int kWeightBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kTokenBytes + kWeightBytes;
  static constexpr int kTotals = Experts / 2;  // floats of one thread
  static constexpr int kTotalBytes = kExact ? kConsumerThreads * kTotals * int{sizeof(float)} : 0;
  // Sums that the cluster's CTAs send here. In a place of their own they need not wait until this
  // CTA is done with its ring; large ones have no room for that and lie in the ring.
  static constexpr bool kReceivesApart = kConsumers == 1;
  static constexpr int kReceivedBytes = Tokens * Experts * int{sizeof(float)};
  static constexpr int kApartBytes = kReceivesApart ? kReceivedBytes : 0;
  // A small tile has all its hidden values under way at once, or 768 of them.
  static constexpr int kMostStages = 12;
  static constexpr int kStagesThatFit = (224 * 1024 - kTotalBytes - kApartBytes) / kStageBytes;
  static constexpr int kStages = kStagesThatFit < kMostStages ? kStagesThatFit : kMostStages;

  // Shared memory from the first multiple of kAlignment on: the ring, what the cluster sends, the
  // totals of three terms, the barriers of full and empty stages and of what is sent.
  static constexpr int kAlignment = 1024;
  static constexpr int kReceivedAt = kReceivesApart ? kStages * kStageBytes : 0;
  static constexpr int kTotalsAt = kStages * kStageBytes + kApartBytes;
  static constexpr int kBarrierBytes = int{sizeof(uint64_t)};
  static constexpr int kFullAt = kTotalsAt + kTotalBytes;
  static constexpr int kEmptyAt = kFullAt + kStages * kBarrierBytes;
  static constexpr int kArrivedAt = kEmptyAt + kStages * kBarrierBytes;
  static constexpr int kSharedBytes = kArrivedAt + kBarrierBytes + kAlignment;
  static_assert(kRows % 8 == 0 && kFirstWidth <= 256 && kRestWidth <= 256, "widths of wgmma");
  static_assert(kStageBytes % kAlignment == 0, "tiles start at multiples of the swizzle");
  static_assert(kReceivesApart || kReceivedBytes <= kStages * kStageBytes, "room for the sums");
};

// A stage of the ring and the parity of its barriers' phase.
template <int Stages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Grid: x = expert tiles << cluster_log2, y = token tiles. `box_tokens` rows of a token tile are
// copied; the rows behind them hold anything, and so do their sums.
template <int Terms, int Experts, int Tokens>
__global__ void __launch_bounds__(TiledShape<Terms, Experts, Tokens>::kThreads, 1)
    tiled_kernel(Problem p, int cluster_log2, int box_tokens,
                 const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap parts_map, float* __restrict__ logits) {
  using Shape = TiledShape<Terms, Experts, Tokens>;
  constexpr int kProducerRegisters = 24;
  constexpr int kConsumerRegisters = 240;

  extern __shared__ uint8_t tile_memory[];
  const uint32_t misaligned = shared_address(tile_memory) % Shape::kAlignment;
  const uint32_t skipped = misaligned ? Shape::kAlignment - misaligned : 0;
  const SharedAddress memory = shared_address(tile_memory) + skipped;
  const auto full_at = [](SharedAddress memory, int stage) {
    return memory + Shape::kFullAt + stage * Shape::kBarrierBytes;
  };
  const auto empty_at = [](SharedAddress memory, int stage) {
    return memory + Shape::kEmptyAt + stage * Shape::kBarrierBytes;
  };

  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int rank = cluster_log2 > 0 ? static_cast<int>(cluster_rank()) : 0;
  const int expert0 = (static_cast<int>(blockIdx.x) >> cluster_log2) * Experts;
  const int token0 = static_cast<int>(blockIdx.y) * Tokens;
  const int tiles = ceil_div(p.hidden, kTileHidden);
  const int first = static_cast<int>(int64_t{tiles} * rank >> cluster_log2);
  const int turns = static_cast<int>(int64_t{tiles} * (rank + 1) >> cluster_log2) - first;
  const bool refills = turns > Shape::kStages;
  // Each CTA owns some token rows of the tile and is sent everybody's sums of them.
  constexpr int kTokensLog2 = log2_of(Tokens);
  const int owned_log2 = kTokensLog2 - cluster_log2;
  const int row_count = min(p.tokens - token0, Tokens);
  const int owned_rows = min(max(row_count - (rank << owned_log2), 0), 1 << owned_log2);

  constexpr int kWeightWarp = Shape::kConsumerThreads / kWarpSize;
  constexpr int kTokenWarp = kWeightWarp + 1;
  const auto copy_weights = [&](int turn, int stage) {
    arrive_expecting(full_at(memory, stage), Shape::kWeightBytes);
    copy_tile(memory + stage * Shape::kStageBytes + Shape::kTokenBytes, &parts_map,
              full_at(memory, stage), (first + turn) * kTileHidden, expert0, 0);
  };
  const auto copy_tokens = [&](int turn, int stage) {
    arrive_expecting(full_at(memory, stage), static_cast<uint32_t>(box_tokens * kRowBytes));
    copy_tile(memory + stage * Shape::kStageBytes, &x_map, full_at(memory, stage),
              (first + turn) * kTileHidden, token0);
  };
  const bool produces = (warp == kWeightWarp || warp == kTokenWarp) && elect_one();
  if (warp == kWeightWarp || warp == kTokenWarp) {
    // Barriers by unrolled loops of single threads, for every step of a loop would be fenced: 40
    // ns.
    if (produces && warp == kWeightWarp) {
#pragma unroll
      for (int i = 0; i < Shape::kStages; ++i) init_barrier(full_at(memory, i), 2);
      fence_barrier_init();
    } else if (produces) {
      init_barrier(memory + Shape::kArrivedAt, 1);
      if (refills) {
#pragma unroll
        for (int i = 0; i < Shape::kStages; ++i) {
          init_barrier(empty_at(memory, i), Shape::kConsumerThreads / kWarpSize);
        }
      }
      fence_barrier_init();
    }
    sync_threads<2 * kWarpSize>(1);
    // The first copies by loops of their own: there all is known to be the same for the whole warp,
    // which takes half the instructions.
    const int at_once = min(turns, Shape::kStages);
    if (produces && warp == kWeightWarp) {
      for (int turn = 0; turn < at_once; ++turn) copy_weights(turn, turn);
      let_next_kernel_start();
    } else if (produces) {
      for (int turn = 0; turn < at_once; ++turn) copy_tokens(turn, turn);
      arrive_expecting(memory + Shape::kArrivedAt,
                       static_cast<uint32_t>(owned_rows * Experts * int{sizeof(float)})
                           << cluster_log2);
    }
  }
  __syncthreads();
  // Nothing may be sent to a CTA that has no barrier yet. Asked now, needed much later.
  if (cluster_log2 > 0) cluster_arrive_relaxed();

  if (warp >= kWeightWarp) {
    if constexpr (Shape::kMovesRegisters) leave_registers<kProducerRegisters>();
    if (produces) {
      RingPlace<Shape::kStages> place;
#pragma unroll 1
      for (int turn = Shape::kStages; turn < turns; ++turn, place.advance()) {
        wait(empty_at(memory, place.stage), place.parity);
        if (warp == kWeightWarp) {
          copy_weights(turn, place.stage);
        } else {
          copy_tokens(turn, place.stage);
        }
      }
    }
    __syncwarp();
    if (cluster_log2 > 0) {
      cluster_wait();
      if constexpr (!Shape::kReceivesApart) {
        cluster_arrive_relaxed();
        cluster_wait();
      }
    }
    return;
  }

  // consumers
  if constexpr (Shape::kMovesRegisters) take_registers<kConsumerRegisters>();
  // By way of a shuffle, so that it stays in a register: the compiler would otherwise derive it
  // again in every turn, which takes longer than a narrow product.
  const SharedAddress kept = __shfl_sync(0xffffffff, memory, 0);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int consumer = warp / (kWarpgroup / kWarpSize);
  // Products still in the tensor cores' sums: of the first term or all of them, of the rest.
  float first_products[Shape::kChains][Shape::kFirstWidth / 2] = {};
  float rest_products[Shape::kChains][Shape::kRestWidth / 2] = {};
  float sums[Experts / 2] = {};
  float* totals =  // [i][thread]
      reinterpret_cast<float*>(tile_memory + skipped + Shape::kTotalsAt) + threadIdx.x;

  constexpr int kUnit = 16;  // bytes of a descriptor's unit; 16 hidden values are two
  const uint32_t first_tokens = swizzled_tile(kept + consumer * kWarpgroupTokens * kRowBytes);
  const uint32_t first_weights = swizzled_tile(kept + Shape::kTokenBytes);
  const auto multiply_tile = [&](int stage, bool continues) {
    const uint32_t a = first_tokens + stage * (Shape::kStageBytes / kUnit);
    const uint32_t b = first_weights + stage * (Shape::kStageBytes / kUnit);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileHidden / 16; ++k) {
      const bool adds = k >= Shape::kChains || (continues && !Shape::kExact);
      Wgmma<Shape::kFirstWidth>::multiply(first_products[k % Shape::kChains], descriptor(a + 2 * k),
                                          descriptor(b + 2 * k), adds);
    }
    wgmma_commit();
    if constexpr (Shape::kExact) {
      const uint32_t rest = b + Experts * kRowBytes / kUnit;
#pragma unroll
      for (int k = 0; k < kTileHidden / 16; ++k) {
        Wgmma<Shape::kRestWidth>::multiply(rest_products[k % Shape::kChains], descriptor(a + 2 * k),
                                           descriptor(rest + 2 * k),
                                           continues || k >= Shape::kChains);
      }
      wgmma_commit();
    }
  };
  const auto add_chains = [&](const auto& products, int i) {
    float sum = products[0][i];
#pragma unroll
    for (int chain = 1; chain < Shape::kChains; ++chain) sum += products[chain][i];
    return sum;
  };
  // What is summed outside the tensor cores after 512 hidden values.
  const auto fold = [&](bool is_first) {
#pragma unroll
    for (int i = 0; i < Experts / 2; ++i) {
      if constexpr (Shape::kExact) {
        const float second = add_chains(rest_products, i);
        const float third = add_chains(rest_products, Experts / 2 + i);
        const float sum = (second + third / 256) / 256 + sums[i];
        sums[i] = 0.0f;
        float* total = totals + i * Shape::kConsumerThreads;
        *total = is_first ? sum : *total + sum;
      } else {
        float sum = add_chains(first_products, i);
        if constexpr (Terms == 2) sum += add_chains(first_products, Experts / 2 + i) / 256;
        sums[i] += sum;
      }
    }
  };
  // Every warp tells that it is done with a stage: one may still read what another has left.
  const auto release = [&](int stage) {
    if (lane == 0 && refills) arrive(empty_at(kept, stage));
  };

  if (cluster_log2 > 0) cluster_wait();  // passed long before the first tile is there
  RingPlace<Shape::kStages> place;
  for (int start = 0; start < turns; start += Shape::kTurnsPerSum) {
    const int end = min(start + Shape::kTurnsPerSum, turns);
    int last_stage = 0;
#pragma unroll 1
    for (int turn = start; turn < end; ++turn, place.advance()) {
      wait(full_at(kept, place.stage), place.parity);
      multiply_tile(place.stage, turn > start);
      wgmma_wait<1>();
      if (turn > start) release(last_stage);
      last_stage = place.stage;
      if constexpr (Shape::kExact) {
        // The rest's products run on meanwhile.
#pragma unroll
        for (int i = 0; i < Experts / 2; ++i) sums[i] += add_chains(first_products, i);
      }
    }
    wgmma_wait<0>();
    release(last_stage);
    fold(start == 0);
  }
  if constexpr (Shape::kExact) {
#pragma unroll
    for (int i = 0; i < Experts / 2; ++i) {
      sums[i] = turns > 0 ? totals[i * Shape::kConsumerThreads] : 0.0f;
    }
  }

  // A thread holds the logits of two rows, 16 * warp + lane / 4 and eight below: half 0 and 1.
  const int row0 = warp * 16 + lane / 4;
  const int column0 = lane % 4 * 2;
  if (cluster_log2 == 0) {
#pragma unroll
    for (int i = 0; i < Experts / 4; ++i) {
      const int row = row0 + i % 2 * 8;
      const int expert = expert0 + i / 2 * 8 + column0;
      if (row >= row_count || expert >= p.experts) continue;
      float* to = logits + static_cast<int64_t>(token0 + row) * p.experts + expert;
      if (p.experts % 2 == 0) {
        *reinterpret_cast<float2*>(to) = {sums[2 * i], sums[2 * i + 1]};
      } else {
        to[0] = sums[2 * i];
        if (expert + 1 < p.experts) to[1] = sums[2 * i + 1];
      }
    }
    return;
  }

  // [sender][owned row][expert]
  if constexpr (!Shape::kReceivesApart) {
    cluster_arrive_relaxed();  // nobody reads or fills a ring any more
    cluster_wait();
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row0 + half * 8;
    if (row >= row_count) break;
    const auto owner = static_cast<uint32_t>(row >> owned_log2);
    const int place_there = (rank << owned_log2) + (row & ((1 << owned_log2) - 1));
    const SharedAddress there = address_in_cluster(
        kept + Shape::kReceivedAt + (place_there * Experts + column0) * int{sizeof(float)}, owner);
    const SharedAddress barrier_there = address_in_cluster(kept + Shape::kArrivedAt, owner);
#pragma unroll
    for (int i = 0; i < Experts / 8; ++i) {
      send(there + i * 8 * int{sizeof(float)},
           float2{sums[4 * i + 2 * half], sums[4 * i + 2 * half + 1]}, barrier_there);
    }
  }
  if (owned_rows == 0) return;
  wait_for_cluster(kept + Shape::kArrivedAt, 0);
  constexpr int kUnitsOfRow = Experts / 4;
  constexpr int kUnitBytes = int{sizeof(float4)};
#pragma unroll 1
  for (int unit = static_cast<int>(threadIdx.x); unit < owned_rows * kUnitsOfRow;
       unit += Shape::kConsumerThreads) {
    const float4 sum = add_senders(kept + Shape::kReceivedAt + unit * kUnitBytes,
                                   (kUnitsOfRow * kUnitBytes) << owned_log2, cluster_log2);
    write_logits(logits, p, token0 + (rank << owned_log2) + unit / kUnitsOfRow,
                 expert0 + unit % kUnitsOfRow * 4, sum);
  }
}

}  // namespace jax_hpc::router_gemm
