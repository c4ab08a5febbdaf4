// A paged cache with its table on the device, and values to fill it: what the programs of decode
// and prefill attention share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "support.cuh"

namespace jax_hpc::tests {

__device__ inline void store(void* array, size_t i, float value, bool fp8) {
  if (fp8) {
    static_cast<__nv_fp8_e4m3*>(array)[i] = __nv_fp8_e4m3(value);
  } else {
    static_cast<__nv_bfloat16*>(array)[i] = __float2bfloat16(value);
  }
}
__device__ inline float load(const void* array, size_t i, bool fp8) {
  if (fp8) return float(static_cast<const __nv_fp8_e4m3*>(array)[i]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(array)[i]);
}

static __global__ void fill_values(void* array, size_t size, uint32_t seed, float scale, bool fp8) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < size;
       i += size_t{gridDim.x} * blockDim.x) {
    store(array, i, normal(i, seed) * scale, fp8);
  }
}

static __global__ void fill_uniform(float* array, size_t size, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < size;
       i += size_t{gridDim.x} * blockDim.x) {
    array[i] = 0.5f + static_cast<float>(mix(static_cast<uint32_t>(i) + mix(seed))) * 0x1p-32f;
  }
}

// The tokens of each sequence; what is not written keeps what it holds. One block a token.
template <class Problem>
static __global__ void fill_tokens(Problem p, void* pages, const int* table, const int* lengths,
                                   uint32_t seed) {
  const int sequence = static_cast<int>(blockIdx.y);
  const int token = static_cast<int>(blockIdx.x);
  if (token >= lengths[sequence]) return;
  const int page = table[int64_t{sequence} * p.table_width + token / p.page_size];
  if (page < 0 || page >= p.pages) return;
  for (int i = threadIdx.x; i < p.kv_heads * p.head_dim; i += blockDim.x) {
    const int head = i / p.head_dim;
    const size_t at =
        ((size_t(page) * p.kv_heads + head) * p.page_size + token % p.page_size) * p.head_dim +
        i % p.head_dim;
    store(pages, at, normal(at, seed), p.fp8_cache);
  }
}

// Page ids in random order; garbage beyond the length, and in holes. The longest sequence leaves
// `spare` entries.
template <class Problem>
std::vector<int> make_table(Problem& p, const std::vector<int>& lengths, bool holes,
                            std::mt19937& random, int spare = 1) {
  int pages = 0;
  for (const int length : lengths) {
    const int count = (std::max(length, 0) + p.page_size - 1) / p.page_size;
    p.table_width = std::max(p.table_width, count + spare);
    pages += count;
  }
  p.pages = pages + 2;
  std::vector<int> order(p.pages);
  for (int i = 0; i < p.pages; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  std::vector<int> table(size_t(p.batch) * p.table_width);
  for (int b = 0; b < p.batch; ++b) {
    for (int i = 0; i < p.table_width; ++i) {
      int& id = table[size_t(b) * p.table_width + i];
      if (i * p.page_size < lengths[b]) {
        id = order.back();
        order.pop_back();
        if (holes && random() % 5 == 0) id = random() % 2 == 0 ? -7 : p.pages;
      } else {
        id = random() % 2 == 0 ? -1 : 1 << 30;
      }
    }
  }
  return table;
}

}  // namespace jax_hpc::tests
