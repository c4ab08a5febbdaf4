// Entry point of the choice of experts: raw pointers and a stream.
#pragma once

#include <cuda_runtime.h>

#include "route_topk/config.h"

namespace jax_hpc::route_topk {

struct Arrays {
  const float* logits;     // [tokens, experts]
  const float* bias;       // [experts], or null
  int32_t* ids;            // [tokens, k]
  float* weights;          // [tokens, k]
  float* identity_weight;  // [tokens]
};

// All arrays are row-major. No extent may be zero. overlaps_previous: the kernel may start while
// the one before it in the stream still runs; it waits for that one before it touches any array.
cudaError_t launch(const Problem& problem, const Config& config, const Arrays& arrays,
                   bool overlaps_previous, cudaStream_t stream);

}  // namespace jax_hpc::route_topk
