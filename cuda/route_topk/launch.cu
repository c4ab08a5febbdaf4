#include "route_topk/launch.h"

#include <utility>

#include "common/launch.h"
#include "route_topk/cta.cuh"
#include "route_topk/shared.cuh"
#include "route_topk/warp.cuh"

namespace jax_hpc::route_topk {
namespace {

// Instances by values of a lane.
using OfCta = std::integer_sequence<int, 1, 2, 3, 4>;
using OfWarp = std::integer_sequence<int, 4, 6, 8, 12, 16, 24, 32>;

template <int... Values>
cudaError_t launch_cta(std::integer_sequence<int, Values...>, const Problem& p,
                       const Config& config, const Arrays& arrays, bool overlaps_previous,
                       cudaStream_t stream) {
  const int threads = config.warps * kWarpSize;
  if (config.warps > kMostWarpsOfToken || p.experts > config.lane_values * threads) {
    return cudaErrorInvalidValue;
  }
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(p.tokens)),
                          .threads = threads,
                          .overlaps_previous = overlaps_previous};
  cudaError_t status = cudaErrorInvalidValue;
  const auto try_one = [&]<int N>() {
    if (config.lane_values != N) return;
    status = jax_hpc::launch(topk_cta_kernel<N>, shape, stream, p, arrays);
  };
  (try_one.template operator()<Values>(), ...);
  return status;
}

template <int... Values>
cudaError_t launch_warp(std::integer_sequence<int, Values...>, const Problem& p,
                        const Config& config, const Arrays& arrays, bool overlaps_previous,
                        cudaStream_t stream) {
  if (config.warps > kMostTokensOfCta || p.experts > config.lane_values * kWarpSize) {
    return cudaErrorInvalidValue;
  }
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(ceil_div(p.tokens, config.warps))),
                          .threads = config.warps * kWarpSize,
                          .overlaps_previous = overlaps_previous};
  cudaError_t status = cudaErrorInvalidValue;
  const auto try_one = [&]<int N>() {
    if (config.lane_values != N) return;
    status = jax_hpc::launch(topk_warp_kernel<N>, shape, stream, p, arrays);
  };
  (try_one.template operator()<Values>(), ...);
  return status;
}

cudaError_t launch_shared(const Problem& p, const Arrays& arrays, bool overlaps_previous,
                          cudaStream_t stream) {
  if (p.experts > kMostExperts) return cudaErrorInvalidValue;
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>(p.tokens)),
      .threads = kSharedWarps * kWarpSize,
      .shared_bytes = (place_of(p.experts) + p.options.num_groups) * int{sizeof(float)},
      .overlaps_previous = overlaps_previous};
  return jax_hpc::launch(topk_shared_kernel, shape, stream, p, arrays);
}

}  // namespace

cudaError_t launch(const Problem& problem, const Config& config, const Arrays& arrays,
                   bool overlaps_previous, cudaStream_t stream) {
  switch (config.kernel) {
    case Kernel::kCta:
      return launch_cta(OfCta{}, problem, config, arrays, overlaps_previous, stream);
    case Kernel::kWarp:
      return launch_warp(OfWarp{}, problem, config, arrays, overlaps_previous, stream);
    case Kernel::kShared:
      return launch_shared(problem, arrays, overlaps_previous, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_hpc::route_topk
