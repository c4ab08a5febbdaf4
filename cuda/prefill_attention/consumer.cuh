// A consumer warpgroup: 64 rows of a task. The two of a CTA take turns at the tensor cores, so that
// one computes probabilities while the other's products run; and each asks for the next tile's
// scores together with this tile's values.
#pragma once

#include "common/wgmma.cuh"
#include "prefill_attention/shared.cuh"
#include "prefill_attention/softmax.cuh"
#include "prefill_attention/value_products.cuh"

namespace jax_hpc::prefill_attention {

template <int D>
class Consumer {
  static constexpr int kScores = kTileTokens / 2;  // of a thread
  static constexpr int kWeights = kScores / 2;     // pairs of them
  static constexpr int kOutputs = D / 2;
  static constexpr int kUnit = 16;  // bytes of a descriptor's unit

 public:
  __device__ Consumer(const Arguments& a, const Shared<D>& shared, int group)
      : a_(a),
        shared_(shared),
        group_(group),
        lane_(threadIdx.x % kWarpSize),
        first_row_(group * 64 + threadIdx.x % kWarpgroup / kWarpSize * 16 + lane_ / 4),
        queries_(swizzled_tile(shared.query(0) + group * 64 * Tile<D>::kRowBytes)),
        keys_(swizzled_tile(shared.key(0))),
        values_(swizzled_tile(shared.value(0))) {}

  __device__ __forceinline__ void run() {
    TaskReader<D> reader{shared_, {}};
    if (group_ == 1) yield_turn();  // the other's is first
    for (;;) {
      const Task task = reader.next();
      if (task.tile.rows == 0) return;
      attend(task);
    }
  }

 private:
  __device__ __forceinline__ void await_turn() const {
    sync_threads<2 * kWarpgroup>(kTurnBarrier + group_);
  }
  __device__ __forceinline__ void yield_turn() const {
    arrive_at<2 * kWarpgroup>(kTurnBarrier + 1 - group_);
  }

  __device__ __forceinline__ void attend(const Task& task) {
    const Rows rows(a_, task, first_row_);
    Softmax softmax(a_.problem);
    float scores[kScores];
    float out[kOutputs] = {};
    uint32_t weights[kWeights];
    float shrink[2];

    int tile = task.tile.last_tile;
    wait(shared_.query_full(query_.stage), query_.parity);
    wait(shared_.key_full(key_.stage), key_.parity);
    ask_for_scores(scores);
    wgmma_wait<0>();
    settle(scores);
    weigh(task, rows, tile, scores, softmax, shrink);
    pack(scores, weights);

#pragma unroll 1
    while (tile > task.tile.first_tile) {
      wait(shared_.key_full(key_.stage), key_.parity);
      await_turn();
      ask_for_scores(scores);
      const bool checked = wait_for_values(task, tile);
      add_values(weights, out);
      yield_turn();
      wgmma_wait<1>();
      settle(scores);
      if (checked) note_bad(task, rows, tile, softmax);
      --tile;
      weigh(task, rows, tile, scores, softmax, shrink);
      wgmma_wait<0>();
      settle(out);
      release(shared_.value_empty(value_.stage));
      value_.advance();
      pack(scores, weights);
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) out[i] *= shrink[i / 2 % 2];
    }
    release(shared_.query_empty(query_.stage));
    query_.advance();
    const bool checked = wait_for_values(task, tile);
    add_values(weights, out);
    if (checked) note_bad(task, rows, tile, softmax);
    const Closing closings[2] = {softmax.close(0, rows.q_head[0], a_.sinks),
                                 softmax.close(1, rows.q_head[1], a_.sinks)};
    wgmma_wait<0>();
    settle(out);
    release(shared_.value_empty(value_.stage));
    value_.advance();
    write(rows, closings, out);
  }

  // Products.

  __device__ __forceinline__ void ask_for_scores(float (&scores)[kScores]) const {
    const uint32_t a = queries_ + query_.stage * (Tile<D>::kBytes / kUnit);
    const uint32_t b = keys_ + key_.stage * (Tile<D>::kBytes / kUnit);
    settle(scores);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      const int at = k / 4 * (Tile<D>::kColumnBytes / kUnit) + k % 4 * 2;
      Wgmma<kTileTokens>::multiply(scores, descriptor(a + at), descriptor(b + at), k > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void add_values(const uint32_t (&weights)[kWeights],
                                             float (&out)[kOutputs]) const {
    // Columns of 64 dimensions lie kColumnBytes apart.
    constexpr uint64_t kColumnStride = uint64_t{Tile<D>::kColumnBytes / kUnit - 1} << 16;
    constexpr int kStep = 16 * Tile<D>::kRowBytes / kUnit;  // of 16 tokens
    const uint32_t b = values_ + value_.stage * (Tile<D>::kBytes / kUnit);
    settle(out);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileTokens / 16; ++k) {
      WgmmaValues<D>::multiply(out, weights + 4 * k, descriptor(b + k * kStep) + kColumnStride);
    }
    wgmma_commit();
  }

  // True where the values were looked after first.
  __device__ __forceinline__ bool wait_for_values(const Task& task, int tile) {
    const bool checked = task.hides(a_.problem, tile);
    if (checked) {
      wait(shared_.value_checked(value_.stage), checked_parity_ >> value_.stage & 1);
      checked_parity_ ^= 1u << value_.stage;
    } else {
      wait(shared_.value_full(value_.stage), value_.parity);
    }
    return checked;
  }

  // Probabilities.

  // Scores become probabilities, and their stage is free again.
  __device__ __forceinline__ void weigh(const Task& task, const Rows& rows, int tile,
                                        float (&scores)[kScores], Softmax& softmax,
                                        float (&shrink)[2]) {
    constexpr uint32_t kAllLive = (1u << kTileTokens / 16) - 1;
    const uint32_t live = load_shared_4(shared_.live(key_.stage));
    release(shared_.key_empty(key_.stage));
    key_.advance();
    softmax.cap(scores);
    if (live != kAllLive || task.hides(a_.problem, tile)) {
      mask(a_.problem, rows, tile * kTileTokens + lane_ % 4 * 2, live, scores);
    }
    softmax.weigh(scores, shrink);
  }

  __device__ __forceinline__ static void pack(const float (&scores)[kScores],
                                              uint32_t (&weights)[kWeights]) {
#pragma unroll
    for (int i = 0; i < kWeights; ++i) weights[i] = pack_bf16(scores[2 * i], scores[2 * i + 1]);
  }

  // Rows that see a token whose value is not finite become NaN.
  __device__ __forceinline__ void note_bad(const Task& task, const Rows& rows, int tile,
                                           Softmax& softmax) const {
    uint32_t any = 0;
#pragma unroll 1
    for (int word = 0; word < kTileTokens / 32; ++word) {
      uint32_t bad = 0;
      for (int i = 0; i < kCheckers; ++i) {
        bad |= load_shared_4(shared_.bad(value_.stage, i) + word * 4);
      }
      for (; bad != 0; bad &= bad - 1) {
        const int token = tile * kTileTokens + word * 32 + __ffs(static_cast<int>(bad)) - 1;
        for (int r = 0; r < 2; ++r) {
          if (Sight(a_.problem, rows.position[r]).sees(token)) any |= 1u << r;
        }
      }
    }
    if (any & 1) softmax.spoil(0);
    if (any & 2) softmax.spoil(1);
  }

  // Results.

  // Four lanes hold 32 neighbours of a row, pairs of every 8: they exchange them, so that each
  // writes 16 bytes.
  __device__ __forceinline__ void write(const Rows& rows, const Closing (&closings)[2],
                                        const float (&out)[kOutputs]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t q_row = rows.q_row[r] * a_.problem.q_heads() + rows.q_head[r];
#pragma unroll
      for (int i = 0; i < D / 32; ++i) {
        uint32_t pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* const at = out + (4 * i + j) * 4 + 2 * r;
          pairs[j] = pack_bf16(at[0] * closings[r].weight, at[1] * closings[r].weight);
        }
        exchange<1>(pairs[0], pairs[1]);
        exchange<1>(pairs[2], pairs[3]);
        exchange<2>(pairs[0], pairs[2]);
        exchange<2>(pairs[1], pairs[3]);
        if (!rows.exists[r]) continue;
        uint4* const to = reinterpret_cast<uint4*>(a_.out + q_row * D) + i * 4 + lane_ % 4;
        *to = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
      }
      if (a_.lse != nullptr && rows.exists[r] && lane_ % 4 == 0) a_.lse[q_row] = closings[r].lse;
    }
  }

  // Of lanes that differ in bit Step, the lower keeps `low` and gets the other's, which keeps
  // `high`.
  template <int Step>
  __device__ __forceinline__ void exchange(uint32_t& low, uint32_t& high) const {
    const bool upper = (lane_ & Step) != 0;
    const uint32_t got = __shfl_xor_sync(~0u, upper ? low : high, Step);
    if (upper) {
      low = got;
    } else {
      high = got;
    }
  }

  static constexpr int kTurnBarrier = 1;  // and the next

  const Arguments& a_;
  const Shared<D>& shared_;
  int group_;
  int lane_;
  int first_row_;  // of the tile, of this thread's two; the other is eight below
  uint32_t queries_;
  uint32_t keys_;
  uint32_t values_;
  RingPlace<kQueryStages> query_;
  RingPlace<kKeyStages> key_;
  RingPlace<kValueStages> value_;
  uint32_t checked_parity_ = 0;  // a bit of each stage
};

}  // namespace jax_hpc::prefill_attention
