#include <algorithm>

#include "fused_moe/gemm.h"
#include "fused_moe/launch_kernel.h"
#include "fused_moe/maps.h"
#include "fused_moe/wide_down.cuh"

namespace jax_hpc::fused_moe {
namespace {

struct Maps {
  CUtensorMap weights;
  CUtensorMap act;
};

template <Format format>
cudaError_t launch_as(const Problem& p, const Config& config, const WideDown& arrays,
                      const Maps& maps, bool overlaps_previous, int num_sms, cudaStream_t stream) {
  const int64_t tasks = max_tiles(p, config) * ceil_div(p.hidden, kWideWeightRows);
  if (tasks >= int64_t{1} << 31) return cudaErrorInvalidValue;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(std::min<int64_t>(tasks, num_sms))),
                          .threads = kWideThreads,
                          .shared_bytes = arrays.layout.total,
                          .overlaps_previous = overlaps_previous};
  return launch_kernel(wide_down_kernel<format>, shape, stream, p, arrays, maps.weights, maps.act);
}

}  // namespace

cudaError_t launch_wide_down(const Problem& p, const Config& config, const Index& index,
                             const Weights& weights, const RowBuffers& rows, bool overlaps_previous,
                             int num_sms, cudaStream_t stream) {
  Maps maps;
  cudaError_t status = make_wide_down_map(p, weights.down, &maps.weights);
  if (status != cudaSuccess) return status;
  status = make_sorted_map(p, p.inter, rows.act, &maps.act);
  if (status != cudaSuccess) return status;
  const bool has_blocks = p.format == Format::kBlock;
  const WideDown arrays{
      index, weights, rows,
      WideLayout(config.tile_rows, has_blocks ? kWideDownScales : 0, kWideDownStaged),
      weight_policy(p, config)};
  return has_blocks ? launch_as<Format::kBlock>(p, config, arrays, maps, overlaps_previous, num_sms,
                                                stream)
                    : launch_as<Format::kTensor>(p, config, arrays, maps, overlaps_previous,
                                                 num_sms, stream);
}

}  // namespace jax_hpc::fused_moe
