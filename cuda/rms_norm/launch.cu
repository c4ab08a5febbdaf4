#include "rms_norm/launch.h"

#include "common/launch.h"
#include "rms_norm/kernel.cuh"

namespace jax_hpc::rms_norm {
namespace {

template <int kGroups, class Weights, bool kHasResidual>
cudaError_t launch_with(const Problem& p, const Arrays& arrays, cudaStream_t stream) {
  const int warps = warps_of_row(p.hidden, kGroups);
  if (warps > most_warps(kGroups)) return cudaErrorInvalidValue;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(p.tokens)),
                          .threads = warps * kWarpSize};
  return jax_hpc::launch(rms_norm_kernel<kGroups, Weights, kHasResidual>, shape, stream, p, arrays,
                         1.0f / static_cast<float>(p.hidden));
}

template <int kGroups>
cudaError_t launch_cut(const Problem& p, const Arrays& arrays, cudaStream_t stream) {
  if (p.weight == Weight::kBf16) {
    return p.has_residual ? launch_with<kGroups, Bf16Weights, true>(p, arrays, stream)
                          : launch_with<kGroups, Bf16Weights, false>(p, arrays, stream);
  }
  return p.has_residual ? launch_with<kGroups, FloatWeights, true>(p, arrays, stream)
                        : launch_with<kGroups, FloatWeights, false>(p, arrays, stream);
}

}  // namespace

cudaError_t launch(const Problem& problem, const Config& config, const Arrays& arrays,
                   cudaStream_t stream) {
  if (problem.hidden % kChunk != 0 || problem.hidden > kMostHidden) return cudaErrorInvalidValue;
  switch (config.groups) {
    case 1:
      return launch_cut<1>(problem, arrays, stream);
    case 2:
      return launch_cut<2>(problem, arrays, stream);
    case 4:
      return launch_cut<4>(problem, arrays, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace jax_hpc::rms_norm
