// Descriptors of the paged caches for the copy engine.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "prefill_attention/config.h"

namespace jax_hpc::prefill_attention {

// Pages of a cache [P, Hkv, N, D], one head, at most 128 bytes of each token: coordinates 0, 0,
// which 128 bytes, page * Hkv + head. A page outside the pool reads as zeros.
cudaError_t make_page_map(const Problem& problem, const void* pages, CUtensorMap* map);

}  // namespace jax_hpc::prefill_attention
