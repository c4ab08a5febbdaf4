#include <algorithm>

#include "fused_moe/cache_policy.h"
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

// How a format's kernel is launched.
struct Form {
  int parts;  // tasks of a tile, a multiple of the cluster's CTAs
  int cluster;
  int threads;
};

template <class Kernel>
cudaError_t launch_as(Kernel kernel, const Form& form, const Problem& p, const Config& config,
                      const WideGateUp& arrays, const Maps& maps, bool overlaps_previous,
                      int num_sms, cudaStream_t stream) {
  const int64_t tasks = max_tiles(p, config) * form.parts;
  if (tasks >= int64_t{1} << 31) return cudaErrorInvalidValue;
  const int64_t ctas = std::min<int64_t>(tasks, num_sms / form.cluster * form.cluster);
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(ctas)),
                          .threads = form.threads,
                          .shared_bytes = arrays.layout.total,
                          .cluster = form.cluster,
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
  if (has_blocks) {
    return launch_as(wide_row_gate_up_kernel, {row_gate_up_parts(p), kRowCluster, kRowThreads}, p,
                     config, arrays, maps, overlaps_previous, num_sms, stream);
  }
  const auto kernel = p.format == Format::kTensor ? wide_gate_up_kernel<Format::kTensor>
                                                  : wide_gate_up_kernel<Format::kBf16>;
  return launch_as(kernel, {ceil_div(p.inter, kWideColumns), 1, kWideThreads}, p, config, arrays,
                   maps, overlaps_previous, num_sms, stream);
}

}  // namespace jax_hpc::fused_moe
