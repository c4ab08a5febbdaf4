#include <algorithm>

#include "fused_moe/gate_up.cuh"
#include "fused_moe/gemm.h"
#include "fused_moe/launch_kernel.h"
#include "fused_moe/maps.h"

namespace jax_hpc::fused_moe {
namespace {

template <int TileRows, int Pieces, Format format>
cudaError_t launch_shape(const Problem& p, const Config& config, const GateUpArrays& arrays,
                         const CUtensorMap& map, bool overlaps_previous, int num_sms,
                         cudaStream_t stream) {
  using Shape = GateUpShape<TileRows, Pieces, format>;
  const int64_t tasks = max_tiles(p, config) * ceil_div(p.inter, Shape::kColumns);
  if (tasks >= int64_t{1} << 31) return cudaErrorInvalidValue;
  const auto ctas = static_cast<unsigned>(std::min<int64_t>(tasks, Shape::kCtasOfSm * num_sms));
  const LaunchShape shape{.grid = dim3(ctas),
                          .threads = Shape::kThreads,
                          .shared_bytes = Shape::kSharedBytes,
                          .overlaps_previous = overlaps_previous};
  return launch_kernel(gate_up_kernel<TileRows, Pieces, format>, shape, stream, p, arrays, map);
}

}  // namespace

cudaError_t launch_gate_up(const Problem& p, const Config& config, const Index& index,
                           const TokenRows& x, const Weights& weights, const RowBuffers& rows,
                           bool overlaps_previous, int num_sms, cudaStream_t stream) {
  if (config.is_wide) {
    return launch_wide_gate_up(p, config, index, x, weights, rows, overlaps_previous, num_sms,
                               stream);
  }
  CUtensorMap map;
  const cudaError_t status = make_gate_up_map(p, config, weights.gate_up, &map);
  if (status != cudaSuccess) return status;
  const GateUpArrays arrays{index, x, weights, rows};
#define JAX_HPC_CASE(tile, pieces, kind)                                                       \
  if (config.tile_rows == (tile) && config.gate_up_pieces == (pieces) &&                       \
      p.format == Format::kind) {                                                              \
    return launch_shape<tile, pieces, Format::kind>(p, config, arrays, map, overlaps_previous, \
                                                    num_sms, stream);                          \
  }
  JAX_HPC_CASE(8, 4, kTensor)
  JAX_HPC_CASE(8, 1, kTensor)
  JAX_HPC_CASE(16, 1, kTensor)
  JAX_HPC_CASE(32, 1, kTensor)
  JAX_HPC_CASE(64, 1, kTensor)
  JAX_HPC_CASE(128, 1, kTensor)
  JAX_HPC_CASE(8, 1, kBlock)
  JAX_HPC_CASE(16, 1, kBlock)
  JAX_HPC_CASE(32, 1, kBlock)
  JAX_HPC_CASE(64, 1, kBlock)
  JAX_HPC_CASE(128, 1, kBlock)
  JAX_HPC_CASE(8, 4, kBf16)
  JAX_HPC_CASE(8, 1, kBf16)
  JAX_HPC_CASE(16, 1, kBf16)
  JAX_HPC_CASE(32, 1, kBf16)
  JAX_HPC_CASE(64, 1, kBf16)
  JAX_HPC_CASE(128, 1, kBf16)
#undef JAX_HPC_CASE
  return cudaErrorInvalidValue;
}

}  // namespace jax_hpc::fused_moe
