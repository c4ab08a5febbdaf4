// Entry points of the two grouped products: raw pointers and a stream.
#pragma once

#include <cuda_runtime.h>

#include "fused_moe/config.h"

namespace jax_hpc::fused_moe {

// act[row] = SiLU(gate) * up of x[row_token[row]], requantised, with act_scale for kBlock; or
// rounded.
// `overlaps_previous`: programmatic launch, in which the kernel before this one writes index and x.
cudaError_t launch_gate_up(const Problem& problem, const Config& config, const Index& index,
                           const TokenRows& x, const Weights& weights, const RowBuffers& rows,
                           bool overlaps_previous, int num_sms, cudaStream_t stream);

// outputs[row] = down(act[row]), of a slice of the hidden axis. The kernel before is gate-up, or
// for a later slice the reduction of the slice before. Down reads the index before it waits, and
// for a later slice waits at its end alone: everything between it and gate-up must have started
// behind gate-up's end.
cudaError_t launch_down(const Problem& problem, const Config& config, const Index& index,
                        const Weights& weights, const RowBuffers& rows, const Slice& slice,
                        bool overlaps_previous, int num_sms, cudaStream_t stream);

// The same with Config::is_wide, rows of x that lie in the order of the index, and one slice.
cudaError_t launch_wide_gate_up(const Problem& problem, const Config& config, const Index& index,
                                const TokenRows& sorted, const Weights& weights,
                                const RowBuffers& rows, bool overlaps_previous, int num_sms,
                                cudaStream_t stream);
cudaError_t launch_wide_down(const Problem& problem, const Config& config, const Index& index,
                             const Weights& weights, const RowBuffers& rows, bool overlaps_previous,
                             int num_sms, cudaStream_t stream);

}  // namespace jax_hpc::fused_moe
