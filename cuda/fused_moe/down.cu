#include <algorithm>

#include "fused_moe/down.cuh"
#include "fused_moe/gemm.h"
#include "fused_moe/maps.h"

namespace jax_hpc::fused_moe {
namespace {

template <int TileRows, Format format>
cudaError_t launch_shape(const Problem& p, const Config& config, const DownArrays& arrays,
                         const CUtensorMap& weight_map, const CUtensorMap& act_map,
                         bool overlaps_previous, int num_sms, cudaStream_t stream) {
  using Shape = DownShape<TileRows, format>;
  const int64_t tasks = max_tiles(p, config) * ceil_div(p.hidden, kWeightRows);
  if (tasks >= int64_t{1} << 31) return cudaErrorInvalidValue;
  const auto ctas = static_cast<unsigned>(std::min<int64_t>(tasks, Shape::kCtasOfSm * num_sms));
  const LaunchShape shape{.grid = dim3(ctas),
                          .threads = kThreads,
                          .shared_bytes = Shape::kSharedBytes,
                          .overlaps_previous = overlaps_previous};
  return jax_hpc::launch(down_kernel<TileRows, format>, shape, stream, p, arrays, weight_map,
                         act_map);
}

}  // namespace

cudaError_t launch_down(const Problem& p, const Config& config, const Index& index,
                        const Weights& weights, const RowBuffers& rows, bool overlaps_previous,
                        int num_sms, cudaStream_t stream) {
  CUtensorMap weight_map;
  CUtensorMap act_map;
  cudaError_t status = make_down_map(p, weights.down, &weight_map);
  if (status != cudaSuccess) return status;
  status = make_act_map(p, rows.act, &act_map);
  if (status != cudaSuccess) return status;
  const DownArrays arrays{index, weights, rows};
#define JAX_HPC_CASE(tile, kind)                                                    \
  if (config.tile_rows == (tile) && p.format == Format::kind) {                     \
    return launch_shape<tile, Format::kind>(p, config, arrays, weight_map, act_map, \
                                            overlaps_previous, num_sms, stream);    \
  }
  JAX_HPC_CASE(8, kTensor)
  JAX_HPC_CASE(16, kTensor)
  JAX_HPC_CASE(32, kTensor)
  JAX_HPC_CASE(64, kTensor)
  JAX_HPC_CASE(8, kBlock)
  JAX_HPC_CASE(16, kBlock)
  JAX_HPC_CASE(32, kBlock)
  JAX_HPC_CASE(64, kBlock)
#undef JAX_HPC_CASE
  return cudaErrorInvalidValue;
}

}  // namespace jax_hpc::fused_moe
