#include <algorithm>

#include "fused_moe/gemm.h"
#include "fused_moe/launch_kernel.h"
#include "fused_moe/maps.h"
#include "fused_moe/wide_gate_up.cuh"

namespace jax_hpc::fused_moe {
namespace {

struct Maps {
  CUtensorMap weights;
  CUtensorMap rows;
};

template <Format format>
cudaError_t launch_as(const Problem& p, const Config& config, const WideGateUp& arrays,
                      const Maps& maps, bool overlaps_previous, int num_sms, cudaStream_t stream) {
  constexpr int kCluster = kWideSharing<format>;
  const int64_t tasks = max_tiles(p, config) * ceil_div(p.inter, kCluster * kWideColumns);
  if (tasks >= int64_t{1} << 31) return cudaErrorInvalidValue;
  const int64_t clusters = std::min<int64_t>(tasks, num_sms / kCluster);
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(clusters * kCluster)),
                          .threads = kWideThreads,
                          .shared_bytes = arrays.layout.total,
                          .cluster = kCluster,
                          .overlaps_previous = overlaps_previous};
  return launch_kernel(wide_gate_up_kernel<format>, shape, stream, p, arrays, maps.weights,
                       maps.rows);
}

}  // namespace

cudaError_t launch_wide_gate_up(const Problem& p, const Config& config, const Index& index,
                                const TokenRows& sorted, const Weights& weights,
                                const RowBuffers& rows, bool overlaps_previous, int num_sms,
                                cudaStream_t stream) {
  Maps maps;
  cudaError_t status = make_wide_gate_up_map(p, weights.gate_up, &maps.weights);
  if (status != cudaSuccess) return status;
  status = make_sorted_map(p, p.hidden, sorted.values, &maps.rows);
  if (status != cudaSuccess) return status;
  const bool has_blocks = p.format == Format::kBlock;
  const WideGateUp arrays{
      index,
      sorted,
      weights,
      rows,
      WideLayout(config.tile_rows, has_blocks ? kWideGateUpScales : 0, kWideStagedBytes),
      weight_policy(p, config)};
  return has_blocks ? launch_as<Format::kBlock>(p, config, arrays, maps, overlaps_previous, num_sms,
                                                stream)
                    : launch_as<Format::kTensor>(p, config, arrays, maps, overlaps_previous,
                                                 num_sms, stream);
}

}  // namespace jax_hpc::fused_moe
