// What a warp reads, on its way through shared memory: copies that no register waits for.
#pragma once

#include <cstddef>

#include "common/ptx.cuh"
#include "qk_norm_rope_append/config.h"
#include "qk_norm_rope_append/launch.h"
#include "qk_norm_rope_append/values.cuh"

namespace jax_hpc::qk_norm_rope_append {

// Of one warp. A stage's next contents are asked for when the warp is done with the last ones.
template <int kHeadDim>
struct Stages {
  // As many as all stages' heads may be of, where a token has three.
  static constexpr int kRows = heads_of_warp(kHeadDim);
  static_assert(3 * (kRows - 1) + 1 >= kStages * heads_of_warp(kHeadDim));

  uint4 chunks[kStages][2][32];  // a turn each; a lane reads what it asked for itself
  float rows[kRows][kHeadDim];   // of the table, a token each
  float weights[2][kHeadDim];    // of queries and of keys
  int slots[32];                 // of the warp's tokens
};

// Where they lie.
template <int kHeadDim>
struct StageAddresses {
  using Contents = Stages<kHeadDim>;
  SharedAddress stages;
  SharedAddress lane_chunks;

  __device__ StageAddresses(SharedAddress of_warp, int lane)
      : stages(kept(of_warp)),
        lane_chunks(kept(of_warp + lane * static_cast<int>(sizeof(uint4)))) {}

  // The lane's first chunk of a turn; the second lies kSecondChunk bytes behind.
  static constexpr int kSecondChunk = 32 * sizeof(uint4);
  __device__ SharedAddress chunks(int turn) const {
    return lane_chunks + (turn % kStages) * (2 * kSecondChunk);
  }
  __device__ SharedAddress row(unsigned token) const {
    return stages + offsetof(Contents, rows) + (token % Contents::kRows) * (4 * kHeadDim);
  }
  __device__ SharedAddress weight(bool is_query) const {
    return stages + offsetof(Contents, weights) + (is_query ? 0 : 4 * kHeadDim);
  }
  __device__ SharedAddress slot(int token) const {
    return stages + offsetof(Contents, slots) + 4 * token;
  }
};

// Asks for the values of turns, one after the other, and for their rows of the table.
template <int kHeadDim, class Rotation>
class Asker {
 public:
  // The warp's first head of all, and the token it is of.
  __device__ Asker(const Problem& p, const Arrays& a, int begin, int token, int lane, Places at)
      : p_(p),
        a_(a),
        lane_(lane),
        apart_(at.second - at.first),
        next_row_(token * p.heads() - begin),
        positions_(__ldg(a.positions + min(token + lane, p.tokens - 1))),
        from_(static_cast<const __nv_bfloat16*>(a.qkv) + at.first +
              int64_t{begin + lane / lanes_of_head(kHeadDim)} * kHeadDim) {}

  __device__ void ask_values(SharedAddress to) {
    copy_16(to, from_, true);
    copy_16(to + StageAddresses<kHeadDim>::kSecondChunk, from_ + apart_, true);
    from_ += heads_of_warp(kHeadDim) * kHeadDim;
  }

  // Of all tokens that begin before the warp's head `until`. The whole warp asks, each lane for a
  // part.
  __device__ void ask_rows(int until, const StageAddresses<kHeadDim>& stage) {
#pragma unroll 1
    for (; next_row_ < until; next_row_ += p_.heads()) {
      __syncwarp();  // its place may be that of a row that the last turn has read
      ask_row(rows_, stage.row(rows_));
      ++rows_;
    }
  }

 private:
  __device__ void ask_row(int token, SharedAddress to) const {
    constexpr int kFloats = Rotation::kRowAlignment / sizeof(float);
    const int wanted = __shfl_sync(0xffffffffu, positions_, token);
    const int rotary = Rotation::kIsPlain ? kHeadDim : p_.rotary;
    const float* from = a_.cos_sin + int64_t{min(max(wanted, 0), p_.positions - 1)} * rotary;
#pragma unroll 1
    for (int i = lane_ * kFloats; i < rotary; i += 32 * kFloats) {
      if (Rotation::kSplitsRow) {
        copy_16(to + split_vector<kHeadDim>(i / 4), from + i, true);
      } else if (Rotation::kRowAlignment == 16) {
        copy_16(to + 4 * i, from + i, true);
      } else {
        copy_4(to + 4 * i, from + i);
      }
    }
  }

  const Problem& p_;
  const Arrays& a_;
  int lane_;
  int apart_;
  int rows_ = 0;   // asked for
  int next_row_;   // the first head of the next one's token, counted from the warp's first
  int positions_;  // of the warp's tokens, one a lane
  const __nv_bfloat16* from_;
};

// A weight on its way from global to shared memory, of which each lane takes a part; ones where
// there is none.
template <int kHeadDim>
class WeightCopy {
 public:
  __device__ WeightCopy(Weight kind, const void* weight, int lane) : lane_(lane) {
    if (kind == Weight::kBf16) {
      const auto* from = static_cast<const uint16_t*>(weight) + lane;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        parts_[i] = __uint_as_float(uint32_t{__ldg(from + 32 * i)} << 16);
      }
    } else {
      const auto* from = static_cast<const float*>(weight) + lane;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        parts_[i] = kind == Weight::kFloat ? __ldg(from + 32 * i) : 1.0f;
      }
    }
  }
  __device__ void write(SharedAddress to) const {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const unsigned place = lane_ + 32 * i;
      store_shared_float(to + split_vector<kHeadDim>(place / 4) + 4 * (place % 4), parts_[i]);
    }
  }

 private:
  static constexpr int kParts = kHeadDim / 32;
  int lane_;
  float parts_[kParts];
};

}  // namespace jax_hpc::qk_norm_rope_append
