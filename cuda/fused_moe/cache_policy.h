// How long weights stay in the L2 cache, as the copy engine's instructions are told.
#pragma once

#include <cstdint>

#include "fused_moe/config.h"

namespace jax_hpc::fused_moe {

constexpr uint64_t kEvictNormal = 0x1000000000000000;
constexpr uint64_t kEvictFirst = 0x12f0000000000000;  // their lines leave before others do

// Weights that several tiles read stay; read once, they leave first.
constexpr uint64_t weight_policy(const Problem& p, const Config& c) {
  return mean_rows(p) > c.tile_rows ? kEvictNormal : kEvictFirst;
}

}  // namespace jax_hpc::fused_moe
