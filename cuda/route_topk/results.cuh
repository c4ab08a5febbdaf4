// From chosen experts and their scores to the results of a token.
#pragma once

#include "route_topk/launch.h"
#include "route_topk/score.cuh"
#include "route_topk/team.cuh"

namespace jax_hpc::route_topk {

// The arrays at one token.
struct Row {
  const float* logits;
  const float* bias;
  int32_t* ids;
  float* weights;
  float* identity_weight;

  __device__ Row(const Problem& p, const Arrays& a, int token)
      : logits(a.logits + static_cast<int64_t>(token) * p.experts),
        bias(a.bias),
        ids(a.ids + static_cast<int64_t>(token) * p.options.k),
        weights(a.weights + static_cast<int64_t>(token) * p.options.k),
        identity_weight(a.identity_weight + token) {}
};

struct alignas(8) Chosen {
  int id;
  float score;
};

__device__ __forceinline__ float inverse_of_weights(float sum) {
  constexpr float kRenormalizeEps = 1e-20f;
  return reciprocal(__fadd_rn(sum, kRenormalizeEps));
}

// Of a row without a finite logit: the first experts, with no weight.
template <class Team>
__device__ __forceinline__ void write_dead_row(Team& team, const Problem& p, const Row& row) {
  const int first_zero = p.experts - p.options.num_zero_experts;
#pragma unroll 1
  for (int i = team.rank(); i < p.options.k; i += Team::kSize) {
    row.ids[i] = i < first_zero ? i : -1;
    row.weights[i] = 0.0f;
  }
  if (team.rank() == 0) *row.identity_weight = 0.0f;
}

// Results from the chosen experts, one a lane, best first.
__device__ __forceinline__ void finish_lanes(const Problem& p, const Row& row, int lane,
                                             Chosen chosen) {
  const Options& o = p.options;
  const bool is_chosen = lane < o.k;
  float weight = is_chosen ? chosen.score : 0.0f;
  if (o.renormalize) weight = __fmul_rn(weight, inverse_of_weights(warp_sum(weight)));
  weight = __fmul_rn(weight, o.scale);
  float identity = 0.0f;
  if (o.num_zero_experts > 0) {
    const bool is_zero = is_chosen && chosen.id >= p.experts - o.num_zero_experts;
    identity = warp_sum(is_zero ? weight : 0.0f);
    if (is_zero) weight = 0.0f;
    if (is_zero) chosen.id = -1;
  }
  if (is_chosen) {
    row.ids[lane] = chosen.id;
    row.weights[lane] = weight;
  }
  if (lane == 0) *row.identity_weight = identity;
}

// The same from ids and scores in the outputs, for any number of them. One warp does it, so that
// any team adds up alike.
template <class Team>
__device__ void finish_written(Team& team, const Problem& p, const Row& row) {
  const Options& o = p.options;
  team.sync();
  const int end = team.rank() < kWarpSize ? o.k : 0;
  float inverse = 1.0f;
  if (o.renormalize) {
    float sum = 0.0f;
#pragma unroll 1
    for (int i = team.rank(); i < end; i += kWarpSize) sum = __fadd_rn(sum, row.weights[i]);
    inverse = inverse_of_weights(team.sum(sum));
  }
  float identity = 0.0f;
#pragma unroll 1
  for (int i = team.rank(); i < end; i += kWarpSize) {
    const float weight = __fmul_rn(__fmul_rn(row.weights[i], inverse), o.scale);
    if (row.ids[i] < p.experts - o.num_zero_experts) {
      row.weights[i] = weight;
    } else {
      row.ids[i] = -1;
      row.weights[i] = 0.0f;
      identity = __fadd_rn(identity, weight);
    }
  }
  identity = team.sum(identity);
  if (team.rank() == 0) *row.identity_weight = identity;
}

}  // namespace jax_hpc::route_topk
