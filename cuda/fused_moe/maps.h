// The grouped products' operands for the copy engine.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "fused_moe/config.h"

namespace jax_hpc::fused_moe {

// Operands of two to five dimensions, innermost first, in boxes of 128-byte rows, swizzled.
cudaError_t make_gate_up_map(const Problem& p, const Config& config, const void* gate_up,
                             CUtensorMap* map);
cudaError_t make_down_map(const Problem& p, const Config& config, const void* down,
                          CUtensorMap* map);
cudaError_t make_act_map(const Problem& p, const void* act, CUtensorMap* map);

// The same for an intermediate of 192 columns in e4m3 (down_pairs.cuh).
cudaError_t make_down_pairs_map(const Problem& p, const void* down, CUtensorMap* map);
cudaError_t make_act_pieces_map(const Problem& p, const void* act, CUtensorMap* map);

// Those of the wide products: the weights of a CTA, and rows in the order of the index.
cudaError_t make_wide_gate_up_map(const Problem& p, const void* gate_up, CUtensorMap* map);
cudaError_t make_wide_down_map(const Problem& p, const void* down, CUtensorMap* map);
cudaError_t make_sorted_map(const Problem& p, int columns, const void* rows, CUtensorMap* map);

}  // namespace jax_hpc::fused_moe
