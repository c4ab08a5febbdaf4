// Picks the instance of a kernel for a number of terms; one .cu per number, so that they compile
// side by side.
#pragma once

#include "common/tensor_map.h"
#include "router_gemm/launch.h"
#include "router_gemm/stream.cuh"
#include "router_gemm/tiled.cuh"

namespace jax_hpc::router_gemm {

struct Arrays {
  const __nv_bfloat16* x;
  const __nv_bfloat16* parts;
  float* logits;
};

template <int Terms>
cudaError_t launch_terms(const Problem& problem, const Config& config, const Arrays& arrays,
                         cudaStream_t stream);

template <int Terms, int ExpertTiles, int TokenTiles, bool Aligned>
cudaError_t launch_stream(const Problem& p, const Config& config, const Arrays& arrays,
                          cudaStream_t stream) {
  using Shape = StreamShape<Terms, ExpertTiles, TokenTiles>;
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>(ceil_div(p.experts, Shape::kExperts) * config.cluster),
                   static_cast<unsigned>(ceil_div(p.tokens, Shape::kTokens))),
      .threads = kStreamThreads,
      .shared_bytes = Shape::kSharedBytes,
      .cluster = config.cluster};
  return jax_hpc::launch(stream_kernel<Terms, ExpertTiles, TokenTiles, Aligned>, shape, stream, p,
                         config.cluster, arrays.x, arrays.parts, arrays.logits);
}

template <int Terms, int Experts>
cudaError_t launch_tiled(const Problem& p, const Config& config, const Arrays& arrays,
                         cudaStream_t stream) {
  const auto hidden = static_cast<uint64_t>(p.hidden);
  CUtensorMap x_map;
  CUtensorMap parts_map;
  cudaError_t status = make_tensor_map(arrays.x,
                                       {.rank = 2,
                                        .extent = {hidden, static_cast<uint64_t>(p.tokens), 1},
                                        .box = {kTileHidden, kTileTokens, 1}},
                                       &x_map);
  if (status != cudaSuccess) return status;
  status = make_tensor_map(arrays.parts,
                           {.rank = 3,
                            .extent = {hidden, static_cast<uint64_t>(p.experts), Terms},
                            .box = {kTileHidden, Experts, Terms}},
                           &parts_map);
  if (status != cudaSuccess) return status;
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>(ceil_div(p.experts, Experts) * config.cluster),
                   static_cast<unsigned>(ceil_div(p.tokens, kTileTokens))),
      .threads = kTiledThreads,
      .shared_bytes = TiledShape<Terms, Experts>::kSharedBytes,
      .cluster = config.cluster};
  return jax_hpc::launch(tiled_kernel<Terms, Experts>, shape, stream, p, config.cluster, x_map,
                         parts_map, arrays.logits);
}

// Instances of the stream kernel: tiles of 16 experts and tiles of 8 tokens of a CTA. An unaligned
// hidden size takes one shape, whose loads are single values.
#define JAX_HPC_STREAM_SHAPES(SHAPE) \
  SHAPE(1, 1) SHAPE(2, 1) SHAPE(1, 2) SHAPE(2, 2) SHAPE(1, 4) SHAPE(2, 4)
#define JAX_HPC_WIDE_STREAM_SHAPES(SHAPE) SHAPE(2, 8)

template <int Terms>
cudaError_t launch_terms(const Problem& problem, const Config& config, const Arrays& arrays,
                         cudaStream_t stream) {
  const bool aligned = problem.hidden % kLaneHidden == 0;
  if (config.kernel == Kernel::kTiled) {
    if (!aligned) return cudaErrorInvalidValue;
    switch (config.expert_tile) {
      case 64:
        return launch_tiled<Terms, 64>(problem, config, arrays, stream);
      case 96:
        return launch_tiled<Terms, 96>(problem, config, arrays, stream);
      case 128:
        if constexpr (Terms < 3) {
          return launch_tiled<Terms, 128>(problem, config, arrays, stream);
        }
    }
    return cudaErrorInvalidValue;
  }
  if (!aligned) return launch_stream<Terms, 1, 2, false>(problem, config, arrays, stream);
#define JAX_HPC_CASE(expert_tiles, token_tiles)                                                    \
  if (config.expert_tile == 16 * (expert_tiles) && config.token_tile == 8 * (token_tiles)) {       \
    return launch_stream<Terms, expert_tiles, token_tiles, true>(problem, config, arrays, stream); \
  }
  JAX_HPC_STREAM_SHAPES(JAX_HPC_CASE)
  if constexpr (Terms < 3) {
    JAX_HPC_WIDE_STREAM_SHAPES(JAX_HPC_CASE)
  }
#undef JAX_HPC_CASE
  return cudaErrorInvalidValue;
}

}  // namespace jax_hpc::router_gemm
