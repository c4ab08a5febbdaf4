#include <algorithm>

#include "fused_moe/down.cuh"
#include "fused_moe/down_pairs.cuh"
#include "fused_moe/gemm.h"
#include "fused_moe/launch_kernel.h"
#include "fused_moe/maps.h"

namespace jax_hpc::fused_moe {
namespace {

struct Maps {
  CUtensorMap weights;
  CUtensorMap act;
};

template <class Shape, class Kernel>
cudaError_t launch_with(Kernel kernel, const Problem& p, const Config& config,
                        const DownArrays& arrays, const Maps& maps, bool overlaps_previous,
                        int num_sms, cudaStream_t stream) {
  const int64_t tasks = max_tiles(p, config) * ceil_div(arrays.slice.count, Shape::kTaskRows);
  if (tasks >= int64_t{1} << 31) return cudaErrorInvalidValue;
  const auto ctas = static_cast<unsigned>(std::min<int64_t>(tasks, Shape::kCtasOfSm * num_sms));
  const LaunchShape shape{.grid = dim3(ctas),
                          .threads = Shape::kThreads,
                          .shared_bytes = Shape::kSharedBytes,
                          .overlaps_previous = overlaps_previous};
  return launch_kernel(kernel, shape, stream, p, arrays, maps.weights, maps.act);
}

// More rows than 64 have no registers for pairs, and no need: they wait for products, not for
// weights. Of bf16, 192 columns are three whole stages.
constexpr int kMostPairRows = 64;
constexpr bool can_take_pairs(Format format, int tile_rows) {
  return format != Format::kBf16 && tile_rows <= kMostPairRows;
}
bool takes_pairs(const Problem& p, const Config& config) {
  return p.inter == kPairColumns && can_take_pairs(p.format, config.tile_rows);
}

cudaError_t make_maps(const Problem& p, const Config& config, const void* down, const void* act,
                      Maps* maps) {
  const bool pairs = takes_pairs(p, config);
  const cudaError_t status = pairs ? make_down_pairs_map(p, down, &maps->weights)
                                   : make_down_map(p, config, down, &maps->weights);
  if (status != cudaSuccess) return status;
  return pairs ? make_act_pieces_map(p, act, &maps->act) : make_act_map(p, act, &maps->act);
}

template <int TileRows, Format format>
cudaError_t launch_shape(const Problem& p, const Config& config, const DownArrays& arrays,
                         const Maps& maps, bool overlaps_previous, int num_sms,
                         cudaStream_t stream) {
  if constexpr (can_take_pairs(format, TileRows)) {
    if (takes_pairs(p, config)) {
      return launch_with<DownPairsShape<TileRows, format>>(down_pairs_kernel<TileRows, format>, p,
                                                           config, arrays, maps, overlaps_previous,
                                                           num_sms, stream);
    }
  }
  return launch_with<DownShape<TileRows, format>>(down_kernel<TileRows, format>, p, config, arrays,
                                                  maps, overlaps_previous, num_sms, stream);
}

}  // namespace

cudaError_t launch_down(const Problem& p, const Config& config, const Index& index,
                        const Weights& weights, const RowBuffers& rows, const Slice& slice,
                        bool overlaps_previous, int num_sms, cudaStream_t stream) {
  if (config.is_wide) {
    return launch_wide_down(p, config, index, weights, rows, overlaps_previous, num_sms, stream);
  }
  Maps maps;
  const cudaError_t status = make_maps(p, config, weights.down, rows.act, &maps);
  if (status != cudaSuccess) return status;
  const DownArrays arrays{index, weights, rows, slice};
#define JAX_HPC_CASE(tile, kind)                                                                 \
  if (config.tile_rows == (tile) && p.format == Format::kind) {                                  \
    return launch_shape<tile, Format::kind>(p, config, arrays, maps, overlaps_previous, num_sms, \
                                            stream);                                             \
  }
  JAX_HPC_CASE(8, kTensor)
  JAX_HPC_CASE(16, kTensor)
  JAX_HPC_CASE(32, kTensor)
  JAX_HPC_CASE(64, kTensor)
  JAX_HPC_CASE(128, kTensor)
  JAX_HPC_CASE(8, kBlock)
  JAX_HPC_CASE(16, kBlock)
  JAX_HPC_CASE(32, kBlock)
  JAX_HPC_CASE(64, kBlock)
  JAX_HPC_CASE(128, kBlock)
  JAX_HPC_CASE(8, kBf16)
  JAX_HPC_CASE(16, kBf16)
  JAX_HPC_CASE(32, kBf16)
  JAX_HPC_CASE(64, kBf16)
  JAX_HPC_CASE(128, kBf16)
#undef JAX_HPC_CASE
  return cudaErrorInvalidValue;
}

}  // namespace jax_hpc::fused_moe
