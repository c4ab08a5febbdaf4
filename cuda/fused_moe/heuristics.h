// How a layer of experts is cut.
#pragma once

#include <algorithm>
#include <cmath>

#include "fused_moe/config.h"
#include "fused_moe/stage.h"
#include "fused_moe/wide_shape.h"

namespace jax_hpc::fused_moe {

// Rows of a tile: enough for most experts of a uniform routing (mean and two deviations), for a
// second tile reads the expert's weights again.
//
// Measured on an H200, gate-up / the whole call in us, 4096 hidden values, 8 choices, cold weights:
//
//   experts x columns, scales      T    tiles of 64   64, two warpgroups   128, two warpgroups
//   192 x 192, per tensor       1024      115 /  194           119 / 199                     -
//   24 x 1536, per tensor        128       94 /  135            99 / 137                     -
//                                256      164 /  252                   -             151 / 198
//                               1024      517 /  734                   -             434 / 595
//   24 x 1536, in blocks         128      144 /  191           126 / 181                     -
//                                256      254 /  358           216 / 330             197 / 278
//                               1024      738 / 1138          641 / 1005             561 / 840
//
// There, sums of tiles of 64 had 32 values and those of 128 had 64 (gate_up.cuh). Of blocks tiles
// of 64 have 64 since, and one warpgroup takes 114 / 171 for T = 128 (tiles of 32 take 143 / 219,
// of 128 178 / 245); tiles of 128 have sums of 128 values, and take 181 / 258 and 515 / 778 in
// blocks, 145 / 192 and 418 / 578 per tensor. Tiles of 64 per tensor have sums of 64 values since
// too, and three CTAs on an SM: 84 / 165 for T = 1024 (the first line).
inline int choose_tile_rows(const Problem& p) {
  const double mean = mean_rows(p);
  for (const int rows : {8, 16, 32, 64}) {
    const double spare = rows - 1 - mean;
    if (spare > 0 && spare * spare >= 4 * mean) return rows;
  }
  return 128;
}

// The wide products with tiles of `rows` rows.
inline Config wide_config(int rows) {
  return {.tile_rows = rows, .gate_up_pieces = 1, .is_wide = true};
}
constexpr bool can_be_wide(const Problem& p) {
  return p.format != Format::kBlock || p.block_rows == kBlock;
}

// Of bf16: the fewest tiles of up to 256 rows that most experts of a uniform routing fit into, and
// the lowest of these. Fewer tiles read fewer weights, and lower ones differ less in rows.
inline int wide_bf16_rows(double mean) {
  const double most = mean + 2 * std::sqrt(mean);
  const double tiles = std::ceil(most / kWideMostBf16Rows);
  for (const int rows : {128, 192}) {
    if (tiles * rows >= most) return rows;
  }
  return kWideMostBf16Rows;
}

// Rows of a tile of the wide products, 0 where the others are faster.
//
// Measured on an H200, the whole call in us, 24 experts x 1536, 4096 hidden values, 8 choices, cold
// weights:
//
//                    per tensor             in blocks                     bf16
//      T     mean    others    wide     others    wide   rows   others    wide   rows
//     32       11       110     116        118     125    128        -       -      -
//     64       21       111     115        123     125    128      215     221    128
//     96       32       158     117        179     127    128        -       -      -
//    128       43       146     122        174     129    128      249     258    128
//    256       85       197     149        269     172    128      317     305    128
//    512      171       374     207        499     233    192        -       -    256
//   1024      341       578     367        778     422    192      766     673    192
//
// Tiles of 32 rows take as long as the weights take, and are kept; of fp8, tiles of 64 take longer.
// Of bf16 16 experts x 1536 take 147 / 149 for a mean of 16, 155 / 153 for 32, 196 / 168 for 64 and
// 302 / 208 for 128.
//
// With 192 columns a down product has two stages. Per tensor, 192 or 128 experts: others / wide,
// tiles of 128 / of 192, for a mean of 43 180 / 192 / 200, of 64 180 / 153 / 153, of 85 311 / 278,
// of 341 990 / 830 / 773. Of bf16 no faster for any, in blocks not measured.
inline int choose_wide_rows(const Problem& p, int num_sms) {
  constexpr int kMostOfOthers = 32;  // rows of a tile, of fp8
  constexpr double kLeastOfBf16 = 45;
  constexpr int kLeastColumns = 192;
  constexpr int kManyColumns = 256;
  constexpr double kLeastOfFewColumns = 56;
  constexpr int kTaskColumns = kWideWeightRows / 2;  // beside as many rows of up
  const double mean = mean_rows(p);
  const bool is_bf16 = p.format == Format::kBf16;
  const bool is_many = is_bf16 ? mean >= kLeastOfBf16 : choose_tile_rows(p) > kMostOfOthers;
  const int64_t tasks = int64_t{p.experts} * blocks_of(p.inter, kTaskColumns);
  if (!can_be_wide(p) || p.inter < kLeastColumns || !is_many || tasks < num_sms) return 0;
  const bool has_few_columns = p.inter < kManyColumns;
  if (has_few_columns && (p.format != Format::kTensor || mean < kLeastOfFewColumns)) return 0;
  if (is_bf16) return wide_bf16_rows(mean);
  const double spare = 128 - 1 - mean;
  return spare > 0 && spare * spare >= 4 * mean ? 128 : kWideMostRows;
}

// Pairs whose expert lives on this rank, as far as the sizes tell.
inline int64_t own_pairs(const Problem& p) {
  const int sharing = sharing_experts(p);
  return (num_pairs(p) * p.experts + sharing - 1) / sharing;
}

inline Config choose_products(const Problem& p, int num_sms) {
  constexpr int kTaskColumns = kWeightRows / 2;
  const int wide_rows = choose_wide_rows(p, num_sms);
  if (wide_rows > 0) return wide_config(wide_rows);
  Config config{.tile_rows = choose_tile_rows(p), .gate_up_pieces = 1};
  const int64_t busy_experts = std::min<int64_t>(own_pairs(p), p.experts);
  const int64_t tasks = busy_experts * blocks_of(p.inter, kTaskColumns);
  const bool has_pieces = config.tile_rows == 8 && p.format != Format::kBlock &&
                          p.hidden * value_bytes(p.format) % kStageRow == 0;
  if (has_pieces && tasks < num_sms) config.gate_up_pieces = 4;
  return config;
}

inline int64_t outputs_bytes(const Problem& p) {
  return own_pairs(p) * p.hidden * output_bytes(p.format);
}

// Slices of 32 MiB at most, and four at least, so that the L2 cache, of 50 MB, keeps what down
// writes of one until the reduction has read it: of 67 MB two slices gain little. One where a unit
// of all rows is more than that, and below 64 MiB, where slices gain nothing (192 x 192, per
// tensor, T = 512: 127 one, 128 two).
//
// Measured on an H200, the whole call in us, 4096 hidden values, 8 choices, cold weights, one slice
// / as chosen here:
//
//   experts x columns, scales      T     outputs   one    some
//   192 x 192, bf16              512       67 MB   264     258
//                               1024      134      326     311
//                               2048      268      467     444
//   128 x 192, bf16              512       67      195     188
//                               1024      134      270     258
//                               2048      268      462     440
//   192 x 192, per tensor       1024       67      164     161
//   192 x 192, in blocks        1024       67      205     208, so one
//
// The wide products have one CTA on an SM, and a slice has too few tasks to be shared among them.
inline int choose_output_slices(const Problem& p, const Config& c) {
  constexpr int64_t kMostKept = int64_t{32} << 20;
  constexpr int64_t kLeastCut = int64_t{64} << 20;
  constexpr int kFewest = 4;
  if (c.is_wide || p.format == Format::kBlock || outputs_bytes(p) < kLeastCut) return 1;
  const int units = blocks_of(p.hidden, kSliceUnit);
  const auto most_units = static_cast<int>(
      kMostKept / (own_pairs(p) * kSliceUnit * output_bytes(p.format)));  // of a slice
  if (most_units == 0) return 1;
  const int slices = std::max(std::min(units, kFewest), blocks_of(units, most_units));
  return blocks_of(units, blocks_of(units, slices));  // none of which is empty
}

inline Config choose(const Problem& p, int num_sms) {
  constexpr int64_t kLeastDiscarded = int64_t{8} << 20;  // bytes; fewer are written back in no time
  Config config = choose_products(p, num_sms);
  config.output_slices = choose_output_slices(p, config);
  config.discards_outputs = outputs_bytes(p) >= kLeastDiscarded;
  return config;
}

}  // namespace jax_hpc::fused_moe
