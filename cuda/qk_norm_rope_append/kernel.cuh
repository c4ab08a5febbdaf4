// The attention prologue: a warp takes one token, several heads at a time and one turn after the
// other, with the next turn's values under way. Lanes meet only to add up squares and to find the
// largest magnitude.
#pragma once

#include "qk_norm_rope_append/config.h"
#include "qk_norm_rope_append/launch.h"
#include "qk_norm_rope_append/rotation.cuh"
#include "qk_norm_rope_append/values.cuh"

namespace jax_hpc::qk_norm_rope_append {

// Where the values of a head go, and how.
struct Target {
  void* head;  // null: nowhere
  bool is_fp8;
  float* dynamic;  // fp8: where a scale of its own goes, or null
  float factor;    // fp8, a scale of others': its reciprocal
};

__device__ __forceinline__ float reciprocal_of(Scale kind, const float* scale, int head) {
  if (kind == Scale::kNone) return 1.0f;
  return __frcp_rn(__ldg(scale + (kind == Scale::kHead ? head : 0)));
}

// A head of the weight, in the order of the lane's values; ones where there is none.
__device__ __forceinline__ void read_weight(Weight kind, const void* weight, Places at,
                                            float (&values)[kValues]) {
  if (kind == Weight::kBf16) {
    unpack(read(static_cast<const __nv_bfloat16*>(weight), at), values);
  } else if (kind == Weight::kFloat) {
    read(static_cast<const float*>(weight) + at.first, values);
    read(static_cast<const float*>(weight) + at.second, values + kChunk);
  } else {
#pragma unroll
    for (float& value : values) value = 1.0f;
  }
}

// x / sqrt(mean(x^2) + eps) * weight. The whole warp calls it; a head is left as it is where
// `wanted` is false.
template <int kHeadDim>
__device__ __forceinline__ void normalize(float eps, const float (&weight)[kValues], bool wanted,
                                          float (&x)[kValues]) {
  float sum = 0;
  float other = 0;  // two chains of additions take half the time of one
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    sum += x[i] * x[i];
    other += x[i + kChunk] * x[i + kChunk];
  }
  sum = sum_of_head<lanes_of_head(kHeadDim)>(sum + other);
  if (!wanted) return;
  const float factor = rsqrtf(sum * (1.0f / kHeadDim) + eps);
#pragma unroll
  for (int i = 0; i < kValues; ++i) x[i] = x[i] * factor * weight[i];
}

// Of one token.
struct Token {
  int index;
  bool is_kept;
  int64_t row;  // of KV head 0 in the pages, of page_size rows a head

  __device__ Token(const Problem& p, int slot, Divisor page_size, int token) : index(token) {
    is_kept = slot >= 0 && slot < p.pages * p.page_size;
    if (!is_kept) slot = 0;
    const int page = page_size.quotient(slot);
    row = int64_t{page} * (int64_t{p.kv_heads} * p.page_size) + (slot - page * p.page_size);
  }
};

template <int kHeadDim>
__device__ __forceinline__ Target target_of(const Problem& p, const Arrays& a, const Token& token,
                                            int head) {
  const bool is_k = head < p.q_heads + p.kv_heads;
  int64_t row;
  Target target{};
  void* base;
  if (head < p.q_heads) {
    row = int64_t{token.index} * p.q_heads + head;
    base = a.q;
    target.is_fp8 = p.fp8_q;
    if (p.fp8_q) target.dynamic = a.q_scale + row;
  } else {
    const int kv_head = head - p.q_heads - (is_k ? 0 : p.kv_heads);
    row = token.row + int64_t{kv_head} * p.page_size;
    base = is_k ? a.k_pages : a.v_pages;
    target.is_fp8 = is_k ? p.fp8_k : p.fp8_v;
    if (is_k && p.k_scale_per_token) {
      target.dynamic = a.k_scale_pages + row;
    } else if (target.is_fp8 && token.is_kept) {
      target.factor =
          reciprocal_of(is_k ? p.k_scale : p.v_scale, is_k ? a.k_scale : a.v_scale, kv_head);
    }
    if (!token.is_kept) return target;
  }
  target.head = static_cast<uint8_t*>(base) + row * (target.is_fp8 ? kHeadDim : 2 * kHeadDim);
  return target;
}

// The whole warp calls it.
template <int kHeadDim>
__device__ __forceinline__ void write_fp8(Target target, Places at, const float (&x)[kValues]) {
  float most = larger(x[0], x[kChunk]);
  float other = larger(x[1], x[kChunk + 1]);
#pragma unroll
  for (int i = 2; i < kChunk; i += 2) {
    most = larger(larger(most, x[i]), x[i + kChunk]);
    other = larger(larger(other, x[i + 1]), x[i + 1 + kChunk]);
  }
  most = largest_of_head<lanes_of_head(kHeadDim)>(larger(most, other));
  if (target.head == nullptr || !target.is_fp8) return;
  if (target.dynamic != nullptr) {
    const float scale = scale_of(most);
    target.factor = __frcp_rn(scale);
    if (at.first == 0) *target.dynamic = scale;  // one lane of the head
  }
  auto* head = static_cast<__nv_fp8_e4m3*>(target.head);
  write(head + at.first, x, target.factor);
  write(head + at.second, x + kChunk, target.factor);
}

constexpr int kMostThreads = 32 * kMostWarps;
// 24 KB of qkv under way on an SM, or 20 where scales need the registers.
constexpr int ctas_of_sm(bool quantizes) { return quantizes ? 5 : 6; }

// kQuantizes: some of q, k and v are fp8.
template <int kHeadDim, bool kQuantizes, class Rotation>
__global__ __launch_bounds__(kMostThreads, ctas_of_sm(kQuantizes)) void prologue_kernel(
    const __grid_constant__ Problem p, const __grid_constant__ Arrays a,
    const __grid_constant__ Config config, const __grid_constant__ Divisor page_size) {
  constexpr int kLanes = lanes_of_head(kHeadDim);
  constexpr int kHeads = heads_of_warp(kHeadDim);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int token_index = blockIdx.x * config.warps + warp;
  if (token_index >= p.tokens) return;
  // The table's row waits for the position: it is asked for first.
  const int wanted_position = __ldg(a.positions + token_index);
  const int slot = __ldg(a.slots + token_index);
  const Places at = Rotation::places(p, lane % kLanes);
  const int begin = blockIdx.y * config.turns * kHeads;
  const int end = min(p.heads(), begin + config.turns * kHeads);
  int head = begin + lane / kLanes;

  const auto* from = static_cast<const __nv_bfloat16*>(a.qkv) +
                     (int64_t{token_index} * p.heads() + head) * kHeadDim;
  Packed packed{};
  if (head < end) packed = read_once(from, at);
  bool has_k_weight = head >= p.q_heads;
  float weight[kValues];
  read_weight(has_k_weight ? p.k_weight : p.q_weight, has_k_weight ? a.k_norm : a.q_norm, at,
              weight);
  const int position = min(max(wanted_position, 0), p.positions - 1);
  const Rotation rotation(p, a.cos_sin + int64_t{position} * p.rotary, at,
                          warp * kHeads + lane / kLanes);
  const Token token(p, slot, page_size, token_index);

  for (int base = begin; base < end; base += kHeads, head += kHeads) {
    float x[kValues];
    unpack(packed, x);
    from += kHeads * kHeadDim;
    if (head + kHeads < end) packed = read_once(from, at);
    if (head >= p.q_heads && !has_k_weight) {
      has_k_weight = true;
      read_weight(p.k_weight, a.k_norm, at, weight);
    }
    const bool is_v = head >= p.q_heads + p.kv_heads;
    if (p.options.norm == Norm::kBeforeRope) normalize<kHeadDim>(p.options.eps, weight, !is_v, x);
    rotation.turn(p, x, !is_v);
    if (p.options.norm == Norm::kAfterRope) normalize<kHeadDim>(p.options.eps, weight, !is_v, x);
    Target target{};
    if (head < end) target = target_of<kHeadDim>(p, a, token, head);
    if (kQuantizes) write_fp8<kHeadDim>(target, at, x);
    if (target.head == nullptr || target.is_fp8) continue;
    auto* to = static_cast<__nv_bfloat16*>(target.head);
    write(to + at.first, x);
    write(to + at.second, x + kChunk);
  }
}

}  // namespace jax_hpc::qk_norm_rope_append
