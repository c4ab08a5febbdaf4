// The producer warp: runs ahead of the consumers through all tasks of its CTA.
#pragma once

#include "decode_attention/shared.cuh"

namespace jax_hpc::decode_attention {

template <class Cache, int D>
class Producer {
 public:
  __device__ Producer(const Arguments& a, const CUtensorMap* k_map, const CUtensorMap* v_map,
                      const Shared& shared)
      : a_(a),
        k_map_(k_map),
        v_map_(v_map),
        shared_(shared),
        lane_(threadIdx.x % kWarpSize),
        page_bits_(a.page_bits),
        parts_(max(kTileTokens >> page_bits_, 1)),
        part_tokens_(kTileTokens / parts_) {}

  // The next task is known, and its first page ids are on their way, before this one's tiles are
  // asked for: their latency hides behind the ring.
  __device__ void run() {
    TaskWalk walk(a_);
    // The first ids are asked for before the sequence's length is known.
    const int guess = a_.problem.window == 0 ? walk.first_tile_of_span() : -1;
    const int guessed_page = guess * kTileTokens >> page_bits_;
    const int guessed_ids = guess >= 0 ? table_entry(walk.first_sequence(), guessed_page) : -1;
    Task task = walk.next();
    int ids = -1;
    if (task.tiles > 0) {
      const bool guessed = guess >= 0 && guessed_page == first_page(task);
      ids = guessed ? existing(task, guessed_page, guessed_ids) : page_ids(task, first_page(task));
    }
    while (task.tiles >= 0) {
      const Task next = walk.next();
      const int next_ids = next.tiles > 0 ? page_ids(next, first_page(next)) : -1;
      stream(task, ids);
      task = next;
      ids = next_ids;
    }
    send_query(task);
  }

 private:
  __device__ __forceinline__ int first_page(const Task& task) const {
    return task.first_token >> page_bits_;
  }

  // This lane's of 32 page ids from `page` on; -1 for a page that the sequence or the pool does
  // not have.
  __device__ __forceinline__ int page_ids(const Task& task, int page) const {
    return existing(task, page, table_entry(task.sequence, page));
  }
  __device__ __forceinline__ int table_entry(int sequence, int page) const {
    page += lane_;
    if (page >= a_.problem.table_width) return -1;
    return a_.page_table[int64_t{sequence} * a_.problem.table_width + page];
  }
  __device__ __forceinline__ int existing(const Task& task, int page, int id) const {
    const bool in_length = page + lane_ < (task.length + a_.problem.page_size - 1) >> page_bits_;
    return in_length && id >= 0 && id < a_.problem.pages ? id : -1;
  }

  __device__ __forceinline__ void send_query(const Task& task) {
    const int stage = turn_.stage();
    wait(shared_.query_empty(stage), turn_.parity() ^ 1);
    if (task.tiles >= 0) {
      if (a_.problem.fp8_query) {
        copy_query<1>(task, stage);
      } else {
        copy_query<2>(task, stage);
      }
    }
    if (lane_ == 0) shared_.tasks[turn_.index] = task;
    arrive_after_copies(shared_.query_full(stage));
    if (lane_ == 0) arrive(shared_.query_full(stage));
    __syncwarp();
    turn_.advance();
  }

  template <int Bytes>
  __device__ __forceinline__ void copy_query(const Task& task, int stage) const {
    constexpr int kVectors = D * Bytes / 16;  // of a row
    const Problem& p = a_.problem;
    const int row_tile = 8 * a_.column_tiles * a_.row_groups;
    const SharedAddress to =
        shared_address(shared_.query + stage * row_tile * shared_.query_stride);
    for (int i = lane_; i < row_tile * kVectors; i += kWarpSize) {
      const int row = i / kVectors;
      const bool exists = row < p.rows();
      const int64_t from = output_row(p, task.sequence, task.head, exists ? row : 0);
      copy_16(to + row * shared_.query_stride + i % kVectors * 16,
              static_cast<const uint8_t*>(a_.q) + (from * kVectors + i % kVectors) * 16, exists);
    }
    if constexpr (Bytes == 1) {
      for (int row = lane_; row < p.rows(); row += kWarpSize) {
        copy_4(shared_address(shared_.query_scale + stage * row_tile + row),
               a_.q_scale + output_row(p, task.sequence, task.head, row));
      }
    }
  }

  // The query follows the first tile, which is the longer way.
  __device__ __forceinline__ void stream(const Task& task, int ids) {
    if (task.tiles == 0) send_query(task);
    int page0 = first_page(task);
    int more = -1;
    bool asked = false;
    for (int i = 0; i < task.tiles; ++i) {
      const int token = task.first_token + i * kTileTokens;
      const int page = token >> page_bits_;
      if (!asked) {  // for the ids behind these, while these are used
        more = page_ids(task, page0 + kWarpSize);
        asked = true;
      }
      if (page - page0 >= kWarpSize) {
        page0 += kWarpSize;
        ids = more;
        asked = false;
      }
      send_tile(task, ids, page - page0, token & (a_.problem.page_size - 1));
      if (i == 0) send_query(task);
    }
  }

  // The tile whose pages are those of lanes `first` to `first + parts`.
  __device__ __forceinline__ void send_tile(const Task& task, int ids, int first, int row) {
    const uint32_t exist = __ballot_sync(~0u, ids >= 0) >> first & ((1u << parts_) - 1);
    uint32_t groups = 0;  // of 16 tokens
    for (int part = 0; part < parts_; ++part) {
      if (exist >> part & 1) {
        groups |= ((1u << part_tokens_ / 16) - 1) << part * (part_tokens_ / 16);
      }
    }
    const int part = lane_ - first;
    const bool copies = part >= 0 && part < parts_ && ids >= 0;
    const int tile_page = ids * a_.problem.kv_heads + task.head;
    const int bytes = __popc(exist) * part_tokens_ * HalfTile<Cache, D>::kTokenBytes;
    const bool token_scales = a_.problem.k_scale == ScaleKind::kToken;

    const int slot = ring_.index(a_.slots);
    wait(shared_.empty(slot), ring_.parity(a_.slots) ^ 1);
    if (lane_ == 0) {
      shared_.live[slot] = groups;
      arrive_expecting(shared_.full(slot),
                       bytes + (token_scales ? __popc(exist) * part_tokens_ * 4 : 0));
    }
    __syncwarp();
    if (copies) {
      copy_tile(part_of(slot, part), k_map_, shared_.full(slot), 0, row, 0, tile_page);
      if (token_scales) {
        copy_bytes(shared_address(shared_.token_scale + slot * kTileTokens + part * part_tokens_),
                   a_.k_scale + int64_t{tile_page} * a_.problem.page_size + row, part_tokens_ * 4,
                   shared_.full(slot));
      }
    }
    ring_.advance(a_.slots);

    const int v_slot = ring_.index(a_.slots);
    wait(shared_.empty(v_slot), ring_.parity(a_.slots) ^ 1);
    if (lane_ == 0) arrive_expecting(shared_.full(v_slot), bytes);
    __syncwarp();
    if (copies)
      copy_tile(part_of(v_slot, part), v_map_, shared_.full(v_slot), 0, row, 0, tile_page);
    ring_.advance(a_.slots);
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
  int parts_;        // pages of a tile
  int part_tokens_;  // of a page that belong to one tile
  Place ring_;
  Turn turn_;
};

}  // namespace jax_hpc::decode_attention
