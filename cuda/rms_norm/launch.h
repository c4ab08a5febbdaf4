// Entry point of the root-mean-square norm: raw pointers and a stream.
#pragma once

#include <cuda_runtime.h>

#include "rms_norm/config.h"

namespace jax_hpc::rms_norm {

// All arrays are row-major and 16-byte aligned. `sum` may be `residual`, or `x`.
struct Arrays {
  const void* x;           // bf16 [tokens, hidden]
  const void* weight;      // bf16 or float [hidden]
  const void* residual;    // bf16 [tokens, hidden], or null
  const float* out_scale;  // [], or null
  void* y;                 // bf16 or e4m3 [tokens, hidden]
  void* sum;               // bf16 [tokens, hidden], or null
};

// hidden is a multiple of 8 and at most kMostHidden. No extent may be zero.
cudaError_t launch(const Problem& problem, const Config& config, const Arrays& arrays,
                   cudaStream_t stream);

}  // namespace jax_hpc::rms_norm
