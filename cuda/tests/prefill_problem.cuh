// Random prefill batches on the device and their attention in float64: what
// tests/prefill_attention.cu compares with.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "prefill_attention/launch.h"
#include "support.cuh"

namespace jax_hpc::tests {

using prefill_attention::Problem;

// The tokens of each sequence; what is not written keeps what it holds. One block a token.
static __global__ void fill_tokens(Problem p, __nv_bfloat16* pages, const int* table,
                                   const int* lengths, uint32_t seed) {
  const int sequence = static_cast<int>(blockIdx.y);
  const int token = static_cast<int>(blockIdx.x);
  if (token >= lengths[sequence]) return;
  const int page = table[int64_t{sequence} * p.table_width + token / p.page_size];
  if (page < 0 || page >= p.pages) return;
  for (int i = threadIdx.x; i < p.kv_heads * p.head_dim; i += blockDim.x) {
    const size_t at =
        ((size_t(page) * p.kv_heads + i / p.head_dim) * p.page_size + token % p.page_size) *
            p.head_dim +
        i % p.head_dim;
    pages[at] = __float2bfloat16(normal(at, seed));
  }
}

// Attention of one row and head a block, in float64, by its definition.
struct Reference {
  Problem p;
  const __nv_bfloat16* q;
  const __nv_bfloat16* k;
  const __nv_bfloat16* v;
  const int* table;
  const int* q_starts;
  const int* q_lens;
  const int* kv_lens;
  const float* sinks;
  double* out;
  double* bound;  // of the error of `out`: bf16 probabilities, and its own rounding
  double* lse;
  double* weights;  // [rows, longest]
  int longest;
};

static __global__ void reference_rows(Reference r) {
  const Problem& p = r.p;
  __shared__ double largest;
  __shared__ double total;
  __shared__ int owner;
  const int q_heads = p.q_heads();
  const int row = static_cast<int>(blockIdx.x);
  const int q_row = row / q_heads;
  const int head = row % q_heads / p.group;
  if (threadIdx.x == 0) {
    owner = -1;
    for (int b = 0; b < p.batch; ++b) {
      const int within = q_row - r.q_starts[b];
      if (within >= 0 && within < min(r.q_lens[b], p.max_q_len)) owner = b;
    }
  }
  __syncthreads();
  const int sequence = max(owner, 0);
  const int position =
      owner < 0 ? -1
                : max(r.kv_lens[sequence], 0) - r.q_lens[sequence] + q_row - r.q_starts[sequence];
  const auto place = [&](int token) -> int64_t {  // of a token and head; negative: hidden
    if (p.window > 0 && position - token >= p.window) return -1;
    const int page = r.table[int64_t{sequence} * p.table_width + token / p.page_size];
    if (page < 0 || page >= p.pages) return -1;
    return (int64_t{page} * p.kv_heads + head) * p.page_size + token % p.page_size;
  };
  double* const weights = r.weights + size_t(row) * r.longest;
  for (int t = threadIdx.x; t <= position; t += blockDim.x) {
    const int64_t at = place(t);
    weights[t] = -INFINITY;
    if (at < 0) continue;
    double score = 0;
    for (int d = 0; d < p.head_dim; ++d) {
      score += double(__bfloat162float(r.q[size_t(row) * p.head_dim + d])) *
               double(__bfloat162float(r.k[at * p.head_dim + d]));
    }
    score *= p.scale;
    if (p.cap > 0) score = p.cap * tanh(score / p.cap);
    weights[t] = score;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const double sink = r.sinks == nullptr ? -INFINITY : double(r.sinks[row % q_heads]);
    double top = -INFINITY;
    for (int t = 0; t <= position; ++t) top = fmax(top, weights[t]);
    const bool seen = top > -INFINITY;
    top = fmax(top, sink);
    double sum = seen && r.sinks != nullptr ? exp(sink - top) : 0;
    for (int t = 0; seen && t <= position; ++t) sum += exp(weights[t] - top);
    largest = top;
    total = seen ? sum : 0;
    r.lse[row] = seen ? top + log(sum) : -INFINITY;
  }
  __syncthreads();
  for (int d = threadIdx.x; d < p.head_dim; d += blockDim.x) {
    double sum = 0;
    double magnitude = 0;
    for (int t = 0; total > 0 && t <= position; ++t) {
      const int64_t at = place(t);
      if (at < 0) continue;
      const double value =
          exp(weights[t] - largest) / total * double(__bfloat162float(r.v[at * p.head_dim + d]));
      sum += value;
      magnitude += fabs(value);
    }
    r.out[size_t(row) * p.head_dim + d] = sum;
    r.bound[size_t(row) * p.head_dim + d] = 0x1p-8 * (magnitude + fabs(sum)) + 5e-6;
  }
}

// The recorded baselines' batches: chunks of `q_len` rows after `context` tokens each.
struct Mix {
  const char* name;
  int batch;
  int q_len;
  int context;
};

inline const std::vector<Mix>& mixes() {
  constexpr int k = 1024;
  static const std::vector<Mix> all = {{"1x8K", 1, 8 * k, 0},
                                       {"1x16K", 1, 16 * k, 0},
                                       {"1x1K on 2K", 1, k, 2 * k},
                                       {"16x512 on 8K", 16, 512, 8 * k},
                                       {"8x2K", 8, 2 * k, 0}};
  return all;
}

}  // namespace jax_hpc::tests
