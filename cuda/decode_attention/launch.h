// Entry point of decode attention: raw pointers and a stream.
#pragma once

#include <cuda_runtime.h>

#include "decode_attention/config.h"

namespace jax_hpc::decode_attention {

// All row-major and 16-byte aligned; see config.h for the letters. Null where there is none.
struct Buffers {
  const void* q;          // bf16 or e4m3 [B, S, Hq, D]
  const void* k_pages;    // bf16 or e4m3 [P, Hkv, N, D]
  const void* v_pages;    // the same
  const int* page_table;  // [B, M]
  const int* kv_lens;     // [B]
  const int* span_pair;   // [num_ctas + 1]; of a schedule, where the cut goes by one
  const int* span_tile;   // [num_ctas + 1]
  const int* merge_last;  // [num_ctas]
  const float* q_scale;   // [B, S, Hq], with e4m3 q
  const float* k_scale;   // by Problem::k_scale: [], [Hkv] or [P, Hkv, N]
  const float* v_scale;   // by Problem::v_scale: [] or [Hkv]
  const float* sinks;     // [Hq]
  void* out;              // bf16 [B, S, Hq, D]
  float* lse;             // [B, S, Hq]
  float* partial_out;     // [workspace_slots, S * G, D]
  float* partial_state;   // [workspace_slots, S * G, 2]
};

// How the kernels follow each other in the stream.
struct Order {
  bool after_schedule;  // the kernel before is the one that wrote the schedule
  bool overlaps;  // each may start while the one before still runs (but the first after others)
};

// Attention and, where a pair may be cut, merge. No extent may be zero; no length may be more than
// the page table holds.
cudaError_t launch(const Problem& problem, const Config& config, const Cut& cut,
                   const Buffers& buffers, const Order& order, cudaStream_t stream);

}  // namespace jax_hpc::decode_attention
