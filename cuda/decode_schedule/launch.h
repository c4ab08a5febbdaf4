// Entry point of the decode schedule: raw pointers and a stream.
#pragma once

#include <cuda_runtime.h>

#include "decode_schedule/config.h"

namespace jax_hpc::decode_schedule {

// kv_lens: int32 [batch]; span_pair, span_tile: int32 [num_ctas + 1]; merge_last: int32
// [num_ctas]. batch * kv_heads stays below 2^31; no extent may be zero.
cudaError_t launch(const Problem& problem, const int* kv_lens, int* span_pair, int* span_tile,
                   int* merge_last, cudaStream_t stream);

}  // namespace jax_hpc::decode_schedule
