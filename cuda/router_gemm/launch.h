// Entry point of the router product: raw pointers and a stream.
#pragma once

#include <cuda_runtime.h>

#include "router_gemm/config.h"

namespace jax_hpc::router_gemm {

// x: bf16 [tokens, hidden]; parts: bf16 [terms, experts, hidden]; logits: float32
// [tokens, experts]; all row-major and 16-byte aligned. No extent may be zero.
cudaError_t launch(const Problem& problem, const Config& config, const void* x, const void* parts,
                   float* logits, cudaStream_t stream);

}  // namespace jax_hpc::router_gemm
