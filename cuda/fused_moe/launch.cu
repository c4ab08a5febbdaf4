#include "fused_moe/launch.h"

#include "fused_moe/gemm.h"
#include "fused_moe/launch_kernel.h"
#include "fused_moe/prepare.cuh"
#include "fused_moe/reduce.cuh"
#include "fused_moe/sort.cuh"

namespace jax_hpc::fused_moe {
namespace {

// CTAs behind those that index; none where x is taken as it is.
int quantizing_ctas(const Problem& p, const Arrays& a, int threads) {
  if (!quantizes_x(p.format, a.x_is_fp8)) return 0;
  return ceil_div(p.tokens * blocks_of(p.hidden, kBlock), threads / kGroupLanes);
}

// Of x as the products take it, in the order of the tokens.
TokenRows token_rows(const Problem& p, const Arrays& a) {
  return quantizes_x(p.format, a.x_is_fp8) ? TokenRows{a.workspace.x, a.workspace.x_scale}
                                           : TokenRows{a.x, a.x_scale};
}

// Rows of x in the order of the index lie where the experts' outputs will be (num_outputs), and
// behind all of them their scales.
Sorted sorted_rows(const Problem& p, const Arrays& a) {
  auto* bytes = static_cast<uint8_t*>(a.workspace.rows.outputs);
  return {bytes, reinterpret_cast<float*>(bytes + num_pairs(p) * p.hidden * value_bytes(p.format))};
}

template <bool kPerGroup>
cudaError_t launch_one(const Problem& p, const Config& config, const Arrays& a,
                       cudaStream_t stream) {
  const int quantizing = config.is_wide ? 0 : quantizing_ctas(p, a, kOneThreads);
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(1 + quantizing)),
                          .threads = kOneThreads};
  return launch_kernel(prepare_kernel<kPerGroup>, shape, stream, p, Plan(p, config, kOneThreads),
                       a);
}

template <bool kPerGroup>
cudaError_t launch_cluster(const Problem& p, const Config& config, const Arrays& a,
                           cudaStream_t stream) {
  const int quantizing = config.is_wide ? 0 : quantizing_ctas(p, a, kClusterThreads);
  const int clusters = 1 + ceil_div(quantizing, kSortingCluster);
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(clusters * kSortingCluster)),
                          .threads = kClusterThreads,
                          .cluster = kSortingCluster};
  return launch_kernel(prepare_cluster_kernel<kPerGroup>, shape, stream, p,
                       Plan(p, config, kClusterThreads), a);
}

template <bool kPerGroup>
cudaError_t launch_segments(const Problem& p, const Config& config, const Arrays& a, bool overlaps,
                            cudaStream_t stream) {
  const Plan plan(p, config, kPlaceThreads);
  const int quantizing = config.is_wide ? 0 : quantizing_ctas(p, a, kCountThreads);
  LaunchShape shape{.grid = dim3(static_cast<unsigned>(plan.ctas + quantizing)),
                    .threads = kCountThreads};
  const cudaError_t status = launch_kernel(count_kernel<kPerGroup>, shape, stream, p, plan, a);
  if (status != cudaSuccess) return status;
  shape = {.grid = dim3(static_cast<unsigned>(plan.ctas)),
           .threads = kPlaceThreads,
           .overlaps_previous = overlaps};
  return launch_kernel(place_kernel, shape, stream, plan, a);
}

template <Format format>
cudaError_t launch_prepare_as(const Problem& p, const Config& config, const Arrays& a,
                              bool overlaps, cudaStream_t stream) {
  constexpr bool kPerGroup = format == Format::kBlock;
  cudaError_t status = cudaErrorInvalidValue;
  switch (sorting_of(p)) {
    case Sorting::kOne:
      status = launch_one<kPerGroup>(p, config, a, stream);
      break;
    case Sorting::kCluster:
      status = launch_cluster<kPerGroup>(p, config, a, stream);
      break;
    case Sorting::kSegments:
      status = launch_segments<kPerGroup>(p, config, a, overlaps, stream);
      break;
  }
  if (status != cudaSuccess || !config.is_wide) return status;
  const int ctas = ceil_div(p.tokens * blocks_of(p.hidden, kBlock), sort_groups(format));
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(ctas)),
                          .threads = kSortThreads,
                          .overlaps_previous = overlaps};
  return launch_kernel(sort_kernel<format>, shape, stream, p, a, sorted_rows(p, a));
}

}  // namespace

cudaError_t launch_prepare(const Problem& problem, const Config& config, const Arrays& arrays,
                           bool overlaps, cudaStream_t stream) {
  if (!is_supported(problem) || config.tile_rows > kMostTileRows) return cudaErrorInvalidValue;
  switch (problem.format) {
    case Format::kTensor:
      return launch_prepare_as<Format::kTensor>(problem, config, arrays, overlaps, stream);
    case Format::kBlock:
      return launch_prepare_as<Format::kBlock>(problem, config, arrays, overlaps, stream);
    case Format::kBf16:
      return launch_prepare_as<Format::kBf16>(problem, config, arrays, overlaps, stream);
  }
  return cudaErrorInvalidValue;
}

TokenRows prepared_rows(const Problem& problem, const Config& config, const Arrays& arrays) {
  if (!config.is_wide) return token_rows(problem, arrays);
  const Sorted sorted = sorted_rows(problem, arrays);
  return {sorted.values, sorted.scale};
}

cudaError_t launch_reduce(const Problem& problem, const Config& config, const Arrays& arrays,
                          const Slice& slice, bool overlaps, cudaStream_t stream) {
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>(problem.tokens),
                   static_cast<unsigned>(ceil_div(slice.count, kReduceThreads * kReduceValues))),
      .threads = kReduceThreads,
      .overlaps_previous = overlaps};
  constexpr int kFew = 8;
  const bool has_few = problem.top_k <= kFew;
  auto kernel = has_few ? reduce_kernel<kFew, false> : reduce_kernel<2 * kFew, false>;
  if (problem.format == Format::kBf16) kernel = reduce_kernel<kFew, true>;
  const int64_t row_bytes = int64_t{problem.hidden} * output_bytes(problem.format);
  const bool discards =
      config.discards_outputs && row_bytes % kLineBytes == 0 &&
      reinterpret_cast<uintptr_t>(arrays.workspace.rows.outputs) % kLineBytes == 0;
  return launch_kernel(kernel, shape, stream, problem, arrays, slice, discards);
}

cudaError_t launch(const Problem& problem, const Config& config, const Arrays& arrays,
                   bool overlaps, int num_sms, cudaStream_t stream) {
  if (!has_valid_slices(problem, config)) return cudaErrorInvalidValue;
  const Workspace& w = arrays.workspace;
  const Index index{w.tiles, w.header, w.row_token, arrays.topk_ids, arrays.expert_offset};
  const TokenRows x = prepared_rows(problem, config, arrays);
  // Its first kernel never overlaps with what comes before the call: what the call is given is
  // complete when any kernel of the chain starts.
  cudaError_t status = launch_prepare(problem, config, arrays, overlaps, stream);
  if (status == cudaSuccess) {
    status = launch_gate_up(problem, config, index, x, arrays.weights, w.rows, overlaps, num_sms,
                            stream);
  }
  for (int i = 0; status == cudaSuccess && i < config.output_slices; ++i) {
    const Slice slice = slice_of(problem, config, i);
    status = launch_down(problem, config, index, arrays.weights, w.rows, slice, overlaps, num_sms,
                         stream);
    if (status == cudaSuccess) {
      status = launch_reduce(problem, config, arrays, slice, overlaps, stream);
    }
  }
  return status;
}

}  // namespace jax_hpc::fused_moe
