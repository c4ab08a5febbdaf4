// A consumer warpgroup: 64 rows of a task. The two of a CTA take turns at the tensor cores, so that
// one computes probabilities while the other's products run; and each asks for the next tile's
// scores together with this tile's values.
#pragma once

#include "prefill_attention/operands.cuh"
#include "prefill_attention/shared.cuh"
#include "prefill_attention/softmax.cuh"

namespace jax_hpc::prefill_attention {

template <class Cache, int D>
class Consumer {
  using Memory = Shared<Cache, D>;
  using TileOf = Tile<Cache, D>;
  using ProductsOf = Products<Cache, D>;
  static constexpr int kScores = kTileTokens / 2;  // of a thread
  static constexpr int kOutputs = D / 2;

 public:
  __device__ Consumer(const Arguments& a, const Memory& shared, int group)
      : a_(a),
        shared_(shared),
        group_(group),
        lane_(threadIdx.x % kWarpSize),
        first_row_(group * 64 + threadIdx.x % kWarpgroup / kWarpSize * 16 + lane_ / 4) {}

  __device__ __forceinline__ void run() {
    TaskReader<Memory> reader{shared_, {}};
    float scores[kScores];
    if (group_ == 1) yield_turn();  // the other's is first
    bool more = reader.wait_for_task();
    if (more) {
      wait_for_operands();
      ask_for_scores(scores);
      wgmma_wait<0>();
      settle(scores);
    }
    while (more) more = attend(reader, scores);
  }

 private:
  __device__ __forceinline__ void await_turn() const {
    sync_threads<2 * kWarpgroup>(kTurnBarrier + group_);
  }
  __device__ __forceinline__ void yield_turn() const {
    arrive_at<2 * kWarpgroup>(kTurnBarrier + 1 - group_);
  }

  // The scores of the first tile are there; leaves those of the next task's first tile, asked for
  // together with the last values of this one, and whether there is one.
  __device__ __forceinline__ bool attend(TaskReader<Memory>& reader, float (&scores)[kScores]) {
    const Task task = reader.read();
    const Positions positions(a_, task, first_row_);
    const FullTiles full(a_.problem, task.tile);
    const int first_tile = task.tile.first_tile;
    float out[kOutputs] = {};
    float sums[Memory::kFp8 ? kOutputs : 1];  // of one tile
    uint32_t weights[ProductsOf::kWords];
    float shrink[2];

    int tile = task.tile.last_tile;
    float scales[2];
    score_scales(task, scales);
    Softmax<Cache> softmax(a_.problem, scales);
    weigh(full, positions, tile, scores, softmax, shrink);
    ProductsOf::pack(scores, weights);

#pragma unroll 1
    while (tile > first_tile) {
      wait(shared_.key_full(key_.stage), key_.parity);
      await_turn();
      ask_for_scores(scores);
      const bool checked = wait_for_values(!full.hold(tile));
      ask_for_sums(weights, sums, out);
      yield_turn();
      wgmma_wait<1>();
      settle(scores);
      if (checked) note_bad(positions, tile, softmax);
      --tile;
      float next_shrink[2];
      // The largest scores are found while this tile's products run. The exponentials, which
      // nothing needs before, the compiler moves behind the wait and between what follows: they run
      // beside the other warpgroup's products, which is faster than holding them before it.
      const bool raised = weigh(full, positions, tile, scores, softmax, next_shrink);
      wgmma_wait<0>();
      take_sums(sums, shrink, out);
      ProductsOf::pack(scores, weights);
#pragma unroll
      for (int r = 0; r < 2; ++r) shrink[r] = next_shrink[r];
      if constexpr (!Memory::kFp8) {
        if (!raised) continue;
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) out[i] *= shrink[i / 2 % 2];
      }
    }
    release(shared_.query_empty(query_.stage));
    query_.advance();
    const TaskReader<Memory> current = reader;
    reader.place.advance();
    const bool more = reader.wait_for_task();
    // Two whole ways: products under way across a branch make the compiler wait for each.
    const bool checks = !full.hold(tile);
    const auto end = [&]() {
      if (checks) note_bad(positions, tile, softmax);
      take_sums(sums, shrink, out);
      write(current.read(), softmax, out);
    };
    wait_for_values(checks);
    if (more) {
      // Values first: the results are written while the next task's scores are under way.
      await_turn();
      ask_for_sums(weights, sums, out);
      wait_for_operands();
      ask_for_scores(scores);
      yield_turn();
      wgmma_wait<1>();
      end();
      wgmma_wait<0>();
      settle(scores);
    } else {
      ask_for_sums(weights, sums, out);
      wgmma_wait<0>();
      end();
    }
    release(shared_.task_empty(current.place.stage));
    return more;
  }

  // Of a task's first product.
  __device__ __forceinline__ void wait_for_operands() const {
    wait(shared_.query_full(query_.stage), query_.parity);
    wait(shared_.key_full(key_.stage), key_.parity);
  }

  // What scores of the two rows are to be multiplied with, on an fp8 cache.
  __device__ __forceinline__ void score_scales(const Task& task, float (&scales)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scales[r] = 1;
      if constexpr (Memory::kFp8) {
        const SharedAddress at = shared_.query_scale(query_.stage, first_row_ + 8 * r);
        scales[r] = __uint_as_float(load_shared_4(at)) *
                    scale_of(a_.k_scale, a_.problem.k_scale, task.kv_head);
      }
    }
  }
  __device__ __forceinline__ static float scale_of(const float* scales, ScaleKind kind, int head) {
    if (kind == ScaleKind::kTensor) return scales[0];
    return kind == ScaleKind::kHead ? scales[head] : 1.0f;
  }

  // Products.

  __device__ __forceinline__ void ask_for_scores(float (&scores)[kScores]) const {
    const uint32_t a = swizzled_tile(shared_.query(query_.stage) + group_ * 64 * TileOf::kRowBytes);
    const uint32_t b = swizzled_tile(shared_.key(key_.stage));
    settle(scores);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < TileOf::kSteps; ++k) {
      const int at = TileOf::step(k);
      ProductsOf::scores(scores, TileOf::descriptor(a + at), TileOf::descriptor(b + at), k > 0);
    }
    wgmma_commit();
  }

  // Values of a tile times the weights: into `sums` on an fp8 cache, else onto `out`.
  template <int Sums>
  __device__ __forceinline__ void ask_for_sums(const uint32_t (&weights)[ProductsOf::kWords],
                                               float (&sums)[Sums], float (&out)[kOutputs]) const {
    const uint32_t values = swizzled_tile(shared_.value(value_.stage));
    settle(sums);
    settle(out);
    wgmma_fence();
    if constexpr (Memory::kFp8) {
      ProductsOf::add_values(sums, weights, values);
    } else {
      ProductsOf::add_values(out, weights, values);
    }
    wgmma_commit();
  }

  // They are there, and their stage is free again.
  template <int Sums>
  __device__ __forceinline__ void take_sums(float (&sums)[Sums], const float (&shrink)[2],
                                            float (&out)[kOutputs]) {
    settle(sums);
    settle(out);
    release(shared_.value_empty(value_.stage));
    value_.advance();
    if constexpr (Memory::kFp8) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) out[i] = fmaf(out[i], shrink[i / 2 % 2], sums[i]);
    }
  }

  // Where a row does not see some token they are looked after first. Returns whether.
  __device__ __forceinline__ bool wait_for_values(bool checked) {
    if (Memory::kFp8) {
      wait(shared_.value_checked(value_.stage), value_.parity);
    } else if (checked) {
      wait(shared_.value_checked(value_.stage), checked_parity_ >> value_.stage & 1);
      checked_parity_ ^= 1u << value_.stage;
    } else {
      wait(shared_.value_full(value_.stage), value_.parity);
    }
    return checked;
  }

  // Probabilities.

  // Scores become probabilities, and their stage is free again. Returns whether sums shrink.
  __device__ __forceinline__ bool weigh(const FullTiles& full, const Positions& positions, int tile,
                                        float (&scores)[kScores], Softmax<Cache>& softmax,
                                        float (&shrink)[2]) {
    constexpr uint32_t kAllLive = (1u << kTileTokens / 16) - 1;
    const uint32_t live = load_shared_4(shared_.live(key_.stage));
    if constexpr (Memory::kFp8) {
      if (a_.problem.k_scale == ScaleKind::kToken) scale_tokens(scores);
    }
    release(shared_.key_empty(key_.stage));
    key_.advance();
    softmax.cap(scores);
    if (live != kAllLive || !full.hold(tile)) {
      mask(a_.problem, positions, tile * kTileTokens + lane_ % 4 * 2, live, scores);
    }
    return softmax.weigh(scores, shrink);
  }

  __device__ __forceinline__ void scale_tokens(float (&scores)[kScores]) const {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int token = i / 4 * 8 + lane_ % 4 * 2 + i % 2;
      scores[i] *= __uint_as_float(load_shared_4(shared_.token_scale(key_.stage, token)));
    }
  }

  // Rows that see a token whose value is not finite become NaN.
  __device__ __forceinline__ void note_bad(const Positions& positions, int tile,
                                           Softmax<Cache>& softmax) const {
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
          if (Sight(a_.problem, positions.of[r]).sees(token)) any |= 1u << r;
        }
      }
    }
    if (any & 1) softmax.spoil(0);
    if (any & 2) softmax.spoil(1);
  }

  // Results.

  // Four lanes hold 32 neighbours of a row, pairs of every 8: they exchange them, so that each
  // writes 16 bytes.
  __device__ __forceinline__ void write(const Task& task, const Softmax<Cache>& softmax,
                                        const float (&out)[kOutputs]) const {
    const Problem& p = a_.problem;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row_ + 8 * r;
      const int head_row = task.tile.first_head + row;
      const int token = token_of(a_, head_row);
      const int q_head = task.kv_head * p.group + head_row - token * p.group;
      const int64_t index = (int64_t{task.tile.first_q} + token) * p.q_heads() + q_head;
      const bool exists = row < task.tile.rows;
      Closing closing = softmax.close(r, a_.sinks == nullptr ? nullptr : a_.sinks + q_head);
      if constexpr (Memory::kFp8) {
        closing.weight *= scale_of(a_.v_scale, p.v_scale, task.kv_head);
      }
#pragma unroll
      for (int i = 0; i < D / 32; ++i) {
        uint32_t pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* const at = out + (4 * i + j) * 4 + 2 * r;
          pairs[j] = pack_bf16(at[0] * closing.weight, at[1] * closing.weight);
        }
        exchange<1>(pairs[0], pairs[1]);
        exchange<1>(pairs[2], pairs[3]);
        exchange<2>(pairs[0], pairs[2]);
        exchange<2>(pairs[1], pairs[3]);
        if (!exists) continue;
        uint4* const to = reinterpret_cast<uint4*>(a_.out + index * D) + i * 4 + lane_ % 4;
        *to = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
      }
      if (a_.lse != nullptr && exists && lane_ % 4 == 0) a_.lse[index] = closing.lse;
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
  const Memory& shared_;
  int group_;
  int lane_;
  int first_row_;  // of the tile, of this thread's two; the other is eight below
  RingPlace<kQueryStages> query_;
  RingPlace<Cache::kKeyStages> key_;
  RingPlace<Cache::kValueStages> value_;
  uint32_t checked_parity_ = 0;  // a bit of each stage
};

}  // namespace jax_hpc::prefill_attention
