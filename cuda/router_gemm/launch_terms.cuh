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

template <int Terms, int TokenTiles, bool Aligned>
cudaError_t launch_stream(const Problem& p, const Config& config, const Arrays& arrays,
                          cudaStream_t stream) {
  using Shape = StreamShape<Terms, TokenTiles, Aligned>;
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>(ceil_div(p.experts, kStreamExperts) * config.cluster),
                   static_cast<unsigned>(ceil_div(p.tokens, Shape::kTokens))),
      .threads = kStreamThreads,
      .shared_bytes = Shape::kSharedBytes,
      .cluster = config.cluster};
  return jax_hpc::launch(stream_kernel<Terms, TokenTiles, Aligned>, shape, stream, p,
                         log2_of(config.cluster), arrays.x, arrays.parts, arrays.logits);
}

template <int Terms, int Experts, int Tokens>
cudaError_t launch_tiled(const Problem& p, const Config& config, const Arrays& arrays,
                         cudaStream_t stream) {
  using Shape = TiledShape<Terms, Experts, Tokens>;
  const auto hidden = static_cast<uint64_t>(p.hidden);
  // No more rows than there are tokens, in whole groups of the swizzle.
  const int box_tokens = p.tokens < Tokens ? ceil_div(p.tokens, 8) * 8 : Tokens;
  CUtensorMap x_map;
  CUtensorMap parts_map;
  cudaError_t status = make_tensor_map(arrays.x,
                                       {.rank = 2,
                                        .extent = {hidden, static_cast<uint64_t>(p.tokens), 1},
                                        .box = {kTileHidden, static_cast<uint32_t>(box_tokens), 1}},
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
                   static_cast<unsigned>(ceil_div(p.tokens, Tokens))),
      .threads = Shape::kThreads,
      .shared_bytes = Shape::kSharedBytes,
      .cluster = config.cluster};
  return jax_hpc::launch(tiled_kernel<Terms, Experts, Tokens>, shape, stream, p,
                         log2_of(config.cluster), box_tokens, x_map, parts_map, arrays.logits);
}

// Tiles of the tiled kernel, experts and tokens of a CTA; three terms have no registers for the
// widest.
#define JAX_HPC_TILES(TILE) TILE(16, 64) TILE(32, 64) TILE(64, 64) TILE(64, 128) TILE(96, 128)
#define JAX_HPC_WIDEST_TILE(TILE) TILE(128, 128)

template <int Terms>
cudaError_t launch_terms(const Problem& problem, const Config& config, const Arrays& arrays,
                         cudaStream_t stream) {
  const bool aligned = has_aligned_rows(problem);
  if (config.kernel == Kernel::kStream) {
    if (config.expert_tile != kStreamExperts) return cudaErrorInvalidValue;
    if (aligned && config.token_tile == 8) {
      return launch_stream<Terms, 1, true>(problem, config, arrays, stream);
    }
    if (!aligned && config.token_tile == 16) {
      return launch_stream<Terms, 2, false>(problem, config, arrays, stream);
    }
    return cudaErrorInvalidValue;
  }
  if (!aligned) return cudaErrorInvalidValue;
#define JAX_HPC_CASE(experts, tokens)                                             \
  if (config.expert_tile == (experts) && config.token_tile == (tokens)) {         \
    return launch_tiled<Terms, experts, tokens>(problem, config, arrays, stream); \
  }
  JAX_HPC_TILES(JAX_HPC_CASE)
  if constexpr (Terms < 3) {
    JAX_HPC_WIDEST_TILE(JAX_HPC_CASE)
  }
#undef JAX_HPC_CASE
  return cudaErrorInvalidValue;
}

}  // namespace jax_hpc::router_gemm
