#include "route_topk/launch.h"

#include <utility>

#include "common/launch.h"
#include "route_topk/register.cuh"
#include "route_topk/shared.cuh"

namespace jax_hpc::route_topk {
namespace {

// Instances of the register kernel by values of a lane.
using OneWarp = std::integer_sequence<int, 4, 6, 8, 12, 16, 24, 32>;
using FewWarps = std::integer_sequence<int, 3, 4, 6, 8>;

template <int Warps, int... Values>
cudaError_t launch_register(std::integer_sequence<int, Values...>, const Problem& p,
                            const Config& config, const Arrays& arrays, bool overlaps_previous,
                            cudaStream_t stream) {
  const bool fits = p.experts <= config.lane_values * Warps * kWarpSize &&
                    config.tokens <= RegisterShape<1, Warps>::kTokens;
  if (!fits) return cudaErrorInvalidValue;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(ceil_div(p.tokens, config.tokens))),
                          .threads = config.tokens * Warps * kWarpSize,
                          .overlaps_previous = overlaps_previous};
  cudaError_t status = cudaErrorInvalidValue;
  const auto try_one = [&]<int N>() {
    if (config.lane_values != N) return;
    status = jax_hpc::launch(topk_register_kernel<N, Warps>, shape, stream, p, arrays);
  };
  (try_one.template operator()<Values>(), ...);
  return status;
}

cudaError_t launch_shared(const Problem& p, const Arrays& arrays, bool overlaps_previous,
                          cudaStream_t stream) {
  if (p.experts > kMostExperts) return cudaErrorInvalidValue;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(p.tokens)),
                          .threads = kSharedWarps * kWarpSize,
                          .shared_bytes = (p.experts + p.options.num_groups) * int{sizeof(float)},
                          .overlaps_previous = overlaps_previous};
  return jax_hpc::launch(topk_shared_kernel, shape, stream, p, arrays);
}

}  // namespace

cudaError_t launch(const Problem& problem, const Config& config, const Arrays& arrays,
                   bool overlaps_previous, cudaStream_t stream) {
  if (config.kernel == Kernel::kShared) {
    return launch_shared(problem, arrays, overlaps_previous, stream);
  }
  if (config.warps == 1) {
    return launch_register<1>(OneWarp{}, problem, config, arrays, overlaps_previous, stream);
  }
  return launch_register<kWarpsOfToken>(FewWarps{}, problem, config, arrays, overlaps_previous,
                                        stream);
}

}  // namespace jax_hpc::route_topk
