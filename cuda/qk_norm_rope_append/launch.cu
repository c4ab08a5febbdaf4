#include "qk_norm_rope_append/launch.h"

#include "common/launch.h"
#include "qk_norm_rope_append/heuristics.h"
#include "qk_norm_rope_append/kernel.cuh"

namespace jax_hpc::qk_norm_rope_append {
namespace {

template <int kHeadDim, bool kQuantizes, class Rotation>
cudaError_t launch_with(const Problem& p, const Config& config, const Arrays& arrays,
                        cudaStream_t stream) {
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>(ceil_div(p.tokens, config.warps)),
                   static_cast<unsigned>(ceil_div(turns_of_token(p), config.turns))),
      .threads = config.warps * kWarpSize};
  return jax_hpc::launch(prologue_kernel<kHeadDim, kQuantizes, Rotation>, shape, stream, p, arrays,
                         config, Divisor(p.page_size));
}

template <int kHeadDim>
cudaError_t launch_head(const Problem& p, const Config& config, const Arrays& arrays,
                        cudaStream_t stream) {
  using Vector = ChunkRotation<kHeadDim>;
  // The instance that can quantise serves all rare rotary widths.
  if (p.rotary % (2 * kChunk) != 0) {
    return launch_with<kHeadDim, true, AnyRotation<kHeadDim>>(p, config, arrays, stream);
  }
  return p.fp8_q || p.fp8_k || p.fp8_v
             ? launch_with<kHeadDim, true, Vector>(p, config, arrays, stream)
             : launch_with<kHeadDim, false, Vector>(p, config, arrays, stream);
}

}  // namespace

cudaError_t launch(const Problem& problem, const Config& config, const Arrays& arrays,
                   cudaStream_t stream) {
  if (config.warps < 1 || config.warps > kMostWarps || config.turns < 1) {
    return cudaErrorInvalidValue;
  }
  switch (problem.head_dim) {
    case 64:
      return launch_head<64>(problem, config, arrays, stream);
    case 128:
      return launch_head<128>(problem, config, arrays, stream);
    case 256:
      return launch_head<256>(problem, config, arrays, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace jax_hpc::qk_norm_rope_append
