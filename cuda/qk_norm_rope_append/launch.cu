#include "qk_norm_rope_append/launch.h"

#include "common/launch.h"
#include "qk_norm_rope_append/heuristics.h"
#include "qk_norm_rope_append/kernel.cuh"

namespace jax_hpc::qk_norm_rope_append {
namespace {

template <int kHeadDim, bool kQuantizes, class Rotation>
cudaError_t launch_with(const Problem& p, const Config& config, const Arrays& arrays,
                        cudaStream_t stream) {
  const int64_t turns_of_cta = int64_t{config.warps} * config.turns;
  const int64_t ctas = (turns_of(p) + turns_of_cta - 1) / turns_of_cta;
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>(ctas)),
      .threads = config.warps * kWarpSize,
      .shared_bytes = config.warps * static_cast<int>(sizeof(Stages<kHeadDim>))};
  return jax_hpc::launch(prologue_kernel<kHeadDim, kQuantizes, Rotation>, shape, stream, p, arrays,
                         config, Divisor(p.heads()), Divisor(p.page_size));
}

template <int kHeadDim, class Rotation>
cudaError_t launch_rotation(const Problem& p, const Config& config, const Arrays& arrays,
                            cudaStream_t stream) {
  return p.fp8_q || p.fp8_k || p.fp8_v
             ? launch_with<kHeadDim, true, Rotation>(p, config, arrays, stream)
             : launch_with<kHeadDim, false, Rotation>(p, config, arrays, stream);
}

template <int kHeadDim>
cudaError_t launch_head(const Problem& p, const Config& config, const Arrays& arrays,
                        cudaStream_t stream) {
  // The instance that can quantise serves all rare rotary widths.
  if (p.rotary % (2 * kChunk) != 0) {
    return launch_with<kHeadDim, true, AnyRotation<kHeadDim>>(p, config, arrays, stream);
  }
  const bool is_plain = p.rotary == kHeadDim && p.options.style == Style::kHalf &&
                        p.options.norm == Norm::kBeforeRope;
  return is_plain
             ? launch_rotation<kHeadDim, ChunkRotation<kHeadDim, true>>(p, config, arrays, stream)
             : launch_rotation<kHeadDim, ChunkRotation<kHeadDim, false>>(p, config, arrays, stream);
}

}  // namespace

cudaError_t launch(const Problem& problem, const Config& config, const Arrays& arrays,
                   cudaStream_t stream) {
  if (config.warps < 1 || config.warps > kMostWarps || config.turns < 1 ||
      config.turns > most_turns(problem)) {
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
