// A layer of experts on the host: random operands and float64 truth with the kernels' quantisation
// points.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "fused_moe/launch.h"
#include "tests/support.cuh"

namespace jax_hpc::tests {

using namespace jax_hpc::fused_moe;
using Bytes = std::vector<uint8_t>;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

constexpr double kHalfBf16 = 0x1p-8;  // of a value: what rounding to bf16 moves it by at most

enum class Routing {
  kUniform,
  kSkewed,     // most choices are one of two experts
  kOneExpert,  // the last
  kNobody,
  kGarbage,  // ids of other ranks, -1, and the ends of int32 among uniform ones
};

struct Setup {
  Problem p;
  Routing routing;
  bool x_is_fp8;
  bool has_addends;       // shared_output and identity_weight
  bool has_nan;           // in x of token 1
  bool shares_act_scale;  // one for all experts
  int expert_offset;
  int wide_rows = 0;      // of a tile of the wide products; 0: as chosen
  int output_slices = 0;  // 0: as chosen
};

inline uint8_t to_fp8(float value) {
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}
inline float from_fp8(uint8_t bits) {
  __nv_fp8_e4m3 value;
  value.__x = bits;
  return static_cast<float>(value);
}
inline __nv_bfloat16 to_bf16(float value) { return __float2bfloat16(value); }
inline float from_bf16(__nv_bfloat16 value) { return __bfloat162float(value); }
// Of an array of bytes.
inline float bf16_at(const uint8_t* values, size_t place) {
  __nv_bfloat16 value;
  std::memcpy(&value, values + place * sizeof(value), sizeof(value));
  return from_bf16(value);
}

// What each e4m3 byte stands for.
struct Values {
  float of[256];

  Values() {
    for (int i = 0; i < 256; ++i) of[i] = from_fp8(static_cast<uint8_t>(i));
  }
};

struct Inputs {
  std::vector<__nv_bfloat16> x, shared;
  Bytes x_fp8, gate_up, down;  // weights in e4m3 or bf16
  Floats x_scale, topk_weights, identity;
  std::vector<int> ids;
  Floats input_scale, gate_scale, up_scale, down_scale, act_scale, gate_up_blocks, down_blocks;
};

inline Floats uniform(size_t size, float low, float high, uint32_t seed) {
  Floats values(size);
  for (size_t i = 0; i < size; ++i) {
    const uint32_t bits = mix(static_cast<uint32_t>(i) + mix(seed));
    values[i] = low + (high - low) * static_cast<float>(bits) * 0x1p-32f;
  }
  return values;
}

// Normal values of deviation 60, drawn from a table: the weights of some layers are many millions.
inline Bytes normal_fp8(size_t size, uint32_t seed) {
  constexpr int kLog2 = 14;
  static const Bytes table = [] {
    Bytes drawn(size_t{1} << kLog2);
    for (size_t i = 0; i < drawn.size(); ++i) drawn[i] = to_fp8(60 * normal(i, 1));
    return drawn;
  }();
  Bytes values(size);
  const uint32_t start = mix(seed);
  for (size_t i = 0; i < size; ++i) {
    values[i] = table[mix(static_cast<uint32_t>(i) + start) >> (32 - kLog2)];
  }
  return values;
}

// The same values in bf16, times the scale of their matrix, of which an expert has one after the
// other from each array.
inline Bytes scaled_to_bf16(const Bytes& values, size_t matrix, const std::vector<Floats>& scales) {
  Bytes scaled(values.size() * sizeof(__nv_bfloat16));
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t number = i / matrix;
    const float scale = scales[number % scales.size()][number / scales.size()];
    const __nv_bfloat16 value = to_bf16(from_fp8(values[i]) * scale);
    std::memcpy(scaled.data() + i * sizeof(value), &value, sizeof(value));
  }
  return scaled;
}

inline int id_of(const Setup& setup, int64_t pair, uint32_t seed) {
  const Problem& p = setup.p;
  const uint32_t random = mix(static_cast<uint32_t>(pair) * 3 + mix(seed));
  const int uniform_id = setup.expert_offset + static_cast<int>(random % p.experts);
  switch (setup.routing) {
    case Routing::kUniform:
      return uniform_id;
    case Routing::kSkewed:
      return random % 11 == 0 ? uniform_id
                              : setup.expert_offset + static_cast<int>(random % 2) % p.experts;
    case Routing::kOneExpert:
      return setup.expert_offset + p.experts - 1;
    case Routing::kNobody:
      return pair % 2 == 0 ? -1 : setup.expert_offset + p.experts;
    case Routing::kGarbage:
      constexpr int kLeast = -2147483647 - 1;
      const int garbage[] = {-1, setup.expert_offset - 1, setup.expert_offset + p.experts,
                             2147483647, kLeast};
      return random % 3 == 0 ? garbage[random / 3 % 5] : uniform_id;
  }
  return -1;
}

inline int expert_of(const Setup& setup, int id) {
  const int64_t local = int64_t{id} - setup.expert_offset;
  return id >= 0 && local >= 0 && local < setup.p.experts ? static_cast<int>(local) : -1;
}

inline Inputs make_inputs(const Setup& setup, uint32_t seed) {
  const Problem& p = setup.p;
  Inputs in;
  const size_t values = size_t(p.tokens) * p.hidden;
  const size_t groups = size_t(p.tokens) * blocks_of(p.hidden, kBlock);
  for (size_t i = 0; i < values; ++i) {
    const bool is_nan = setup.has_nan && i / p.hidden == 1 && i % 7 == 3;
    const bool is_zero = i / kBlock % 5 == 2;  // whole groups, as padding has them
    in.x.push_back(to_bf16(is_nan ? NAN : is_zero ? 0.0f : normal(i, seed)));
    in.shared.push_back(to_bf16(normal(i, seed + 1)));
  }
  in.x_fp8 = normal_fp8(values, seed + 2);
  in.x_scale = uniform(groups, 0.01f, 0.02f, seed + 3);
  for (int64_t pair = 0; pair < num_pairs(p); ++pair) {
    in.ids.push_back(id_of(setup, pair, seed + 4));
  }
  in.topk_weights = uniform(in.ids.size(), 0.1f, 1.0f, seed + 5);
  for (size_t i = 0; i < in.ids.size(); ++i) {
    if (expert_of(setup, in.ids[i]) < 0) in.topk_weights[i] = NAN;
  }
  in.identity = uniform(p.tokens, -1.0f, 1.0f, seed + 6);
  const size_t matrix = size_t(p.experts) * p.hidden * p.inter;
  in.gate_up = normal_fp8(2 * matrix, seed + 7);
  in.down = normal_fp8(matrix, seed + 8);
  const float of_hidden = 1.0f / (60 * std::sqrt(static_cast<float>(p.hidden)));
  const float of_inter = 1.0f / (60 * std::sqrt(static_cast<float>(p.inter)));
  in.input_scale = {0.0125f};
  in.gate_scale = uniform(p.experts, of_hidden, 2 * of_hidden, seed + 9);
  in.up_scale = uniform(p.experts, of_hidden, 2 * of_hidden, seed + 10);
  in.down_scale = uniform(p.experts, of_inter, 2 * of_inter, seed + 11);
  in.act_scale = setup.shares_act_scale ? Floats(p.experts, 0.02f)
                                        : uniform(p.experts, 0.01f, 0.03f, seed + 12);
  const size_t blocks = size_t(p.experts) * blocks_of(p.hidden, kBlock) *
                        (p.block_rows > 0 ? blocks_of(p.inter, p.block_rows) : 0);
  in.gate_up_blocks = uniform(2 * blocks, of_hidden, 2 * of_hidden, seed + 13);
  in.down_blocks = uniform(blocks, of_inter, 2 * of_inter, seed + 14);
  if (p.format == Format::kBf16) {
    const size_t size = size_t(p.hidden) * p.inter;
    in.gate_up = scaled_to_bf16(in.gate_up, size, {in.gate_scale, in.up_scale});
    in.down = scaled_to_bf16(in.down, size, {in.down_scale});
  }
  return in;
}

// Rows of an activation in e4m3, each group of 128 values with a scale of its own.
struct Quantized {
  Bytes values;
  Floats scale;  // of each group; one scale is repeated
};

inline void quantize_row(const float* values, int size, const float* given_scale, Quantized* to) {
  for (int first = 0; first < size; first += kBlock) {
    const int end = std::min(first + kBlock, size);
    float scale = given_scale != nullptr ? *given_scale : 0;
    if (given_scale == nullptr) {
      float most = 0;
      for (int i = first; i < end; ++i) {
        const bool is_nan = std::isnan(values[i]) || std::isnan(most);
        most = is_nan ? NAN : std::max(most, std::abs(values[i]));
      }
      scale = most * (1.0f / 448.0f);
      if (scale < 0x1p-126f) scale = 1;
    }
    const float factor = 1.0f / scale;
    for (int i = first; i < end; ++i) to->values.push_back(to_fp8(values[i] * factor));
    to->scale.push_back(scale);
  }
}

// A sum of products, and how far the tensor cores' may be from it. Of the 32 terms of e4m3 that
// they add at once and the sum so far, each loses what lies 13 bits behind the first bit of the
// largest: up to 2^-13 of that, 1 / sqrt(3) of it in the mean square. A sum so far has at most the
// 96 terms of three such steps, so the largest terms' squares of all steps add up to four times all
// terms' squares at most, but for the chance of signs. Six deviations of 33 losses a step are 6 *
// sqrt(33 / 3 * 4) * 2^-13 times the root of the terms' squares. What float32 and fast exponentials
// lose is below a hundredth of that. Of bf16 each step of 16 terms loses at most 17 times 2^-23 of
// the sum so far, and of 4096 terms the 256 steps at most that share of it: 5e-4, were all of one
// sign. A fifth of it is sixteen times what the losses' deviations add up to.
struct Sum {
  double value = 0;
  double squares = 0;

  double error(Format format) const {
    return (format == Format::kBf16 ? 1e-4 : 0.005) * std::sqrt(squares);
  }
};

// Values with the errors that are allowed for them.
struct Sums {
  Doubles value;
  Doubles error;
};

// What every stage must give. Sums are float64, rounded only where an activation is quantised.
struct Truth {
  std::vector<int> pair_row, row_token, row_expert;
  Quantized x;
  Sums activation;  // [rows, inter]: SiLU(gate) * up, not yet quantised
  Doubles act;      // [rows, inter], dequantised
  Doubles out;      // [tokens, hidden]
};

inline void sort_pairs(const Setup& setup, const Inputs& in, Truth* truth) {
  truth->pair_row.assign(in.ids.size(), -1);
  for (int expert = 0; expert < setup.p.experts; ++expert) {
    for (size_t pair = 0; pair < in.ids.size(); ++pair) {
      if (expert_of(setup, in.ids[pair]) != expert) continue;
      truth->pair_row[pair] = static_cast<int>(truth->row_token.size());
      truth->row_token.push_back(static_cast<int>(pair / setup.p.top_k));
      truth->row_expert.push_back(expert);
    }
  }
}

// Weight [rows, columns] of an expert: one scale, or one of each block_rows x 128, or 128 x
// block_rows where the columns are those of inter; or none.
struct Matrix {
  const uint8_t* values;
  const float* scales;  // null: bf16, without scales
  int columns;
  int row_block;  // 0: one scale
  int column_block;

  double value(size_t place, const float* table) const {
    return scales == nullptr ? bf16_at(values, place) : table[values[place]];
  }
  double scale(int row, int first_column) const {
    if (scales == nullptr) return 1;
    if (row_block == 0) return *scales;
    return scales[row / row_block * blocks_of(columns, column_block) + first_column / column_block];
  }
};

// Row `row` of the matrix times the values in `x`, group by group of equal scales.
inline Sum product(const Matrix& m, int row, const double* x, const float* table) {
  Sum sum;
  constexpr int kStep = 16;  // divides every block
  for (int first = 0; first < m.columns; first += kStep) {
    double part = 0;
    double squares = 0;
    const size_t place = size_t(row) * m.columns + first;
    for (int i = 0; i < kStep; ++i) {
      const double term = m.value(place + i, table) * x[first + i];
      part += term;
      squares += term * term;
    }
    const double scale = m.scale(row, first);
    sum.value += part * scale;
    sum.squares += squares * scale * scale;
  }
  return sum;
}

// SiLU(gate) * up, and by how much it moves where gate and up do.
inline void push_activation(const Sum& gate, const Sum& up, Format format, Sums* to) {
  const double gate_error = gate.error(format);
  const double up_error = up.error(format);
  const double sigmoid = 1 / (1 + std::exp(-gate.value));
  const double silu = gate.value * sigmoid;
  const double slope = sigmoid * (1 + gate.value * (1 - sigmoid));
  to->value.push_back(silu * up.value);
  // The slope changes by at most half of what gate moves.
  const double silu_error = (std::abs(slope) + gate_error / 2) * gate_error;
  to->error.push_back(silu_error * (std::abs(up.value) + up_error) + std::abs(silu) * up_error);
}

// A token's x as the products take it.
inline Doubles x_of(const Setup& setup, const Inputs& in, const Truth& truth, const float* table,
                    int token) {
  const Problem& p = setup.p;
  const int groups = blocks_of(p.hidden, kBlock);
  Doubles x(p.hidden);
  for (int i = 0; i < p.hidden; ++i) {
    const size_t place = size_t(token) * p.hidden + i;
    x[i] = p.format == Format::kBf16 ? from_bf16(in.x[place])
                                     : double{table[truth.x.values[place]]} *
                                           truth.x.scale[size_t(token) * groups + i / kBlock];
  }
  return x;
}

inline void multiply_row(const Setup& setup, const Inputs& in, const float* table, int row,
                         Truth* truth) {
  const Problem& p = setup.p;
  const bool is_block = p.format == Format::kBlock;
  const bool is_bf16 = p.format == Format::kBf16;
  const size_t expert = truth->row_expert[row];
  const int groups = blocks_of(p.hidden, kBlock);
  const Doubles x = x_of(setup, in, *truth, table, truth->row_token[row]);
  const size_t size = size_t(p.inter) * p.hidden;
  const size_t bytes = size * value_bytes(p.format);
  const int row_block = is_block ? p.block_rows : 0;
  const size_t blocks = is_block ? size_t(blocks_of(p.inter, p.block_rows)) * groups : 0;
  const float* scales = in.gate_up_blocks.data() + expert * 2 * blocks;
  const uint8_t* values = in.gate_up.data() + expert * 2 * bytes;
  const Matrix gate{values, is_bf16 ? nullptr : (is_block ? scales : &in.gate_scale[expert]),
                    p.hidden, row_block, kBlock};
  const Matrix up{values + bytes,
                  is_bf16 ? nullptr : (is_block ? scales + blocks : &in.up_scale[expert]), p.hidden,
                  row_block, kBlock};
  const size_t first = truth->activation.value.size();
  for (int i = 0; i < p.inter; ++i) {
    push_activation(product(gate, i, x.data(), table), product(up, i, x.data(), table), p.format,
                    &truth->activation);
  }
  const Floats activation(truth->activation.value.begin() + static_cast<std::ptrdiff_t>(first),
                          truth->activation.value.end());
  if (is_bf16) {
    for (const float value : activation) truth->act.push_back(from_bf16(to_bf16(value)));
    return;
  }
  Quantized act;
  quantize_row(activation.data(), p.inter, is_block ? nullptr : &in.act_scale[expert], &act);
  for (int i = 0; i < p.inter; ++i) {
    truth->act.push_back(double{table[act.values[i]]} * act.scale[i / kBlock]);
  }
}

// Outputs of the experts [rows, hidden] for some act, which need not be the truth's.
inline Sums outputs_of(const Setup& setup, const Inputs& in, const Truth& truth,
                       const Doubles& act) {
  const Problem& p = setup.p;
  const bool is_block = p.format == Format::kBlock;
  const size_t bytes = size_t(p.inter) * p.hidden * value_bytes(p.format);
  const size_t blocks =
      is_block ? size_t(blocks_of(p.inter, p.block_rows)) * blocks_of(p.hidden, kBlock) : 0;
  const Values values;
  Sums outputs;
  for (size_t row = 0; row < truth.row_expert.size(); ++row) {
    const size_t expert = truth.row_expert[row];
    const float* scales =
        is_block ? in.down_blocks.data() + expert * blocks : &in.down_scale[expert];
    const Matrix down{in.down.data() + expert * bytes, p.format == Format::kBf16 ? nullptr : scales,
                      p.inter, is_block ? kBlock : 0, is_block ? p.block_rows : 1};
    for (int i = 0; i < p.hidden; ++i) {
      const Sum sum = product(down, i, act.data() + row * p.inter, values.of);
      outputs.value.push_back(sum.value);
      const double half_step = p.format == Format::kBf16 ? 0x1p-24 : kHalfBf16;
      outputs.error.push_back(sum.error(p.format) + half_step * std::abs(sum.value));
    }
  }
  return outputs;
}

// The weighted sums of some outputs, which need not be the truth's.
inline Sums weighted_sums(const Setup& setup, const Inputs& in, const Truth& truth,
                          const Sums& outputs) {
  const Problem& p = setup.p;
  const int groups = blocks_of(p.hidden, kBlock);
  Sums out{Doubles(size_t(p.tokens) * p.hidden), Doubles(size_t(p.tokens) * p.hidden)};
  for (size_t i = 0; i < out.value.size(); ++i) {
    const size_t token = i / p.hidden;
    const size_t column = i % p.hidden;
    for (int k = 0; k < p.top_k; ++k) {
      const size_t pair = token * p.top_k + k;
      if (truth.pair_row[pair] < 0) continue;
      const size_t place = size_t(truth.pair_row[pair]) * p.hidden + column;
      out.value[i] += in.topk_weights[pair] * outputs.value[place];
      out.error[i] += in.topk_weights[pair] * outputs.error[place];
    }
    if (setup.has_addends) {
      const float scale = p.format == Format::kBlock ? in.x_scale[token * groups + column / kBlock]
                                                     : in.input_scale[0];
      const double x = setup.x_is_fp8 ? double{from_fp8(in.x_fp8[i])} * scale : from_bf16(in.x[i]);
      out.value[i] += from_bf16(in.shared[i]) + in.identity[token] * x;
    }
    out.error[i] += kHalfBf16 * (std::abs(out.value[i]) + out.error[i]);
  }
  return out;
}

inline Truth truth_of(const Setup& setup, const Inputs& in) {
  const Problem& p = setup.p;
  const bool is_block = p.format == Format::kBlock;
  const Values values;
  Truth truth;
  sort_pairs(setup, in, &truth);
  if (setup.x_is_fp8) {
    truth.x = {in.x_fp8, is_block ? in.x_scale : Floats(in.x_scale.size(), in.input_scale[0])};
  } else if (p.format != Format::kBf16) {
    Floats row(p.hidden);
    for (int token = 0; token < p.tokens; ++token) {
      for (int i = 0; i < p.hidden; ++i) row[i] = from_bf16(in.x[size_t(token) * p.hidden + i]);
      quantize_row(row.data(), p.hidden, is_block ? nullptr : in.input_scale.data(), &truth.x);
    }
  }
  for (size_t row = 0; row < truth.row_token.size(); ++row) {
    multiply_row(setup, in, values.of, static_cast<int>(row), &truth);
  }
  truth.out = weighted_sums(setup, in, truth, outputs_of(setup, in, truth, truth.act)).value;
  return truth;
}

}  // namespace jax_hpc::tests
