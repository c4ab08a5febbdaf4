// Random decode batches on the device, their attention in float64, and the schedule on the host:
// what tests/decode_attention.cu compares with.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "decode_attention/launch.h"
#include "decode_schedule/launch.h"
#include "paged_problem.cuh"
#include "support.cuh"

namespace jax_hpc::tests {

using decode_attention::Problem;
using decode_attention::ScaleKind;

// Attention of one row a block, in float64, by its definition.
struct Reference {
  Problem p;
  const void* q;
  const void* k;
  const void* v;
  const int* table;
  const int* lengths;
  const float* q_scale;
  const float* k_scale;
  const float* v_scale;
  const float* sinks;
  double* out;
  double* lse;
  double* weights;  // [rows, longest]
  int longest;
};

static __global__ void reference_rows(Reference r) {
  const Problem& p = r.p;
  __shared__ double query[256];
  __shared__ double largest;
  __shared__ double total;
  const int q_heads = p.group * p.kv_heads;
  const int row = static_cast<int>(blockIdx.x);  // of [B, S, Hq]
  const int sequence = row / (p.q_len * q_heads);
  const int head = row % q_heads / p.group;
  if (threadIdx.x == 0) {
    float amax = 0;
    for (int d = 0; d < p.head_dim; ++d) {
      amax = fmaxf(amax, fabsf(load(r.q, size_t(row) * p.head_dim + d, p.fp8_query)));
    }
    const bool quantizes = p.fp8_cache && !p.fp8_query;
    float scale = amax * (1.0f / 448.0f);
    if (scale < 0x1p-126f) scale = 1;
    const float reciprocal = 1.0f / scale;
    for (int d = 0; d < p.head_dim; ++d) {
      const float value = load(r.q, size_t(row) * p.head_dim + d, p.fp8_query);
      query[d] = value;
      if (quantizes) query[d] = double(float(__nv_fp8_e4m3(value * reciprocal))) * double(scale);
      if (p.fp8_query) query[d] = double(value) * double(r.q_scale[row]);
    }
  }
  __syncthreads();
  const int length = max(r.lengths[sequence], 0);
  const int position = length - p.q_len + row / q_heads % p.q_len;
  const auto place = [&](int token) -> int64_t {  // of a token and head; negative: hidden
    if (token > position || (p.window > 0 && position - token >= p.window)) return -1;
    const int page = r.table[int64_t{sequence} * p.table_width + token / p.page_size];
    if (page < 0 || page >= p.pages) return -1;
    return (int64_t{page} * p.kv_heads + head) * p.page_size + token % p.page_size;
  };
  double* const weights = r.weights + size_t(row) * r.longest;
  for (int t = threadIdx.x; t < length; t += blockDim.x) {
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
  if (threadIdx.x == 0) {
    const double sink = r.sinks == nullptr ? -INFINITY : double(r.sinks[row % q_heads]);
    double top = -INFINITY;
    for (int t = 0; t < length; ++t) top = fmax(top, weights[t]);
    const bool seen = top > -INFINITY;
    top = fmax(top, sink);
    double sum = seen && r.sinks != nullptr ? exp(sink - top) : 0;
    for (int t = 0; seen && t < length; ++t) sum += exp(weights[t] - top);
    largest = top;
    total = seen ? sum : 0;
    r.lse[row] = seen ? top + log(sum) : -INFINITY;
  }
  __syncthreads();
  double value_scale = 1;
  if (p.v_scale == ScaleKind::kTensor) value_scale = r.v_scale[0];
  if (p.v_scale == ScaleKind::kHead) value_scale = r.v_scale[head];
  for (int d = threadIdx.x; d < p.head_dim; d += blockDim.x) {
    double sum = 0;
    for (int t = 0; total > 0 && t < length; ++t) {
      const int64_t at = place(t);
      if (at < 0) continue;
      sum += exp(weights[t] - largest) * double(load(r.v, at * p.head_dim + d, p.fp8_cache));
    }
    r.out[size_t(row) * p.head_dim + d] = total > 0 ? sum * value_scale / total : 0;
  }
}

struct Schedule {
  std::vector<int> pair;
  std::vector<int> tile;
  std::vector<int> last;
};

struct Costs {
  int task = 0;                              // 0: the problem's own
  int floor = decode_schedule::kMinCtaCost;  // of a CTA
};

// The schedule by its definition, for axes that fit int32 (then no cost is rounded).
inline Schedule schedule_on_host(const decode_schedule::Problem& p, const std::vector<int>& lengths,
                                 Costs costs) {
  if (costs.task == 0) costs.task = p.task_cost;
  using decode_schedule::kTileCost;
  std::vector<int64_t> ends;  // of the pairs, on the cost axis
  std::vector<int> tiles;
  int64_t end = 0;
  for (const int length : lengths) {
    const int count = decode_schedule::count_tiles(std::max(length, 0), p.q_len, p.window);
    for (int head = 0; head < p.kv_heads; ++head) {
      end += count > 0 ? count * kTileCost + costs.task : decode_schedule::kEmptyCost;
      ends.push_back(end);
      tiles.push_back(count);
    }
  }
  const bool cuts = *std::max_element(tiles.begin(), tiles.end()) > decode_schedule::kWholeTiles;
  const int64_t working = std::clamp<int64_t>(end / costs.floor, 1, p.num_ctas);
  Schedule s;
  for (int64_t i = 0; i <= p.num_ctas; ++i) {
    const int64_t index = std::min(i, working);
    const int64_t cut = index * (end / working) + std::min(index, end % working);
    auto pair = std::upper_bound(ends.begin(), ends.end(), cut) - ends.begin();
    int tile = 0;
    if (pair < std::ssize(ends) && cuts) {
      const int64_t within = cut - (pair > 0 ? ends[pair - 1] : 0);
      const int64_t nearest = (within - costs.task + kTileCost / 2) >> 3;
      tile = static_cast<int>(std::clamp<int64_t>(nearest, 0, tiles[pair]));
      if (tile == tiles[pair] && tile > 0) ++pair, tile = 0;
    }
    s.pair.push_back(static_cast<int>(pair));
    s.tile.push_back(tile);
  }
  for (int i = 0; i < p.num_ctas; ++i) {
    const bool starts = s.pair[i] < s.pair[i + 1] || s.tile[i] == 0;
    const auto after = std::upper_bound(s.pair.begin(), s.pair.end(), s.pair[i + 1]);
    s.last.push_back(s.tile[i + 1] > 0 && starts ? static_cast<int>(after - s.pair.begin()) - 1
                                                 : -1);
  }
  return s;
}

struct DeviceSchedule {
  DeviceArray<int> pair;
  DeviceArray<int> tile;
  DeviceArray<int> last;
  explicit DeviceSchedule(int ctas) : pair(ctas + 1), tile(ctas + 1), last(ctas) {}
  explicit DeviceSchedule(const Schedule& s) : pair(s.pair), tile(s.tile), last(s.last) {}
  void set(decode_attention::Buffers& b) const {
    b.span_pair = pair.data();
    b.span_tile = tile.data();
    b.merge_last = last.data();
  }
};

inline bool is_same(const DeviceSchedule& got, const Schedule& want) {
  return got.pair.host() == want.pair && got.tile.host() == want.tile &&
         got.last.host() == want.last;
}

// Whether a CTA has more than two tasks, or more half tiles than its ring has places. Then it fills
// places that consumer warps have read, and one lane of a warp has told so for all, after
// __syncwarp: an order that racecheck does not see.
inline bool reuses_memory(const Problem& p, const decode_attention::Cut& cut,
                          const std::vector<int>& lengths) {
  std::vector<int> before = {0};  // tiles of the pairs before
  int most_tiles = 0;
  for (const int length : lengths) {
    const int count = decode_schedule::count_tiles(std::max(length, 0), p.q_len, p.window);
    for (int head = 0; head < p.kv_heads; ++head) before.push_back(before.back() + count);
    most_tiles = std::max(most_tiles, count);
  }
  bool has_more_tasks = false;
  if (cut.splits == 0) {
    const Schedule s = schedule_on_host({p.batch, p.kv_heads, p.q_len, p.window, cut.num_ctas,
                                         decode_schedule::task_cost(p.fp8_cache)},
                                        lengths, {});
    most_tiles = 0;
    for (int i = 0; i < cut.num_ctas; ++i) {
      const int tasks = s.pair[i + 1] - s.pair[i] + (s.tile[i + 1] > 0 ? 1 : 0);
      const int tiles = before[s.pair[i + 1]] + s.tile[i + 1] - before[s.pair[i]] - s.tile[i];
      has_more_tasks = has_more_tasks || tasks > 2;
      most_tiles = std::max(most_tiles, tiles);
    }
  }
  return has_more_tasks || 2 * most_tiles > decode_attention::choose(p).slots;
}

inline Problem make_problem(int batch, int q_len, int group, int kv_heads, int head_dim,
                            int page_size, bool fp8) {
  Problem p{};
  p.batch = batch;
  p.q_len = q_len;
  p.group = group;
  p.kv_heads = kv_heads;
  p.head_dim = head_dim;
  p.page_size = page_size;
  p.fp8_cache = fp8;
  p.scale = 1 / std::sqrt(static_cast<float>(head_dim));
  return p;
}

// The recorded baselines' batches.
struct Mix {
  const char* name;
  std::vector<std::pair<int, int>> groups;  // sequences, tokens of each
};

inline const std::vector<Mix>& mixes() {
  constexpr int k = 1024;
  static const std::vector<Mix> all = {{"64x512", {{64, 512}}},
                                       {"64x4K", {{64, 4 * k}}},
                                       {"32x128+32x4K", {{32, 128}, {32, 4 * k}}},
                                       {"1x16K+15x64", {{1, 16 * k}, {15, 64}}},
                                       {"1x64K+7x4K", {{1, 64 * k}, {7, 4 * k}}},
                                       {"1x64K+15x4K", {{1, 64 * k}, {15, 4 * k}}},
                                       {"1x64K+31x4K", {{1, 64 * k}, {31, 4 * k}}},
                                       {"1x128K+31x4K", {{1, 128 * k}, {31, 4 * k}}},
                                       {"2x32K+30x4K", {{2, 32 * k}, {30, 4 * k}}}};
  return all;
}

}  // namespace jax_hpc::tests
