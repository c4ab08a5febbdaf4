// Descriptors of the paged caches for the copy engine.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "decode_attention/config.h"

namespace jax_hpc::decode_attention {

// Tiles of up to 64 tokens of a page and head of a cache [P, Hkv, N, D], in the layout that
// HalfTile describes: coordinates 0, row of the page, 0, page * Hkv + head.
cudaError_t make_page_map(const Problem& problem, const void* pages, CUtensorMap* map);

}  // namespace jax_hpc::decode_attention
