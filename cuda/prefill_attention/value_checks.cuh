// The warps that look after values before the tensor cores multiply them.
#pragma once

#include "prefill_attention/shared.cuh"

namespace jax_hpc::prefill_attention {

// The tensor cores multiply what a row does not see by zero, and 0 * NaN is NaN. In tiles that hold
// a token hidden from some row, values hidden from all become zeros, and so do tokens whose value
// is not finite: those are noted, and rows that see one become NaN at the end. Values of an fp8
// cache are transposed on the way, those of all tiles.
template <class Cache, int D>
class Checker {
  using Memory = Shared<Cache, D>;
  using TileOf = Tile<Cache, D>;
  static constexpr int kVectors = TileOf::kVectors;
  static constexpr int kRows = kWarpSize / kVectors;  // that a warp looks at together
  static constexpr int kGroup = 16;                   // tokens; a warp has every other group

 public:
  __device__ Checker(const Arguments& a, const Memory& shared, int checker)
      : a_(a), shared_(shared), checker_(checker), lane_(threadIdx.x % kWarpSize) {}

  __device__ __forceinline__ void run() {
    TaskReader<Memory> reader{shared_, {}};
    for (;;) {
      const Task task = reader.next();
      if (task.tile.rows == 0) return;
      const FullTiles full(a_.problem, task.tile);
#pragma unroll 1
      for (int tile = task.tile.last_tile; tile >= task.tile.first_tile; --tile) {
        if constexpr (Memory::kFp8) {
          transpose_tile(task, tile, !full.hold(tile));
        } else {
          check_tile(task, tile, !full.hold(tile));
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void check_tile(const Task& task, int tile, bool hides) {
    // Every tile is waited for and let go of, as by the consumers: a warp that is two phases of a
    // barrier ahead or behind takes another for the one that it waits for.
    wait(shared_.value_full(place_.stage), place_.parity);
    if (hides) {
      check(task, tile * kTileTokens, shared_.value(place_.stage));
      fence_shared_writes();
      release(shared_.value_checked(place_.stage));
    }
    release(shared_.value_empty(place_.stage));
    place_.advance();
  }

  __device__ __forceinline__ void transpose_tile(const Task& task, int tile, bool hides) {
    wait(shared_.raw_full(raw_.stage), raw_.parity);
    wait(shared_.value_empty(place_.stage), place_.parity ^ 1);
    if (hides) check(task, tile * kTileTokens, shared_.raw(raw_.stage));
    __syncwarp();
    transpose(shared_.raw(raw_.stage), shared_.value(place_.stage));
    fence_shared_writes();
    release(shared_.value_checked(place_.stage));
    if (lane_ == 0) arrive(shared_.raw_empty(raw_.stage));
    raw_.advance();
    place_.advance();
  }

  __device__ __forceinline__ static bool is_finite(uint4 v) {
    return (Cache::not_finite(v.x) | Cache::not_finite(v.y) | Cache::not_finite(v.z) |
            Cache::not_finite(v.w)) == 0;
  }

  __device__ __forceinline__ void check(const Task& task, int first_token,
                                        SharedAddress values) const {
    const Sight first(a_.problem, task.tile.first_position);
    const Sight last(a_.problem, task.tile.last_position);
    constexpr uint32_t kLanesOfRow = (1u << kVectors) - 1;
    uint32_t bad = 0;  // in lane w word w of the result
#pragma unroll 1
    for (int group = checker_; group < kTileTokens / kGroup; group += kCheckers) {
#pragma unroll 2
      for (int row0 = group * kGroup; row0 < (group + 1) * kGroup; row0 += kRows) {
        const int row = row0 + lane_ / kVectors;
        const int token = first_token + row;
        const bool hidden_from_all = token > last.position || token < first.lowest;
        const bool seen_by_all = token <= first.position && token >= last.lowest;
        const SharedAddress at = values + TileOf::offset(row, lane_ % kVectors);
        const bool finite = hidden_from_all || seen_by_all || is_finite(load_shared_16(at));
        const uint32_t broken = __ballot_sync(~0u, !finite);
        const bool is_bad = (broken >> (lane_ / kVectors * kVectors) & kLanesOfRow) != 0;
        if (hidden_from_all || is_bad) store_shared_16(at, uint4{0, 0, 0, 0});
        if (broken == 0) continue;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const bool noted =
              (broken >> r * kVectors & kLanesOfRow) != 0 && (row0 + r) / 32 == lane_;
          if (noted) bad |= 1u << (row0 + r) % 32;
        }
      }
    }
    const auto word = [&](int lane) { return __shfl_sync(~0u, bad, lane); };
    const uint4 words{word(0), word(1), word(2), word(3)};
    // One lane writes them, and arrives: see Shared::write.
    if (lane_ == 0) store_shared_16(shared_.bad(place_.stage, checker_), words);
  }

  // 16 tokens and 32 dimensions at a time. ldmatrix moves pairs of neighbouring dimensions; a byte
  // permutation makes of two registers, tokens 2 q, 2 q + 1 and the same eight on, the four values
  // of one dimension. So token 8 b + 2 q + e of a group comes to place 4 q + 2 b + e, which is the
  // order that a lane's probabilities have in theirs.
  __device__ __forceinline__ void transpose(SharedAddress from, SharedAddress to) const {
    const int matrix = lane_ / 8;
    const int row = lane_ % 8;
    // The upper half of the lanes' rows holds odd dimensions first: then eight rows of a matrix
    // fall on different banks.
    const bool swaps = lane_ / 4 >= 4;
    const uint32_t first = swaps ? 0x7531 : 0x6420;
    const uint32_t second = swaps ? 0x6420 : 0x7531;
    const int dimension = matrix / 2 * 16 + 2 * row + (matrix % 2 ^ row / 4);
#pragma unroll 1
    for (int group = checker_; group < kTileTokens / kGroup; group += kCheckers) {
      const int token = group * kGroup + matrix % 2 * 8 + row;
      uint32_t pairs[D / 32][4];
#pragma unroll
      for (int c = 0; c < D / 32; ++c) {
        load_transposed(pairs[c], from + TileOf::offset(token, 2 * c + matrix / 2));
      }
#pragma unroll
      for (int c = 0; c < D / 32; ++c) {
        const uint32_t (&p)[4] = pairs[c];
        const uint32_t columns[4] = {
            __byte_perm(p[0], p[1], first), __byte_perm(p[0], p[1], second),
            __byte_perm(p[2], p[3], first), __byte_perm(p[2], p[3], second)};
        store_matrices(to + TransposedTile::offset(32 * c + dimension, group), columns);
      }
    }
  }

  const Arguments& a_;
  const Memory& shared_;
  int checker_;
  int lane_;
  RingPlace<Cache::kValueStages> place_;
  RingPlace<Cache::kRawStages> raw_;
};

}  // namespace jax_hpc::prefill_attention
