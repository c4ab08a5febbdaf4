// What differs between the two kinds of cache.
#pragma once

#include <cstdint>

#include "common/wgmma.cuh"
#include "common/wgmma_fp8.cuh"
#include "prefill_attention/instructions.cuh"
#include "prefill_attention/value_products.cuh"

namespace jax_hpc::prefill_attention {

struct Bf16Cache {
  static constexpr int kBytes = 2;
  static constexpr float kBias = 0;   // probabilities are 2^kBias of the largest score's
  static constexpr float kSlack = 8;  // and may exceed that by 2^kSlack before a base is raised
  static constexpr int kKeyStages = 2;
  static constexpr int kValueStages = 2;
  static constexpr int kRawStages = 0;

  static __device__ __forceinline__ uint32_t not_finite(uint32_t pair) {
    constexpr uint32_t kExponents = 0x7f807f80;
    return __vcmpeq2(pair & kExponents, kExponents);
  }
};

// Probabilities go to the tensor cores in e4m3, whose numbers are normal from 2^-6 to 448. That
// multiplies only operands whose sums run along the rows, so that values are transposed first.
struct Fp8Cache {
  static constexpr int kBytes = 1;
  static constexpr float kBias = 8;
  static constexpr float kSlack = 0;
  static constexpr int kKeyStages = 4;
  static constexpr int kValueStages = 3;
  static constexpr int kRawStages = 2;  // of values as they are in the cache

  static __device__ __forceinline__ uint32_t not_finite(uint32_t four) {
    return ((four & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
  }
};

}  // namespace jax_hpc::prefill_attention
