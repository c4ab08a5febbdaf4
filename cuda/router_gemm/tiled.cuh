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
  static constexpr int kTerms = Terms;
  static constexpr int kExperts = Experts;
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
  // Up to 12 tiles of 64 hidden values are under way at once.
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

// Where things lie in a CTA's shared memory, from the first multiple of kAlignment on.
template <class Shape>
struct TileMemory {
  SharedAddress start;

  __device__ __forceinline__ SharedAddress full(int stage) const {
    return start + Shape::kFullAt + stage * Shape::kBarrierBytes;
  }
  __device__ __forceinline__ SharedAddress empty(int stage) const {
    return start + Shape::kEmptyAt + stage * Shape::kBarrierBytes;
  }
  __device__ __forceinline__ SharedAddress arrived() const { return start + Shape::kArrivedAt; }
  __device__ __forceinline__ SharedAddress tokens(int stage) const {
    return start + stage * Shape::kStageBytes;
  }
  __device__ __forceinline__ SharedAddress weights(int stage) const {
    return tokens(stage) + Shape::kTokenBytes;
  }
  __device__ __forceinline__ SharedAddress received() const { return start + Shape::kReceivedAt; }
};

// What a CTA does: the experts, tokens and tiles of the hidden axis that it multiplies, and the
// token rows whose sums it is sent by the whole cluster and writes.
struct Share {
  int cluster_log2;
  int rank;  // in the cluster
  int expert0;
  int token0;
  int first_tile;
  int turns;       // tiles of the hidden axis
  int row_count;   // tokens that exist
  int owned_log2;  // of the rows that a CTA owns
  int owned_rows;  // of them that exist
  int box_tokens;  // rows that are copied
};

template <int Experts, int Tokens>
__device__ __forceinline__ Share share_of_cta(const Problem& p, int cluster_log2, int box_tokens) {
  Share s;
  s.cluster_log2 = cluster_log2;
  s.box_tokens = box_tokens;
  s.rank = cluster_log2 > 0 ? static_cast<int>(cluster_rank()) : 0;
  s.expert0 = (static_cast<int>(blockIdx.x) >> cluster_log2) * Experts;
  s.token0 = static_cast<int>(blockIdx.y) * Tokens;
  const int tiles = ceil_div(p.hidden, kTileHidden);
  s.first_tile = static_cast<int>(int64_t{tiles} * s.rank >> cluster_log2);
  s.turns = static_cast<int>(int64_t{tiles} * (s.rank + 1) >> cluster_log2) - s.first_tile;
  s.row_count = min(p.tokens - s.token0, Tokens);
  constexpr int kTokensLog2 = log2_of(Tokens);
  s.owned_log2 = kTokensLog2 - cluster_log2;
  s.owned_rows = min(max(s.row_count - (s.rank << s.owned_log2), 0), 1 << s.owned_log2);
  return s;
}

// The copies of one of the two producer warps, weights or activations.
template <class Shape>
struct Producer {
  const TileMemory<Shape>& memory;
  const Share& share;
  const CUtensorMap* map;

  __device__ __forceinline__ void copy_weights(int turn, int stage) const {
    arrive_expecting(memory.full(stage), Shape::kWeightBytes);
    copy_tile(memory.weights(stage), map, memory.full(stage),
              (share.first_tile + turn) * kTileHidden, share.expert0, 0);
  }
  __device__ __forceinline__ void copy_tokens(int turn, int stage) const {
    arrive_expecting(memory.full(stage), static_cast<uint32_t>(share.box_tokens * kRowBytes));
    copy_tile(memory.tokens(stage), map, memory.full(stage),
              (share.first_tile + turn) * kTileHidden, share.token0);
  }
};

// By the two producer warps: barriers, and as many copies as there are stages. The loops that make
// barriers are unrolled, for every turn of one would be fenced (40 ns), and each kind of copy has a
// loop of its own, where all is known to be the same for the whole warp.
template <class Shape>
__device__ __forceinline__ void start_copies(const TileMemory<Shape>& memory, const Share& share,
                                             bool copies_weights, bool elected,
                                             const CUtensorMap* x_map,
                                             const CUtensorMap* parts_map) {
  if (elected && copies_weights) {
#pragma unroll
    for (int i = 0; i < Shape::kStages; ++i) init_barrier(memory.full(i), 2);
    fence_barrier_init();
  } else if (elected) {
    init_barrier(memory.arrived(), 1);
    if (share.turns > Shape::kStages) {
#pragma unroll
      for (int i = 0; i < Shape::kStages; ++i) {
        init_barrier(memory.empty(i), Shape::kConsumerThreads / kWarpSize);
      }
    }
    fence_barrier_init();
  }
  sync_threads<2 * kWarpSize>(1);
  const int at_once = min(share.turns, Shape::kStages);
  if (elected && copies_weights) {
    const Producer<Shape> producer{memory, share, parts_map};
    for (int turn = 0; turn < at_once; ++turn) producer.copy_weights(turn, turn);
    let_next_kernel_start();
  } else if (elected) {
    const Producer<Shape> producer{memory, share, x_map};
    for (int turn = 0; turn < at_once; ++turn) producer.copy_tokens(turn, turn);
    const int owned_bytes = share.owned_rows * Shape::kExperts * int{sizeof(float)};
    arrive_expecting(memory.arrived(), static_cast<uint32_t>(owned_bytes) << share.cluster_log2);
  }
}

// By one thread of each producer warp: the other copies, as stages become empty.
template <class Shape>
__device__ __forceinline__ void finish_copies(const TileMemory<Shape>& memory, const Share& share,
                                              bool copies_weights, const CUtensorMap* x_map,
                                              const CUtensorMap* parts_map) {
  const Producer<Shape> producer{memory, share, copies_weights ? parts_map : x_map};
  RingPlace<Shape::kStages> place;
#pragma unroll 1
  for (int turn = Shape::kStages; turn < share.turns; ++turn, place.advance()) {
    wait(memory.empty(place.stage), place.parity);
    if (copies_weights) {
      producer.copy_weights(turn, place.stage);
    } else {
      producer.copy_tokens(turn, place.stage);
    }
  }
}

// By a consumer warpgroup: the products of its 64 tokens over the CTA's hidden values. `totals` is
// a place of this thread in shared memory for three terms' sums, [i][thread].
template <class Shape>
__device__ __forceinline__ void multiply_tiles(const TileMemory<Shape>& memory, const Share& share,
                                               int consumer, float* totals,
                                               float (&sums)[Shape::kExperts / 2]) {
  constexpr int kExperts = Shape::kExperts;
  // Products still in the tensor cores' sums: of the first term or all of them, of the rest.
  float first_products[Shape::kChains][Shape::kFirstWidth / 2] = {};
  float rest_products[Shape::kChains][Shape::kRestWidth / 2] = {};

  constexpr int kUnit = 16;  // bytes of a descriptor's unit; 16 hidden values are two
  const uint32_t first_tokens =
      swizzled_tile(memory.tokens(0) + consumer * kWarpgroupTokens * kRowBytes);
  const uint32_t first_weights = swizzled_tile(memory.weights(0));
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
      const uint32_t rest = b + kExperts * kRowBytes / kUnit;
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
    for (int i = 0; i < kExperts / 2; ++i) {
      if constexpr (Shape::kExact) {
        const float second = add_chains(rest_products, i);
        const float third = add_chains(rest_products, kExperts / 2 + i);
        const float sum = (second + third / 256) / 256 + sums[i];
        sums[i] = 0.0f;
        float* total = totals + i * Shape::kConsumerThreads;
        *total = is_first ? sum : *total + sum;
      } else {
        float sum = add_chains(first_products, i);
        if constexpr (Shape::kTerms == 2) {
          sum += add_chains(first_products, kExperts / 2 + i) / 256;
        }
        sums[i] += sum;
      }
    }
  };
  // Every warp tells that it is done with a stage: one may still read what another has left.
  const bool refills = share.turns > Shape::kStages;
  const bool tells = threadIdx.x % kWarpSize == 0 && refills;
  const auto release = [&](int stage) {
    if (tells) arrive(memory.empty(stage));
  };

  RingPlace<Shape::kStages> place;
  for (int start = 0; start < share.turns; start += Shape::kTurnsPerSum) {
    const int end = min(start + Shape::kTurnsPerSum, share.turns);
    int last_stage = 0;
#pragma unroll 1
    for (int turn = start; turn < end; ++turn, place.advance()) {
      wait(memory.full(place.stage), place.parity);
      multiply_tile(place.stage, turn > start);
      wgmma_wait<1>();
      if (turn > start) release(last_stage);
      last_stage = place.stage;
      if constexpr (Shape::kExact) {
        // The rest's products run on meanwhile.
#pragma unroll
        for (int i = 0; i < kExperts / 2; ++i) sums[i] += add_chains(first_products, i);
      }
    }
    wgmma_wait<0>();
    release(last_stage);
    fold(start == 0);
  }
  if constexpr (Shape::kExact) {
#pragma unroll
    for (int i = 0; i < kExperts / 2; ++i) {
      sums[i] = share.turns > 0 ? totals[i * Shape::kConsumerThreads] : 0.0f;
    }
  }
}

// A consumer's thread holds the sums of two rows, 16 * warp + lane / 4 and eight below, half 0 and
// 1, and of two experts in every eight.
struct Fragment {
  int row0;
  int column0;
  __device__ __forceinline__ Fragment(int warp, int lane)
      : row0(warp * 16 + lane / 4), column0(lane % 4 * 2) {}
};

// Without a cluster the sums are the logits.
template <class Shape>
__device__ __forceinline__ void write_sums(const Problem& p, const Share& share,
                                           const Fragment& fragment,
                                           const float (&sums)[Shape::kExperts / 2],
                                           float* logits) {
#pragma unroll
  for (int i = 0; i < Shape::kExperts / 4; ++i) {
    const int row = fragment.row0 + i % 2 * 8;
    const int expert = share.expert0 + i / 2 * 8 + fragment.column0;
    if (row >= share.row_count || expert >= p.experts) continue;
    float* to = logits + static_cast<int64_t>(share.token0 + row) * p.experts + expert;
    if (p.experts % 2 == 0) {
      *reinterpret_cast<float2*>(to) = {sums[2 * i], sums[2 * i + 1]};
    } else {
      to[0] = sums[2 * i];
      if (expert + 1 < p.experts) to[1] = sums[2 * i + 1];
    }
  }
}

// Sends every sum to the CTA that owns its row: [sender][owned row][expert].
template <class Shape>
__device__ __forceinline__ void send_sums(const TileMemory<Shape>& memory, const Share& share,
                                          const Fragment& fragment,
                                          const float (&sums)[Shape::kExperts / 2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = fragment.row0 + half * 8;
    if (row >= share.row_count) break;
    const auto owner = static_cast<uint32_t>(row >> share.owned_log2);
    const int place = (share.rank << share.owned_log2) + (row & ((1 << share.owned_log2) - 1));
    const int offset = (place * Shape::kExperts + fragment.column0) * int{sizeof(float)};
    const SharedAddress there = address_in_cluster(memory.received() + offset, owner);
    const SharedAddress barrier_there = address_in_cluster(memory.arrived(), owner);
#pragma unroll
    for (int i = 0; i < Shape::kExperts / 8; ++i) {
      send(there + i * 8 * int{sizeof(float)},
           float2{sums[4 * i + 2 * half], sums[4 * i + 2 * half + 1]}, barrier_there);
    }
  }
}

// Adds up and writes the owned rows, once everybody's sums of them are here.
template <class Shape>
__device__ __forceinline__ void write_owned_rows(const TileMemory<Shape>& memory, const Problem& p,
                                                 const Share& share, float* logits) {
  if (share.owned_rows == 0) return;
  wait_for_cluster(memory.arrived(), 0);
  constexpr int kUnitsOfRow = Shape::kExperts / 4;
  constexpr int kUnitBytes = int{sizeof(float4)};
#pragma unroll 1
  for (int unit = static_cast<int>(threadIdx.x); unit < share.owned_rows * kUnitsOfRow;
       unit += Shape::kConsumerThreads) {
    const float4 sum =
        add_senders(memory.received() + unit * kUnitBytes,
                    (kUnitsOfRow * kUnitBytes) << share.owned_log2, share.cluster_log2);
    write_logits(logits, p, share.token0 + (share.rank << share.owned_log2) + unit / kUnitsOfRow,
                 share.expert0 + unit % kUnitsOfRow * 4, sum);
  }
}

// The second barrier of a cluster whose sums go into the ring: nobody reads or fills one any more.
// It need not publish anything: the products have read what they needed, or their sums would not be
// there, and the copies have been waited for.
__device__ __forceinline__ void wait_for_rings() {
  cluster_arrive_relaxed();
  cluster_wait();
}

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
  constexpr int kWeightWarp = Shape::kConsumerThreads / kWarpSize;
  constexpr int kTokenWarp = kWeightWarp + 1;

  extern __shared__ uint8_t tile_memory[];
  const uint32_t misaligned = shared_address(tile_memory) % Shape::kAlignment;
  const uint32_t skipped = misaligned ? Shape::kAlignment - misaligned : 0;
  const TileMemory<Shape> memory{shared_address(tile_memory) + skipped};
  const Share share = share_of_cta<Experts, Tokens>(p, cluster_log2, box_tokens);
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const bool copies_weights = warp == kWeightWarp;
  const bool is_producer = copies_weights || warp == kTokenWarp;
  const bool elected = is_producer && elect_one();

  if (is_producer) start_copies(memory, share, copies_weights, elected, &x_map, &parts_map);
  __syncthreads();
  // Nothing may be sent to a CTA that has no barrier yet. Asked now, needed much later.
  if (cluster_log2 > 0) cluster_arrive_relaxed();

  if (warp >= kWeightWarp) {
    if constexpr (Shape::kMovesRegisters) leave_registers<kProducerRegisters>();
    if (elected) finish_copies(memory, share, copies_weights, &x_map, &parts_map);
    __syncwarp();
    if (cluster_log2 > 0) {
      cluster_wait();
      if constexpr (!Shape::kReceivesApart) wait_for_rings();
    }
    return;
  }

  if constexpr (Shape::kMovesRegisters) take_registers<kConsumerRegisters>();
  // By way of a shuffle, so that it stays in a register: the compiler would otherwise derive it
  // again in every turn, which takes longer than a narrow product.
  const TileMemory<Shape> kept{__shfl_sync(0xffffffff, memory.start, 0)};
  float* totals = reinterpret_cast<float*>(tile_memory + skipped + Shape::kTotalsAt) + threadIdx.x;
  float sums[Experts / 2] = {};
  if (cluster_log2 > 0) cluster_wait();  // passed long before the first tile is there
  multiply_tiles<Shape>(kept, share, warp / (kWarpgroup / kWarpSize), totals, sums);

  const Fragment fragment(warp, static_cast<int>(threadIdx.x) % kWarpSize);
  if (cluster_log2 == 0) {
    write_sums<Shape>(p, share, fragment, sums, logits);
    return;
  }
  if constexpr (!Shape::kReceivesApart) wait_for_rings();
  send_sums<Shape>(kept, share, fragment, sums);
  write_owned_rows<Shape>(kept, p, share, logits);
}

}  // namespace jax_hpc::router_gemm
