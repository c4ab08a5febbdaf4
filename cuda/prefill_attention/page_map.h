// Descriptors of the paged caches for the copy engine.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "prefill_attention/config.h"

namespace jax_hpc::prefill_attention {

struct Maps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
};

// Pages of a cache [P, Hkv, N, D], one head, at most 128 bytes of each token: coordinates 0, 0,
// which 128 bytes, page * Hkv + head. A page outside the pool reads as zeros.
cudaError_t make_page_map(const Problem& problem, const void* pages, CUtensorMap* map);

// Whether a tile of rows is a box of the queries: G divides its rows, and they are not converted.
bool is_query_box(const Problem& problem);
// Queries [T, Hkv, G, D], all heads of a KV head and 128 / G tokens, at most 128 bytes of each row:
// coordinates 0, 0, which 128 bytes, KV head, token. Tokens behind the last read as zeros.
cudaError_t make_query_map(const Problem& problem, const void* q, CUtensorMap* map);

}  // namespace jax_hpc::prefill_attention
