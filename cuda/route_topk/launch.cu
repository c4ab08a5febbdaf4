#include "route_topk/launch.h"

#include "common/launch.h"
#include "route_topk/cta.cuh"
#include "route_topk/warp.cuh"

namespace jax_hpc::route_topk {
namespace {

// Instances of the warp kernel: values of a lane, and how many of them one load brings.
#define JAX_HPC_WARP_SHAPES(SHAPE) \
  SHAPE(4, 1)                      \
  SHAPE(6, 1)                      \
  SHAPE(8, 1) SHAPE(12, 4) SHAPE(16, 4) SHAPE(24, 4) SHAPE(32, 4) SHAPE(16, 1) SHAPE(32, 1)

cudaError_t launch_cta(const Problem& p, const Arrays& arrays, bool overlaps_previous,
                       cudaStream_t stream) {
  if (p.experts > kMostExperts) return cudaErrorInvalidValue;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(p.tokens)),
                          .threads = kCtaWarps * kWarpSize,
                          .shared_bytes = (p.experts + p.options.num_groups) * int{sizeof(float)},
                          .overlaps_previous = overlaps_previous};
  return jax_hpc::launch(topk_cta_kernel, shape, stream, p, arrays);
}

}  // namespace

cudaError_t launch(const Problem& problem, const Config& config, const Arrays& arrays,
                   bool overlaps_previous, cudaStream_t stream) {
  if (config.kernel == Kernel::kCta) return launch_cta(problem, arrays, overlaps_previous, stream);
  const bool fits = problem.experts <= config.lane_values * kWarpSize &&
                    problem.experts % config.width == 0 && config.tokens <= kMostTokensOfCta;
  if (!fits) return cudaErrorInvalidValue;
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>(ceil_div(problem.tokens, config.tokens))),
      .threads = config.tokens * kWarpSize,
      .overlaps_previous = overlaps_previous};
#define JAX_HPC_CASE(values, columns)                                                          \
  if (config.lane_values == values && config.width == columns) {                               \
    return jax_hpc::launch(topk_warp_kernel<values, columns>, shape, stream, problem, arrays); \
  }
  JAX_HPC_WARP_SHAPES(JAX_HPC_CASE)
#undef JAX_HPC_CASE
  return cudaErrorInvalidValue;
}

}  // namespace jax_hpc::route_topk
