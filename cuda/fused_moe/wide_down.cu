#include <algorithm>

#include "fused_moe/cache_policy.h"
#include "fused_moe/gemm.h"
#include "fused_moe/launch_kernel.h"
#include "fused_moe/maps.h"
#include "fused_moe/wide_down.cuh"
#include "fused_moe/wide_rows_down.cuh"

namespace jax_hpc::fused_moe {

cudaError_t launch_wide_down(const Problem& p, const Config& config, const Index& index,
                             const Weights& weights, const RowBuffers& rows, bool overlaps_previous,
                             int num_sms, cudaStream_t stream) {
  CUtensorMap weight_map;
  CUtensorMap act_map;
  cudaError_t status = make_wide_down_map(p, weights.down, &weight_map);
  if (status != cudaSuccess) return status;
  status = make_sorted_map(p, p.inter, rows.act, &act_map);
  if (status != cudaSuccess) return status;
  const bool has_blocks = p.format == Format::kBlock;
  const int staged = p.format == Format::kTensor ? config.tile_rows * kWideDownStaged
                     : has_blocks                ? kRowStagedBytes
                                                 : WideDownChunks::kBytes;
  const WideDown arrays{index, weights, rows,
                        WideLayout(config.tile_rows, has_blocks ? kDownScales : 0, staged),
                        weight_policy(p, config)};
  const int64_t tasks = max_tiles(p, config) * ceil_div(p.hidden, kWideWeightRows);
  if (tasks >= int64_t{1} << 31) return cudaErrorInvalidValue;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(std::min<int64_t>(tasks, num_sms))),
                          .threads = has_blocks ? kRowThreads : kWideThreads,
                          .shared_bytes = arrays.layout.total,
                          .overlaps_previous = overlaps_previous};
  auto* kernel = wide_row_down_kernel;
  if (p.format == Format::kTensor) kernel = wide_down_kernel<Format::kTensor>;
  if (p.format == Format::kBf16) kernel = wide_down_kernel<Format::kBf16>;
  return launch_kernel(kernel, shape, stream, p, arrays, weight_map, act_map);
}

}  // namespace jax_hpc::fused_moe
