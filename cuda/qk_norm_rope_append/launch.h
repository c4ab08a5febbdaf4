// Entry point of the attention prologue: raw pointers and a stream.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "qk_norm_rope_append/config.h"

namespace jax_hpc::qk_norm_rope_append {

// n / divisor for 0 <= n < 2^31, by a product: rounded up, the reciprocal is exact enough for them.
struct Divisor {
  uint32_t reciprocal;
  int shift;

  explicit Divisor(int divisor) : shift(31 + log2_above(divisor)) {
    reciprocal = static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor);
  }
  __host__ __device__ int quotient(int n) const {
    return static_cast<int>((uint64_t{static_cast<uint32_t>(n)} * reciprocal) >> shift);
  }

 private:
  static int log2_above(int value) {
    int log2 = 0;
    while ((int64_t{1} << log2) < value) ++log2;
    return log2;
  }
};

// All arrays are row-major and 16-byte aligned. H stands for q_heads + 2 * kv_heads.
struct Arrays {
  const void* qkv;       // bf16 [tokens, H, D]
  const void* q_norm;    // bf16 or float [D], or null
  const void* k_norm;    // the same
  const float* cos_sin;  // [positions, rotary]
  const int* positions;  // [tokens]
  const int* slots;      // [tokens]
  const float* k_scale;  // [] or [kv_heads], or null
  const float* v_scale;  // the same
  void* q;               // bf16 or e4m3 [tokens, q_heads, D]
  float* q_scale;        // [tokens, q_heads], or null
  void* k_pages;         // bf16 or e4m3 [pages, kv_heads, page_size, D]
  void* v_pages;         // the same
  float* k_scale_pages;  // [pages, kv_heads, page_size], or null
};

// Head dimensions 64, 128 and 256. No extent but `rotary` and `pages` may be zero, and there must
// be fewer than 2^31 slots, fewer than 2^31 heads of all tokens, and fewer than 2^32 rows of a
// cache. Of the pages only the rows of the tokens' slots are touched.
cudaError_t launch(const Problem& problem, const Config& config, const Arrays& arrays,
                   cudaStream_t stream);

}  // namespace jax_hpc::qk_norm_rope_append
