// The producer warp: runs ahead of the consumers through all tasks of its CTA.
#pragma once

#include "decode_attention/shared.cuh"

namespace jax_hpc::decode_attention {

template <class Cache, int D>
class Producer {
 public:
  __device__ Producer(const Arguments& a, const CUtensorMap* k_map, const CUtensorMap* v_map,
                      const Shared& shared, int lane)
      : a_(a),
        k_map_(k_map),
        v_map_(v_map),
        shared_(shared),
        lane_(lane),
        page_bits_(a.page_bits),
        parts_(max(kTileTokens >> page_bits_, 1)),
        part_tokens_(min(a.problem.page_size, kTileTokens)) {}

  // A turn finds the next task and asks for its query, then for what is left of the task before and
  // for the new one's first tile. So its length and page ids come while the ring takes the other's
  // tiles, and in the first turn while the query is asked for, which then is ahead of all tiles.
  // Each part of this code stands here once, for a short way to a CTA's first copy.
  __device__ void run() {
    TaskWalk walk(a_, lane_);
    bool started = false;
    do {
      int page = -1;
      int entry = -1;
      walk.find();
      ask_entry(walk, page, entry);
      // The first two queries find their places empty, and no barrier may be there yet.
      if (started) wait(shared_.query_empty(turn_.stage()), turn_.parity() ^ 1);
      if (walk.exists()) send_query(walk.sequence(), walk.head());
      const Task next = plan(walk, page, entry);
      // The consumers have initialised the barriers meanwhile.
      if (!started) start_barrier(kThreads);
      started = true;
      const int left = max(task_.tiles - 1, 0);
      const int tiles = left + (next.tiles > 0 ? 1 : 0);
#pragma unroll 1
      for (int i = 0; i < tiles; ++i) {
        if (i < left) {
          move_to(i + 1);
        } else {
          begin(next, page, entry);
        }
        send_tile();
      }
      task_ = next;
      announce_task();
      // The merge may take its place, and waits for this kernel's end before it reads what it
      // wrote. While a long task begins it would be in the way (1 %), at the end of a short one it
      // would be late (0.7 us).
      if (task_.tiles <= kShortTask) let_next_kernel_start();
    } while (task_.tiles >= 0);
  }

 private:
  // This lane's of the page table's entries from the next task's first page on: asked for before
  // the sequence's length is known where that does not matter.
  __device__ __forceinline__ void ask_entry(const TaskWalk& walk, int& page, int& entry) const {
    const int tile = walk.likely_tile();
    if (tile < 0) return;
    page = tile * kTileTokens >> page_bits_;
    entry = table_entry(walk.sequence(), page);
  }
  // The next task, and the entry after all where it was not asked for.
  __device__ __forceinline__ Task plan(TaskWalk& walk, int& page, int& entry) const {
    const Task task = walk.next();
    if (task.tiles > 0 && page != task.first_token >> page_bits_) {
      page = task.first_token >> page_bits_;
      entry = table_entry(task.sequence, page);
    }
    return task;
  }

  __device__ __forceinline__ void begin(const Task& task, int page, int entry) {
    task_ = task;
    // Shuffled, it is known to be the same in all lanes; else every wait of the kernel is compiled
    // for a warp that may have diverged. Even where both sizes are the same the choice stays:
    // without it ptxas makes the first tile's way one with that of later ones, 0.3 us of a CTA's
    // start.
    places_ = __shfl_sync(~0u, task.tiles, 0) > kShortTask ? a_.long_slots : a_.slots;
    token_ = task.first_token;
    page_ = page;
    ids_ = existing(page, entry);
    asks_ = true;
  }

  // To tile `i` of the task; the next 32 ids are on their way while these are used.
  __device__ __forceinline__ void move_to(int i) {
    token_ = task_.first_token + i * kTileTokens;
    if ((token_ >> page_bits_) - page_ >= kWarpSize) {
      page_ += kWarpSize;
      ids_ = existing(page_, more_);
      asks_ = true;
    }
    if (asks_) more_ = table_entry(task_.sequence, page_ + kWarpSize);
    asks_ = false;
  }

  // This lane's of 32 entries of the page table from `page` on.
  __device__ __forceinline__ int table_entry(int sequence, int page) const {
    page += lane_;
    if (page >= a_.problem.table_width) return -1;
    return a_.page_table[int64_t{sequence} * a_.problem.table_width + page];
  }
  // The entry itself, or -1 for a page that the sequence or the pool does not have.
  __device__ __forceinline__ int existing(int page, int id) const {
    const bool in_length = page + lane_ < (task_.length + a_.problem.page_size - 1) >> page_bits_;
    return in_length && id >= 0 && id < a_.problem.pages ? id : -1;
  }

  __device__ __forceinline__ void send_query(int sequence, int head) const {
    if (Cache::kBytes == 1 && lane_ == 0) copy_scales_of(head);
    if (Cache::kBytes == 1 && a_.problem.fp8_query) {
      copy_query<1>(sequence, head, turn_.stage());
    } else {
      copy_query<2>(sequence, head, turn_.stage());
    }
  }

  __device__ __forceinline__ void copy_scales_of(int head) const {
    const ScaleKind keys = a_.problem.k_scale;
    const ScaleKind values = a_.problem.v_scale;
    const SharedAddress to = shared_address(shared_.scales + turn_.index);
    if (is_common(keys)) copy_4(to, a_.k_scale + (keys == ScaleKind::kHead ? head : 0));
    if (is_common(values)) copy_4(to + 4, a_.v_scale + (values == ScaleKind::kHead ? head : 0));
  }

  // The task, whose query is on its way: consumers may begin it.
  __device__ __forceinline__ void announce_task() {
    const int stage = turn_.stage();
    if (lane_ == 0) shared_.tasks[turn_.index] = task_;
    arrive_after_copies(shared_.query_full(stage));
    if (lane_ == 0) arrive(shared_.query_full(stage));
    __syncwarp();
    turn_.advance();
  }

  template <int Bytes>
  __device__ __forceinline__ void copy_query(int sequence, int head, int stage) const {
    constexpr int kVectors = D * Bytes / 16;  // of a row
    const Problem& p = a_.problem;
    const int row_tile = 8 * a_.column_tiles * a_.row_groups;
    const SharedAddress to =
        shared_address(shared_.query + stage * row_tile * shared_.query_stride);
#pragma unroll 1
    for (int i = lane_; i < row_tile * kVectors; i += kWarpSize) {
      const int row = i / kVectors;
      const bool exists = row < p.rows();
      const int64_t from = output_row(a_, sequence, head, exists ? row : 0);
      copy_16(to + row * shared_.query_stride + i % kVectors * 16,
              static_cast<const uint8_t*>(a_.q) + (from * kVectors + i % kVectors) * 16, exists);
    }
    if constexpr (Bytes == 1) {
#pragma unroll 1
      for (int row = lane_; row < p.rows(); row += kWarpSize) {
        copy_4(shared_address(shared_.query_scale + stage * row_tile + row),
               a_.q_scale + output_row(a_, sequence, head, row));
      }
    }
  }

  // The tile at token_, whose pages are those of lanes `first` to `first + parts`: K, then V.
  __device__ __forceinline__ void send_tile() {
    const int first = (token_ >> page_bits_) - page_;
    const uint32_t exist = __ballot_sync(~0u, ids_ >= 0) >> first & ((1u << parts_) - 1);
    const int part = lane_ - first;
    const bool copies = part >= 0 && part < parts_ && ids_ >= 0;
    const int row = token_ & (a_.problem.page_size - 1);
    const int tile_page = ids_ * a_.problem.kv_heads + task_.head;
    const int tokens = __popc(exist) * part_tokens_;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const bool scales = half == 0 && a_.problem.k_scale == ScaleKind::kToken;
      const int slot = ring_.index(a_.slots);
      const Place before = ring_.before(places_, a_.slots);
      wait(shared_.empty(before.index(a_.slots)), before.parity(a_.slots));
      if (lane_ == 0) {
        shared_.live[slot] = groups_of(exist);
        arrive_expecting(shared_.full(slot),
                         tokens * (HalfTile<Cache, D>::kTokenBytes + (scales ? 4 : 0)));
      }
      __syncwarp();
      if (copies) {
        copy_tile(part_of(slot, part), half == 0 ? k_map_ : v_map_, shared_.full(slot), 0, row, 0,
                  tile_page);
        if (scales) copy_scales(slot, part, tile_page, row);
      }
      ring_.advance(a_.slots);
    }
  }

  // Which groups of 16 tokens lie on the parts of a tile that exist.
  __device__ __forceinline__ uint32_t groups_of(uint32_t exist) const {
    if (parts_ == 2) exist = (exist & 1) | (exist & 2) << 1;
    return exist * ((1u << part_tokens_ / 16) - 1);
  }

  __device__ __forceinline__ void copy_scales(int slot, int part, int tile_page, int row) const {
    copy_bytes(shared_address(shared_.token_scale + slot * kTileTokens + part * part_tokens_),
               a_.k_scale + int64_t{tile_page} * a_.problem.page_size + row, part_tokens_ * 4,
               shared_.full(slot));
  }

  __device__ __forceinline__ SharedAddress part_of(int slot, int part) const {
    using Half = HalfTile<Cache, D>;
    return shared_.ring +
           static_cast<uint32_t>(slot * Half::kBytes + part * part_tokens_ * Half::kTokenBytes);
  }

  const Arguments& a_;
  const CUtensorMap* k_map_;
  const CUtensorMap* v_map_;
  const Shared& shared_;
  int lane_;
  int page_bits_;
  int places_ = 0;     // of the ring that are in use
  int parts_;          // pages of a tile
  int part_tokens_;    // of a page that belong to one tile
  Task task_{};        // whose tiles are asked for
  int token_ = 0;      // where the next one starts
  int page_ = 0;       // of the sequence, lane 0's
  int ids_ = -1;       // of this lane's page; -1: there is none
  int more_ = -1;      // entry of the page 32 on
  bool asks_ = false;  // for that entry, with the next tile
  Place ring_;
  Turn turn_;
};

}  // namespace jax_hpc::decode_attention
