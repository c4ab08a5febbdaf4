// The warp that takes tasks and asks the copy engine for their keys and values, ahead of the
// consumers.
#pragma once

#include "prefill_attention/shared.cuh"

namespace jax_hpc::prefill_attention {

template <class Cache, int D>
class KeyValueWarp {
  using Memory = Shared<Cache, D>;
  using TileOf = Tile<Cache, D>;
  static constexpr int kStages = Cache::kRawStages > 0 ? Cache::kRawStages : Cache::kValueStages;

 public:
  __device__ KeyValueWarp(const Arguments& a, const CUtensorMap* k_map, const CUtensorMap* v_map,
                          const Memory& shared)
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
    Task task = publish(task_word(static_cast<int>(blockIdx.x)));
    int page = page_id(task, task.tile.last_tile);
    while (task.tile.rows > 0) stream(task, page);
  }

 private:
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
    const auto of = [&](int lane) { return __shfl_sync(~0u, word, lane); };
    const Task task{{of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)}, of(8)};
    wait(shared_.task_empty(slot_.stage), slot_.parity ^ 1);
    if (lane_ == 0) {
      shared_.write(slot_.stage, task);
      arrive(shared_.task_full(slot_.stage));
    }
    slot_.advance();
    return task;
  }

  // All tiles of a task, the last first; then `task` is the next, and `page` of its first tile.
  // What the next one is takes four steps that each wait for memory, the last of them after the
  // last tile. They are begun late, so that no CTA holds work which another could begin.
  __device__ __forceinline__ void stream(Task& task, int& page) {
    constexpr int kSteps = 4;
    int step = 0;
    int ticket = 0;
    int word = 0;
    Task next = task;
    int next_page = -1;
    for (int tile = task.tile.last_tile; tile >= task.tile.first_tile; --tile) {
      const int left = tile - task.tile.first_tile;
      const int this_page = page;
      if (left > 0) page = page_id(task, tile - 1);
      send(task, this_page);
      for (; step < kSteps - left; ++step) {
        if (step == 0 && lane_ == 0) ticket = take_ticket(a_.plan);
        if (step == 1) word = task_word(__shfl_sync(~0u, ticket, 0));
        if (step == 2) next = publish(word);
        if (step == 3) next_page = page_id(next, next.tile.last_tile);
      }
    }
    task = next;
    page = next_page;
  }

  // Of this lane's page of a tile; -1 where it does not exist, or no row sees it.
  __device__ __forceinline__ int page_id(const Task& task, int tile) const {
    const int page = tile * parts_ + part_;
    const Problem& p = a_.problem;
    if (page << a_.page_bits > task.tile.last_position || page >= p.table_width) return -1;
    const int id = a_.page_table[int64_t{task.tile.sequence} * p.table_width + page];
    return id >= 0 && id < p.pages ? id : -1;
  }

  // A page that does not exist is read as one behind the last: zeros.
  __device__ __forceinline__ void send(const Task& task, int page) {
    const Problem& p = a_.problem;
    const uint32_t exists = __ballot_sync(~0u, page >= 0) & ((1u << parts_) - 1);
    const int part = page >= 0 ? page * p.kv_heads + task.kv_head : p.pages * p.kv_heads;
    const bool copies = column_ < TileOf::kColumns;
    const SharedAddress offset =
        column_ * TileOf::kColumnBytes + (part_ << a_.page_bits) * TileOf::kRowBytes;

    wait(shared_.key_empty(key_.stage), key_.parity ^ 1);
    const SharedAddress key_full = shared_.key_full(key_.stage);
    if (lane_ == 0) {
      store_shared_4(shared_.live(key_.stage), live_tokens(exists));
      arrive_expecting(key_full, TileOf::kBytes + token_scale_bytes() * __popc(exists));
    }
    __syncwarp();
    if (copies) {
      copy_tile(shared_.key(key_.stage) + offset, k_map_, key_full, 0, 0, column_, part);
    }
    if (token_scale_bytes() > 0 && column_ == 0 && page >= 0) {
      copy_bytes(shared_.token_scale(key_.stage, part_ << a_.page_bits),
                 a_.k_scale + (int64_t{part} << a_.page_bits), token_scale_bytes(), key_full);
    }
    key_.advance();

    if constexpr (Memory::kFp8) {
      send_values(shared_.raw_empty(value_.stage), shared_.raw_full(value_.stage),
                  shared_.raw(value_.stage) + offset, copies, part);
    } else {
      send_values(shared_.value_empty(value_.stage), shared_.value_full(value_.stage),
                  shared_.value(value_.stage) + offset, copies, part);
    }
    value_.advance();
  }

  __device__ __forceinline__ void send_values(SharedAddress empty, SharedAddress full,
                                              SharedAddress to, bool copies, int part) const {
    wait(empty, value_.parity ^ 1);
    if (lane_ == 0) arrive_expecting(full, TileOf::kBytes);
    __syncwarp();
    if (copies) copy_tile(to, v_map_, full, 0, 0, column_, part);
  }

  // A bit for 16 tokens, from one for a page.
  __device__ __forceinline__ uint32_t live_tokens(uint32_t exists) const {
    const int groups = kTileTokens / 16 / parts_;  // of a page
    uint32_t live = 0;
    for (int i = 0; i < parts_; ++i) live |= (exists >> i & 1) * ((1u << groups) - 1) << i * groups;
    return live;
  }

  // Of a page.
  __device__ __forceinline__ int token_scale_bytes() const {
    if (!Memory::kFp8 || a_.problem.k_scale != ScaleKind::kToken) return 0;
    return 4 << a_.page_bits;
  }

  const Arguments& a_;
  const CUtensorMap* k_map_;
  const CUtensorMap* v_map_;
  const Memory& shared_;
  int lane_;
  int parts_;   // pages of a tile
  int part_;    // this lane's of them
  int column_;  // and its 128 bytes of the tokens
  int tasks_ = 0;
  int heads_ = 1;        // KV heads that are worked on at a time
  int heads_tasks_ = 1;  // and their tasks
  RingPlace<kTaskSlots> slot_;
  RingPlace<Cache::kKeyStages> key_;
  RingPlace<kStages> value_;
};

}  // namespace jax_hpc::prefill_attention
