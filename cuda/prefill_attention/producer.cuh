// The warps that serve the consumers, all of one warpgroup: one takes tasks and asks the copy
// engine for keys and values, one copies queries, two look after values that some row must not see.
#pragma once

#include "prefill_attention/shared.cuh"

namespace jax_hpc::prefill_attention {

template <int D>
class KeyValueWarp {
 public:
  __device__ KeyValueWarp(const Arguments& a, const CUtensorMap* k_map, const CUtensorMap* v_map,
                          const Shared<D>& shared)
      : a_(a),
        k_map_(k_map),
        v_map_(v_map),
        shared_(shared),
        lane_(threadIdx.x % kWarpSize),
        parts_(kTileTokens >> a.page_bits),
        part_(lane_ % parts_),
        column_(lane_ / parts_) {}

  __device__ __forceinline__ void run() {
    const PlanHeader* const header = reinterpret_cast<const PlanHeader*>(a_.plan);
    tasks_ = header->count * a_.problem.kv_heads;
    heads_ = header->heads;
    heads_tasks_ = header->count * heads_;
    int word = task_word(ticket());
    for (;;) {
      const Task task = publish(word);
      if (task.tile.rows == 0) return;
      word = stream(task);
    }
  }

 private:
  __device__ __forceinline__ int ticket() const {
    return __shfl_sync(~0u, lane_ == 0 ? take_ticket(a_.plan) : 0, 0);
  }

  // Word `lane` of a task: its row tile, then its KV head; zeros where nothing is left.
  __device__ __forceinline__ int task_word(int ticket) const {
    if (ticket >= tasks_) return 0;
    const int turn = ticket / heads_tasks_;
    const int within = ticket - turn * heads_tasks_;
    const int tile = within / heads_;
    if (lane_ == kRowTileInts) return turn * heads_ + within - tile * heads_;
    return a_.plan[int64_t{1 + tile} * kRowTileInts + lane_ % kRowTileInts];
  }

  __device__ __forceinline__ Task publish(int word) {
    wait(shared_.task_empty(slot_.stage), slot_.parity ^ 1);
    if (lane_ <= kRowTileInts) store_shared_4(shared_.task(slot_.stage) + lane_ * 4, word);
    __syncwarp();
    if (lane_ == 0) arrive(shared_.task_full(slot_.stage));
    slot_.advance();
    const auto of = [&](int lane) { return __shfl_sync(~0u, word, lane); };
    return {{of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)}, of(8)};
  }

  // All tiles of a task, the last first; returns the next task's word. That is asked for late, so
  // that no CTA holds work which another could begin.
  __device__ __forceinline__ int stream(const Task& task) {
    int next = 0;
    int word = 0;
    int id = page_id(task, task.tile.last_tile);
    for (int tile = task.tile.last_tile; tile >= task.tile.first_tile; --tile) {
      const int left = tile - task.tile.first_tile;
      if (left == 1 || (left == 0 && tile == task.tile.last_tile)) next = ticket();
      const int page = id;
      if (left > 0) id = page_id(task, tile - 1);
      send(task, page);
      if (left == 0) word = task_word(next);
    }
    return word;
  }

  // Of this lane's page of a tile; -1 where it does not exist, or no row sees it.
  __device__ __forceinline__ int page_id(const Task& task, int tile) const {
    const int page = tile * parts_ + part_;
    const Problem& p = a_.problem;
    if (page << a_.page_bits > task.tile.last_position || page >= p.table_width) return -1;
    const int id = a_.page_table[int64_t{task.tile.sequence} * p.table_width + page];
    return id >= 0 && id < p.pages ? id : -1;
  }

  __device__ __forceinline__ void send(const Task& task, int page) {
    const Problem& p = a_.problem;
    // Bits of 16 tokens, from one bit a page.
    const uint32_t exists = __ballot_sync(~0u, page >= 0) & ((1u << parts_) - 1);
    const int groups = kTileTokens / 16 / parts_;  // of a page
    uint32_t live = 0;
    for (int i = 0; i < parts_; ++i) live |= (exists >> i & 1) * ((1u << groups) - 1) << i * groups;
    const int part = page >= 0 ? page * p.kv_heads + task.kv_head : p.pages * p.kv_heads;
    const bool copies = column_ < Tile<D>::kColumns;
    const SharedAddress offset =
        column_ * Tile<D>::kColumnBytes + (part_ << a_.page_bits) * Tile<D>::kRowBytes;

    wait(shared_.key_empty(key_.stage), key_.parity ^ 1);
    if (lane_ == 0) {
      store_shared_4(shared_.live(key_.stage), live);
      arrive_expecting(shared_.key_full(key_.stage), Tile<D>::kBytes);
    }
    __syncwarp();
    if (copies) {
      copy_tile(shared_.key(key_.stage) + offset, k_map_, shared_.key_full(key_.stage), 0, 0,
                column_, part);
    }
    key_.advance();

    wait(shared_.value_empty(value_.stage), value_.parity ^ 1);
    if (lane_ == 0) arrive_expecting(shared_.value_full(value_.stage), Tile<D>::kBytes);
    __syncwarp();
    if (copies) {
      copy_tile(shared_.value(value_.stage) + offset, v_map_, shared_.value_full(value_.stage), 0,
                0, column_, part);
    }
    value_.advance();
  }

  const Arguments& a_;
  const CUtensorMap* k_map_;
  const CUtensorMap* v_map_;
  const Shared<D>& shared_;
  int lane_;
  int parts_;   // pages of a tile
  int part_;    // this lane's of them
  int column_;  // and its 128 bytes of the tokens
  int tasks_ = 0;
  int heads_ = 1;        // KV heads that are worked on at a time
  int heads_tasks_ = 1;  // and their tasks
  RingPlace<kTaskSlots> slot_;
  RingPlace<kKeyStages> key_;
  RingPlace<kValueStages> value_;
};

// Queries of the next task while this one is under way.
template <int D>
__device__ __forceinline__ void copy_queries(const Arguments& a, const Shared<D>& shared) {
  constexpr int kVectors = Tile<D>::kVectors;
  const Problem& p = a.problem;
  const int lane = threadIdx.x % kWarpSize;
  const int vector = lane % kVectors;
  TaskReader<D> reader{shared, {}};
  RingPlace<kQueryStages> place;
  for (;;) {
    const Task task = reader.next();
    if (task.tile.rows == 0) return;
    wait(shared.query_empty(place.stage), place.parity ^ 1);
    const SharedAddress to = shared.query(place.stage);
    const __nv_bfloat16* const from =
        a.q + (int64_t{task.tile.first_q} * p.q_heads() + task.kv_head * p.group) * D + vector * 8;
#pragma unroll 4
    for (int row = lane / kVectors; row < kTileRows; row += kWarpSize / kVectors) {
      const int head_row = task.tile.first_head + row;
      const int token = token_of(a, head_row);
      const int head = head_row - token * p.group;
      const bool exists = row < task.tile.rows;
      const int64_t at = exists ? (int64_t{token} * p.q_heads() + head) * D : 0;
      copy_16(to + Tile<D>::offset(row, vector), from + at, exists);
    }
    commit_copies();
    wait_copies<0>();
    fence_shared_writes();
    release(shared.query_full(place.stage));
    place.advance();
  }
}

// The tensor cores multiply what a row does not see by zero, and 0 * NaN is NaN. In tiles that hold
// a token hidden from some row, values hidden from all become zeros, and so do tokens whose value
// is not finite: those are noted, and rows that see one become NaN at the end.
template <int D>
class Checker {
  static constexpr int kVectors = Tile<D>::kVectors;
  static constexpr int kRows = kWarpSize / kVectors;  // that a warp looks at together

 public:
  __device__ Checker(const Arguments& a, const Shared<D>& shared, int checker)
      : a_(a), shared_(shared), checker_(checker), lane_(threadIdx.x % kWarpSize) {}

  __device__ __forceinline__ void run() {
    TaskReader<D> reader{shared_, {}};
    RingPlace<kValueStages> place;
    for (;;) {
      const Task task = reader.next();
      if (task.tile.rows == 0) return;
      for (int tile = task.tile.last_tile; tile >= task.tile.first_tile; --tile) {
        if (task.hides(a_.problem, tile)) {
          wait(shared_.value_full(place.stage), place.parity);
          check(task, tile * kTileTokens, place.stage);
          fence_shared_writes();
          release(shared_.value_checked(place.stage));
        }
        place.advance();
      }
    }
  }

 private:
  __device__ __forceinline__ static bool is_finite(uint4 v) {
    constexpr uint32_t kExponent = 0x7f80;
    bool finite = true;
    for (const uint32_t pair : {v.x, v.y, v.z, v.w}) {
      finite = finite && (pair & kExponent) != kExponent && (pair >> 16 & kExponent) != kExponent;
    }
    return finite;
  }

  __device__ __forceinline__ void check(const Task& task, int first_token, int stage) const {
    const Sight first(a_.problem, task.tile.first_position);
    const Sight last(a_.problem, task.tile.last_position);
    const SharedAddress values = shared_.value(stage);
    constexpr uint32_t kLanesOfRow = (1u << kVectors) - 1;
    uint32_t bad = 0;  // in lane w word w of the result
#pragma unroll 2
    for (int i = checker_; i < kTileTokens / kRows; i += kCheckers) {
      const int row = i * kRows + lane_ / kVectors;
      const int token = first_token + row;
      const bool hidden_from_all = token > last.position || token < first.lowest;
      const bool seen_by_all = token <= first.position && token >= last.lowest;
      const SharedAddress at = values + Tile<D>::offset(row, lane_ % kVectors);
      const bool finite = hidden_from_all || seen_by_all || is_finite(load_shared_16(at));
      const uint32_t broken = __ballot_sync(~0u, !finite);
      const bool is_bad = (broken >> (lane_ / kVectors * kVectors) & kLanesOfRow) != 0;
      if (hidden_from_all || is_bad) store_shared_16(at, uint4{0, 0, 0, 0});
      if (broken == 0) continue;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int bad_row = i * kRows + r;
        const bool noted = (broken >> r * kVectors & kLanesOfRow) != 0 && bad_row / 32 == lane_;
        if (noted) bad |= 1u << bad_row % 32;
      }
    }
    if (lane_ < kTileTokens / 32) store_shared_4(shared_.bad(stage, checker_) + lane_ * 4, bad);
  }

  const Arguments& a_;
  const Shared<D>& shared_;
  int checker_;
  int lane_;
};

}  // namespace jax_hpc::prefill_attention
