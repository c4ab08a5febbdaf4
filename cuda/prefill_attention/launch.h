// Entry point of prefill attention: raw pointers and a stream.
#pragma once

#include <cuda_runtime.h>

#include "prefill_attention/config.h"

namespace jax_hpc::prefill_attention {

// All row-major and 16-byte aligned; see config.h for the letters. Null where there is none.
struct Buffers {
  const void* q;          // bf16 or e4m3 [T, Hq, D]
  const void* k_pages;    // bf16 or e4m3 [P, Hkv, N, D]
  const void* v_pages;    // the same
  const int* page_table;  // [B, M]
  const int* q_starts;    // [B]
  const int* q_lens;      // [B]
  const int* kv_lens;     // [B]
  const float* q_scale;   // [T, Hq], with e4m3 q
  const float* k_scale;   // by Problem::k_scale: [], [Hkv] or [P, Hkv, N]
  const float* v_scale;   // by Problem::v_scale: [] or [Hkv]
  const float* sinks;     // [Hq]
  void* out;              // bf16 [T, Hq, D]
  float* lse;             // [T, Hq]
  int* plan;              // [plan_ints]
};

// Plan and attention; no extent may be zero. With `overlaps` the attention may start while the plan
// is made.
cudaError_t launch(const Problem& problem, const Buffers& buffers, bool overlaps,
                   cudaStream_t stream);

}  // namespace jax_hpc::prefill_attention
