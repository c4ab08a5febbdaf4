// Random prefill batches on the device and their attention in float64: what
// tests/prefill_attention.cu compares with.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "paged_problem.cuh"
#include "prefill_attention/launch.h"
#include "support.cuh"

namespace jax_hpc::tests {

using prefill_attention::Problem;
using prefill_attention::ScaleKind;

// Attention of one row and head a block, in float64, by its definition.
struct Reference {
  Problem p;
  const void* q;
  const void* k;
  const void* v;
  const int* table;
  const int* q_starts;
  const int* q_lens;
  const int* kv_lens;
  const float* q_scale;
  const float* k_scale;
  const float* v_scale;
  const float* sinks;
  double* out;
  double* bound;  // of the error of `out`: rounded probabilities, and its own rounding
  double* lse;
  double* weights;  // [rows, longest]
  int longest;
};

constexpr int kReferenceThreads = 128;

static __global__ void reference_rows(Reference r) {
  const Problem& p = r.p;
  __shared__ double query[256];
  __shared__ double parts[kReferenceThreads];
  __shared__ int owner;
  const int q_heads = p.q_heads();
  const int row = static_cast<int>(blockIdx.x);
  const int q_row = row / q_heads;
  const int head = row % q_heads / p.group;
  if (threadIdx.x == 0) {
    const auto value = [&](int d) { return load(r.q, size_t(row) * p.head_dim + d, p.fp8_query); };
    float amax = 0;
    for (int d = 0; d < p.head_dim; ++d) amax = fmaxf(amax, fabsf(value(d)));
    float scale = amax * (1.0f / 448.0f);
    if (scale < 0x1p-126f) scale = 1;
    const float reciprocal = 1.0f / scale;
    for (int d = 0; d < p.head_dim; ++d) {
      query[d] = value(d);
      if (p.fp8_cache) query[d] = double(float(__nv_fp8_e4m3(value(d) * reciprocal))) * scale;
      if (p.fp8_query) query[d] = double(value(d)) * r.q_scale[row];
    }
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
      score += query[d] * double(load(r.k, at * p.head_dim + d, p.fp8_cache));
    }
    if (p.k_scale == ScaleKind::kTensor) score *= r.k_scale[0];
    if (p.k_scale == ScaleKind::kHead) score *= r.k_scale[head];
    if (p.k_scale == ScaleKind::kToken) score *= r.k_scale[at];
    score *= p.scale;
    if (p.cap > 0) score = p.cap * tanh(score / p.cap);
    weights[t] = score;
  }
  __syncthreads();
  // Weights relative to the largest score, and their sum, by parts of each thread.
  double top = -INFINITY;
  for (int t = threadIdx.x; t <= position; t += blockDim.x) top = fmax(top, weights[t]);
  parts[threadIdx.x] = top;
  __syncthreads();
  for (int i = 0; i < static_cast<int>(blockDim.x); ++i) top = fmax(top, parts[i]);
  const bool seen = top > -INFINITY;
  const double sink = r.sinks == nullptr ? -INFINITY : double(r.sinks[row % q_heads]);
  const double largest = fmax(top, sink);
  double total = 0;
  for (int t = threadIdx.x; seen && t <= position; t += blockDim.x) {
    weights[t] = exp(weights[t] - largest);
    total += weights[t];
  }
  __syncthreads();
  parts[threadIdx.x] = total;
  __syncthreads();
  total = seen && r.sinks != nullptr ? exp(sink - largest) : 0;
  for (int i = 0; i < static_cast<int>(blockDim.x); ++i) total += parts[i];
  if (threadIdx.x == 0) r.lse[row] = seen ? largest + log(total) : -INFINITY;
  double value_scale = 1;
  if (p.v_scale == ScaleKind::kTensor) value_scale = r.v_scale[0];
  if (p.v_scale == ScaleKind::kHead) value_scale = r.v_scale[head];
  for (int d = threadIdx.x; d < p.head_dim; d += blockDim.x) {
    double sum = 0;
    double magnitude = 0;
    double smallest = 0;  // sum of what the smallest probabilities can lose
    for (int t = 0; total > 0 && t <= position; ++t) {
      const int64_t at = place(t);
      if (at < 0) continue;
      const double token = value_scale * double(load(r.v, at * p.head_dim + d, p.fp8_cache));
      const double value = weights[t] / total * token;
      sum += value;
      magnitude += fabs(value);
      smallest += fabs(token) * 0x1p-18;
    }
    r.out[size_t(row) * p.head_dim + d] = sum;
    const double of_weights = p.fp8_cache ? 0x1p-4 * magnitude + smallest : 0x1p-8 * magnitude;
    r.bound[size_t(row) * p.head_dim + d] = of_weights + 0x1p-8 * fabs(sum) + 5e-6;
  }
}

// The recorded baselines' batches: chunks of `q_len` rows after `context` tokens each; and one that
// takes what a call costs beside its tiles.
struct Mix {
  const char* name;
  int batch;
  int q_len;
  int context;
};

inline const std::vector<Mix>& mixes() {
  constexpr int k = 1024;
  static const std::vector<Mix> all = {
      {"1x8K", 1, 8 * k, 0},       {"1x16K", 1, 16 * k, 0},
      {"1x1K on 2K", 1, k, 2 * k}, {"16x512 on 8K", 16, 512, 8 * k},
      {"8x2K", 8, 2 * k, 0},       {"1x1", 1, 1, 0}};
  return all;
}

}  // namespace jax_hpc::tests
