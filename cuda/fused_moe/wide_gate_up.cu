#include <algorithm>

#include "fused_moe/gemm.h"
#include "fused_moe/launch_kernel.h"
#include "fused_moe/maps.h"
#include "fused_moe/wide_gate_up.cuh"
#include "fused_moe/wide_rows_gate_up.cuh"

namespace jax_hpc::fused_moe {
namespace {

struct Maps {
  CUtensorMap weights;
  CUtensorMap rows;
};

template <int kCluster, class Kernel>
cudaError_t launch_as(Kernel kernel, int threads, const Problem& p, const Config& config,
                      const WideGateUp& arrays, const Maps& maps, bool overlaps_previous,
                      int num_sms, cudaStream_t stream) {
  const int64_t tasks = max_tiles(p, config) * ceil_div(p.inter, kCluster * kWideColumns);
  if (tasks >= int64_t{1} << 31) return cudaErrorInvalidValue;
  const int64_t clusters = std::min<int64_t>(tasks, num_sms / kCluster);
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(clusters * kCluster)),
                          .threads = threads,
                          .shared_bytes = arrays.layout.total,
                          .cluster = kCluster,
                          .overlaps_previous = overlaps_previous};
  return launch_kernel(kernel, shape, stream, p, arrays, maps.weights, maps.rows);
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
  const int staged = p.format == Format::kTensor ? config.tile_rows * kWideStagedBytes
                     : has_blocks                ? kRowStagedBytes
                                                 : WideActChunks::kBytes;
  const WideGateUp arrays{index,
                          sorted,
                          weights,
                          rows,
                          WideLayout(config.tile_rows, has_blocks ? kGateUpScales : 0, staged),
                          weight_policy(p, config)};
  switch (p.format) {
    case Format::kTensor:
      return launch_as<wide_sharing(Format::kTensor)>(wide_gate_up_kernel<Format::kTensor>,
                                                      kWideThreads, p, config, arrays, maps,
                                                      overlaps_previous, num_sms, stream);
    case Format::kBlock:
      return launch_as<kRowCluster>(wide_row_gate_up_kernel, kRowThreads, p, config, arrays, maps,
                                    overlaps_previous, num_sms, stream);
    case Format::kBf16:
      return launch_as<wide_sharing(Format::kBf16)>(wide_gate_up_kernel<Format::kBf16>,
                                                    kWideThreads, p, config, arrays, maps,
                                                    overlaps_previous, num_sms, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_hpc::fused_moe
