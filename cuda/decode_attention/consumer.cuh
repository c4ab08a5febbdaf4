// A consumer warp: scores, probabilities and sums of values of its tokens and rows. Warps meet
// only at the end of a task.
#pragma once

#include "decode_attention/shared.cuh"

namespace jax_hpc::decode_attention {

// What a warp carries through a task. Rows are the columns of every product; tile n, register
// c of a pair: row 8 n + 2 (lane % 4) + c of the warp's rows.
template <class Cache, int D, int N>
class Consumer {
  static constexpr int kSteps = D / 16;                  // products over the head dimension
  static constexpr int kLoads = kSteps / Cache::kFragments;
  static constexpr int kChains = N == 1 ? 2 : 1;         // independent sums of products in a score
  static constexpr int kPairs = 2 * Cache::kTerms;         // operands of probabilities
  static constexpr int kGroup = 16;                      // tokens of one product
  using Half = HalfTile<Cache, D>;

 public:
  __device__ Consumer(const Arguments& a, const Shared& shared)
      : a_(a),
        shared_(shared),
        warp_(threadIdx.x / kWarpSize),
        lane_(threadIdx.x % kWarpSize),
        first_row_(warp_ % a.row_groups * 8 * N),
        token_warp_(warp_ / a.row_groups) {
    const int key_token = lane_ % 16;
    key_offset_ = Half::offset(key_token, lane_ / 16);
    value_offset_ = Half::offset(Cache::value_token(lane_), Cache::value_column(lane_));
    part_tokens_ = min(a.problem.page_size, kTileTokens);
    for (int n = 0; n < N; ++n) {
      for (int c = 0; c < 2; ++c) {
        const int row = first_row_ + 8 * n + lane_ % 4 * 2 + c;
        tokens_of_rows_ |= static_cast<uint32_t>(token_of_row(row)) << 4 * (2 * n + c);
      }
    }
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      const int stage = turn_.stage();
      wait(&shared_.query_full[stage], turn_.parity());
      const Task& task = shared_.tasks[turn_.index];
      const int tiles = task.tiles;
      if (tiles < 0) return;
      start(task.head, stage);
      release(&shared_.query_empty[stage]);
      const int length = task.length;
      int token = task.first_token;
      for (int i = 0; i < tiles; ++i, token += kTileTokens) take_tile(length, token);
      finish(task);
      turn_.advance();
    }
  }

 private:
  __device__ __forceinline__ int token_of_row(int row) const {
    return min(row / a_.problem.group, a_.problem.q_len - 1);
  }

  __device__ __forceinline__ void release(uint64_t* barrier) const {
    __syncwarp();
    if (lane_ == 0) arrive(barrier);
  }

  // Queries.

  __device__ __forceinline__ void start(int head, int stage) {
    const int row_tile = 8 * N * a_.row_groups;
    const float scale = a_.problem.scale * (Cache::kBytes == 1 ? key_scale(head) : 1.0f);
    // Scores become powers of 2, or with a cap the argument of tanh's exponential.
    const float cap = a_.problem.cap;
    unit_ = cap > 0 ? scale * (2 * kLog2E / cap) : scale * kLog2E;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int row = stage * row_tile + first_row_ + 8 * n + lane_ / 4;
      const uint8_t* const values = shared_.query + row * shared_.query_stride;
      float row_scale = 1;
      if constexpr (Cache::kBytes == 2) {
        read_bf16(values, n);
      } else if (a_.problem.fp8_query) {
        read_fp8(values, n);
        row_scale = shared_.query_scale[row];
      } else {
        row_scale = quantize_bf16(values, n);
      }
      if constexpr (Cache::kBytes == 1) {
        // Lane l has the scale of row l / 4 and needs those of its two columns.
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          factor_[n][c] = unit_ * __shfl_sync(~0u, row_scale, (lane_ % 4 * 2 + c) * 4);
        }
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        base_[n][c] = kNoBase;
        total_[n][c] = 0;
      }
    }
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum_[m][n][i] = 0;
      }
    }
  }

  __device__ __forceinline__ float key_scale(int head) const {
    const ScaleKind kind = a_.problem.k_scale;
    if (kind == ScaleKind::kTensor) return a_.k_scale[0];
    return kind == ScaleKind::kHead ? a_.k_scale[head] : 1.0f;
  }

  __device__ __forceinline__ void read_bf16(const uint8_t* row, int n) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint8_t* const at = row + (16 * k + lane_ % 4 * 2) * 2;
      query_values_[k][n][0] = *reinterpret_cast<const uint32_t*>(at);
      query_values_[k][n][1] = *reinterpret_cast<const uint32_t*>(at + 16);
    }
  }

  // In the order of Fp8Cache::keys.
  __device__ __forceinline__ void read_fp8(const uint8_t* row, int n) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint32_t four = *reinterpret_cast<const uint32_t*>(row + 16 * k + lane_ % 4 * 4);
      unpack_e4m3(four, query_values_[k][n][0], query_values_[k][n][1]);
    }
  }

  // Quantised per row as jax_hpc.fp8 does, bit for bit; returns the scale.
  __device__ __forceinline__ float quantize_bf16(const uint8_t* row, int n) {
    const auto four_at = [&](int k) {
      const uint2 pairs = *reinterpret_cast<const uint2*>(row + (16 * k + lane_ % 4 * 4) * 2);
      return float4{__uint_as_float(pairs.x << 16), __uint_as_float(pairs.x & 0xffff0000u),
                    __uint_as_float(pairs.y << 16), __uint_as_float(pairs.y & 0xffff0000u)};
    };
    float largest = 0;
    bool is_nan = false;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const float4 v = four_at(k);
      largest = fmaxf(fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))), largest);
      is_nan = is_nan || v.x != v.x || v.y != v.y || v.z != v.z || v.w != v.w;
    }
    if (is_nan) largest = NAN;
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const float other = __shfl_xor_sync(~0u, largest, step);
      largest = largest != largest || other != other ? NAN : fmaxf(largest, other);
    }
    constexpr float kSmallestScale = 0x1p-126f;
    float scale = largest * (1.0f / 448.0f);
    if (scale < kSmallestScale) scale = 1;
    const float reciprocal = __fdiv_rn(1.0f, scale);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const float4 v = four_at(k);
      query_values_[k][n][0] = round_to_e4m3(v.x * reciprocal, v.y * reciprocal);
      query_values_[k][n][1] = round_to_e4m3(v.z * reciprocal, v.w * reciprocal);
    }
    return scale;
  }

  // Tiles.

  __device__ __forceinline__ void take_tile(int length, int first_token) {
    const Place k = ring_;
    ring_.advance(a_.slots);
    const Place v = ring_;
    ring_.advance(a_.slots);
    const int groups = kTileTokens / kGroup * a_.row_groups / a_.warps;  // of tokens, of this warp
    wait(&shared_.full[k.index], k.parity);
    const uint32_t live = shared_.live[k.index];
    for (int i = 0; i < groups; ++i) {
      const int group = token_warp_ * groups + i;
      const bool last = i + 1 == groups;
      const int token = first_token + group * kGroup;
      if ((live >> group & 1) == 0 || !any_visible(length, token)) {
        if (last) release(&shared_.empty[k.index]);
        if (i == 0) wait(&shared_.full[v.index], v.parity);
        if (last) release(&shared_.empty[v.index]);
        continue;
      }
      float scores[N][4];
      multiply_keys(group_address(k.index, group), scores);
      if (a_.problem.k_scale == ScaleKind::kToken) scale_tokens(k.index, group, scores);
      if (last) release(&shared_.empty[k.index]);
      const bool edge = !all_visible(length, token);
      uint32_t pairs[N][kPairs];
      weigh(length, token, edge, scores, pairs);
      if (i == 0) wait(&shared_.full[v.index], v.parity);
      const uint32_t values = group_address(v.index, group);
      uint2 keep{~0u, ~0u};
      if (edge) keep = hide_not_finite(length, token, values, pairs);
      if (__any_sync(~0u, (keep.x & keep.y) != ~0u)) {
        multiply_values<true>(values, pairs, keep);
      } else {
        multiply_values<false>(values, pairs, keep);
      }
      if (last) release(&shared_.empty[v.index]);
    }
  }

  __device__ __forceinline__ uint32_t group_address(int slot, int group) const {
    const int token = group * kGroup;
    const int in_part = token & (part_tokens_ - 1);
    return shared_address(shared_.ring) + slot * Half::kBytes +
           (token - in_part) * Half::kTokenBytes + in_part * Half::kRowBytes;
  }

  // Address of load j of a group, given that of load 0.
  __device__ __forceinline__ uint32_t load_address(uint32_t first, int j) const {
    return (first + j / 4 * part_tokens_ * 128) ^ (j % 4 * 32);
  }

  // scores = keys of 16 tokens times all rows: [n][0, 1] of token lane / 4, [n][2, 3] eight on.
  __device__ __forceinline__ void multiply_keys(uint32_t address, float (&scores)[N][4]) const {
    float chains[kChains][N][4] = {};
    address += key_offset_;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      uint32_t loaded[4];
      load_matrices(loaded, load_address(address, j));
      uint32_t operand[Cache::kFragments][4];
      Cache::keys(operand, loaded);
#pragma unroll
      for (int f = 0; f < Cache::kFragments; ++f) {
        const int k = j * Cache::kFragments + f;
#pragma unroll
        for (int n = 0; n < N; ++n) {
          Cache::multiply(chains[k % kChains][n], operand[f], query_values_[k][n][0],
                          query_values_[k][n][1]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[n][i] = chains[0][n][i];
        if constexpr (kChains == 2) scores[n][i] += chains[1][n][i];
      }
    }
  }

  __device__ __forceinline__ void scale_tokens(int slot, int group, float (&scores)[N][4]) const {
    const float* const scales = shared_.token_scale + slot * kTileTokens + group * kGroup;
    const float scale[2] = {scales[lane_ / 4], scales[lane_ / 4 + 8]};
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] *= scale[i / 2];
    }
  }

  // Visibility. Query token s sits at position length - S + s.

  __device__ __forceinline__ bool any_visible(int length, int token) const {
    const Problem& p = a_.problem;
    if (token >= length) return false;
    return p.window == 0 || length - p.q_len - (token + kGroup - 1) < p.window;
  }
  __device__ __forceinline__ bool all_visible(int length, int token) const {
    const Problem& p = a_.problem;
    if (token + kGroup - 1 > length - p.q_len) return false;
    return p.window == 0 || length - 1 - token < p.window;
  }
  __device__ __forceinline__ bool sees(int length, int query_token, int token) const {
    const int distance = length - a_.problem.q_len + query_token - token;
    return distance >= 0 && (a_.problem.window == 0 || distance < a_.problem.window);
  }

  // Bit 4 n + i for scores[n][i].
  __device__ __forceinline__ uint32_t visible_scores(int length, int token) const {
    uint32_t bits = 0;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int query_token = tokens_of_rows_ >> 4 * (2 * n + i % 2) & 15;
        if (sees(length, query_token, token + lane_ / 4 + i / 2 * 8)) bits |= 1u << (4 * n + i);
      }
    }
    return bits;
  }

  // Probabilities.

  __device__ __forceinline__ float factor(int n, int i) const {
    if constexpr (Cache::kBytes == 1) return factor_[n][i % 2];
    return unit_;
  }

  // Adds the probabilities to the totals and leaves them as the operand of the values' product.
  __device__ __forceinline__ void weigh(int length, int token, bool edge, float (&scores)[N][4],
                        uint32_t (&pairs)[N][kPairs]) {
    const bool capped = a_.problem.cap > 0;
    if (capped) cap_scores(scores);
    const uint32_t visible = edge ? visible_scores(length, token) : ~0u;
    float power[N][4];
    // The base is the largest score so far, or a little less: then nothing need be rescaled. Each
    // row by itself: what another holds must not change its bits.
    if (__any_sync(~0u, relate(edge, visible, scores, power))) {
      float x[N][4];
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][i] = scores[n][i] * (capped ? 1.0f : factor(n, i));
      }
      if (edge) hide(visible, x);
      raise_bases(x, power);
      relate(edge, visible, scores, power);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        power[n][i] = power_of_2(power[n][i]);
        total_[n][i % 2] += power[n][i];
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = power[n][2 * half];
        const float high = power[n][2 * half + 1];
        const uint32_t pair = Cache::pack(low, high);
        pairs[n][half] = transpose(pair);
        if constexpr (Cache::kTerms == 2) {
          const float rest_low = low - __uint_as_float(pair << 16);
          const float rest_high = high - __uint_as_float(pair & 0xffff0000u);
          pairs[n][2 + half] = transpose(Cache::pack(rest_low, rest_high));
        }
      }
    }
  }

  // Powers of 2 relative to the rows' bases; whether one is too large.
  __device__ __forceinline__ bool relate(bool edge, uint32_t visible, const float (&scores)[N][4],
                                         float (&power)[N][4]) const {
    const bool capped = a_.problem.cap > 0;
    bool above = false;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        power[n][i] = fmaf(scores[n][i], capped ? 1.0f : factor(n, i), -base_[n][i % 2]);
      }
    }
    if (edge) hide(visible, power);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) above = above || power[n][i] > Cache::kSlack;
    }
    return above;
  }

  __device__ __forceinline__ static void hide(uint32_t visible, float (&x)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((visible >> (4 * n + i) & 1) == 0) x[n][i] = -INFINITY;
      }
    }
  }

  // cap * tanh(s / cap) in powers of 2; tanh(y) = 1 - 2 / (1 + exp(2 y)).
  __device__ __forceinline__ void cap_scores(float (&scores)[N][4]) const {
    const float cap = a_.problem.cap * kLog2E;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float e = power_of_2(scores[n][i] * factor(n, i));
        scores[n][i] = cap * (1 - __fdividef(2.0f, 1 + e));
      }
    }
  }

  __device__ __forceinline__ void raise_bases(const float (&x)[N][4], const float (&power)[N][4]) {
    const uint32_t lanes_of_row = 0x11111111u << lane_ % 4;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const bool above = power[n][c] > Cache::kSlack || power[n][c + 2] > Cache::kSlack;
        const bool raises = (__ballot_sync(~0u, above) & lanes_of_row) != 0;
        float top = fmaxf(x[n][c], x[n][c + 2]);
#pragma unroll
        for (int step = 4; step < kWarpSize; step *= 2) {
          top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
        }
        const float base = raises ? fmaxf(base_[n][c], top - Cache::kBias) : base_[n][c];
        const float shrink = power_of_2(base_[n][c] - base);
        base_[n][c] = base;
        total_[n][c] *= shrink;
#pragma unroll
        for (int m = 0; m < kSteps; ++m) {
          sum_[m][n][c] *= shrink;
          sum_[m][n][c + 2] *= shrink;
        }
      }
    }
  }

  // Values.

  // A value that is not finite must reach no row that does not see its token, and 0 * NaN is NaN.
  // Tokens with one are masked out of the values (the result: masks of this lane's two pairs of
  // tokens), and the rows that see them get NaN for a probability.
  __device__ __forceinline__ uint2 hide_not_finite(int length, int token, uint32_t address,
                                   uint32_t (&pairs)[N][kPairs]) const {
    uint2 bad{0, 0};
    address += value_offset_;
#pragma unroll 1
    for (int j = 0; j < kLoads; ++j) {
      uint32_t operand[Cache::kFragments][4];
      load_values(load_address(address, j), operand);
#pragma unroll
      for (int f = 0; f < Cache::kFragments; ++f) {
        bad.x |= not_finite(operand[f][0]) | not_finite(operand[f][1]);
        bad.y |= not_finite(operand[f][2]) | not_finite(operand[f][3]);
      }
    }
    if (!__any_sync(~0u, (bad.x | bad.y) != 0)) return {~0u, ~0u};
#pragma unroll
    for (int step = 4; step < kWarpSize; step *= 2) {
      bad.x |= __shfl_xor_sync(~0u, bad.x, step);
      bad.y |= __shfl_xor_sync(~0u, bad.y, step);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int query_token = token_of_row(first_row_ + 8 * n + lane_ / 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t mask = 0xffffu << 16 * (i % 2);
        const bool is_bad = ((i < 2 ? bad.x : bad.y) & mask) != 0;
        if (is_bad && sees(length, query_token, token + lane_ % 4 * 2 + i % 2 + i / 2 * 8)) {
          pairs[n][i / 2] |= mask & 0x7fff7fffu;
        }
      }
    }
    return {~bad.x, ~bad.y};
  }

  // All ones in each half that is not finite.
  __device__ __forceinline__ static uint32_t not_finite(uint32_t pair) {
    return __vcmpeq2(pair & Cache::kNotFinite, Cache::kNotFinite);
  }

  __device__ __forceinline__ static void load_values(uint32_t address,
                                     uint32_t (&operand)[Cache::kFragments][4]) {
    uint32_t loaded[4];
    load_transposed(loaded, address);
    Cache::values(operand, loaded);
  }

  template <bool Masked>
  __device__ __forceinline__ void multiply_values(uint32_t address, const uint32_t (&pairs)[N][kPairs], uint2 keep) {
    address += value_offset_;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      uint32_t operand[Cache::kFragments][4];
      load_values(load_address(address, j), operand);
#pragma unroll
      for (int f = 0; f < Cache::kFragments; ++f) {
        if constexpr (Masked) {
#pragma unroll
          for (int i = 0; i < 4; ++i) operand[f][i] &= i < 2 ? keep.x : keep.y;
        }
#pragma unroll
        for (int i = 0; i < kPairs; i += 2) {
#pragma unroll
          for (int n = 0; n < N; ++n) {
            Cache::multiply(sum_[j * Cache::kFragments + f][n], operand[f], pairs[n][i],
                            pairs[n][i + 1]);
          }
        }
      }
    }
  }

  // The end of a task: the warps of a row group add up what they hold.

  __device__ __forceinline__ void finish(const Task& task) {
    float2* const own_state = shared_.state + warp_ * 8 * N;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float total = total_[n][c];
#pragma unroll
        for (int step = 4; step < kWarpSize; step *= 2) {
          total += __shfl_xor_sync(~0u, total, step);
        }
        if (lane_ < 4) own_state[8 * n + lane_ * 2 + c] = {base_[n][c], total};
      }
    }
    finish_tile<0>(task);
  }

  // By recursion: a loop with barriers is not unrolled, and would index registers.
  template <int n>
  __device__ __forceinline__ void finish_tile(const Task& task) const {
    if constexpr (n < N) {
      consumer_barrier(a_.warps * kWarpSize);  // states are there, or the tile before has been read
      share_sums<n>();
      consumer_barrier(a_.warps * kWarpSize);
      write_rows(task, n);
      finish_tile<n + 1>(task);
    }
  }

  // Row of the warps' states, of the tile's `row` in this warp's row group.
  __device__ __forceinline__ float2 state_of(int warp, int n, int row) const {
    return shared_.state[warp * 8 * N + 8 * n + row];
  }
  __device__ __forceinline__ float common_base(int row_group, int n, int row) const {
    float base = kNoBase;
    for (int w = row_group; w < a_.warps; w += a_.row_groups) {
      base = fmaxf(base, state_of(w, n, row).x);
    }
    return base;
  }

  static constexpr int kMergeRow = D + 4;  // floats; the four keep the stores free of conflicts

  template <int n>
  __device__ __forceinline__ void share_sums() const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = lane_ % 4 * 2 + c;
      const float shrink = power_of_2(base_[n][c] - common_base(warp_ % a_.row_groups, n, row));
      float* const to = shared_.merge + (warp_ * 8 + row) * kMergeRow + Cache::first_dim(lane_);
#pragma unroll
      for (int m = 0; m < kSteps; ++m) {
        const float first = sum_[m][n][c] * shrink;
        const float second = sum_[m][n][c + 2] * shrink;
        if constexpr (Cache::kSecondDim == 1) {
          *reinterpret_cast<float2*>(to + 16 * m) = {first, second};
        } else {
          to[16 * m] = first;
          to[16 * m + Cache::kSecondDim] = second;
        }
      }
    }
  }

  __device__ __forceinline__ void write_rows(const Task& task, int n) const {
    constexpr int kUnits = D / 8;  // of eight values in a row
    for (int i = threadIdx.x; i < a_.row_groups * 8 * kUnits; i += a_.warps * kWarpSize) {
      const int unit = i % kUnits;
      const int tile_row = i / kUnits % 8;
      const int row_group = i / (kUnits * 8);
      const int row = (row_group * N + n) * 8 + tile_row;
      if (row >= a_.problem.rows()) continue;
      const float base = common_base(row_group, n, tile_row);
      float total = 0;
      float values[8] = {};
      for (int w = row_group; w < a_.warps; w += a_.row_groups) {
        const float2 state = state_of(w, n, tile_row);
        total += power_of_2(state.x - base) * state.y;
        const float4* const from = reinterpret_cast<const float4*>(
            shared_.merge + (w * 8 + tile_row) * kMergeRow + unit * 8);
        const float4 low = from[0];
        const float4 high = from[1];
        values[0] += low.x, values[1] += low.y, values[2] += low.z, values[3] += low.w;
        values[4] += high.x, values[5] += high.y, values[6] += high.z, values[7] += high.w;
      }
      if (task.slot >= 0) {
        write_partial(task, row, unit, base, total, values);
      } else {
        write_output(task, row, unit, base, total, values);
      }
    }
  }

  __device__ __forceinline__ void write_partial(const Task& task, int row, int unit, float base, float total,
                                const float (&values)[8]) const {
    const int64_t at = int64_t{task.slot} * a_.problem.rows() + row;
    float4* const to = reinterpret_cast<float4*>(a_.partial_out + at * D + unit * 8);
    to[0] = {values[0], values[1], values[2], values[3]};
    to[1] = {values[4], values[5], values[6], values[7]};
    if (unit == 0) a_.partial_state[at] = {base, total};
  }

  __device__ __forceinline__ void write_output(const Task& task, int row, int unit, float base, float total,
                               const float (&values)[8]) const {
    const int q_head = task.head * a_.problem.group + row % a_.problem.group;
    const Closing closing = close_row(base, total, a_.sinks, q_head);
    const float weight = closing.weight * value_scale(a_, task.head);
    const int64_t at = output_row(a_.problem, task.sequence, task.head, row);
    uint4 packed;
    packed.x = pack_bf16(values[0] * weight, values[1] * weight);
    packed.y = pack_bf16(values[2] * weight, values[3] * weight);
    packed.z = pack_bf16(values[4] * weight, values[5] * weight);
    packed.w = pack_bf16(values[6] * weight, values[7] * weight);
    *reinterpret_cast<uint4*>(a_.out + at * D + unit * 8) = packed;
    if (unit == 0 && a_.lse != nullptr) a_.lse[at] = closing.lse;
  }

  const Arguments& a_;
  const Shared& shared_;
  int warp_;
  int lane_;
  int first_row_;   // of this warp, among the pair's rows
  int token_warp_;  // among the warps that share out the tokens
  int key_offset_;
  int value_offset_;
  int part_tokens_;
  uint32_t tokens_of_rows_ = 0;  // four bits for each of this lane's rows
  Place ring_;
  Turn turn_;

  float unit_ = 0;
  float factor_[N][2];
  uint32_t query_values_[kSteps][N][2];
  float base_[N][2];
  float total_[N][2];
  float sum_[kSteps][N][4];
};

}  // namespace jax_hpc::decode_attention
