// A layer of experts without JAX: every stage against float64, and how long each takes on cold
// weights beside the floor.
//
//   fused_moe check           routings, formats, sizes and tile boundaries
//   fused_moe check small     a few of them, for the sanitizer's slower tools
//   fused_moe check races     the same for racecheck: hardly any CTA has a second task, whose
//   stages
//                             a lane frees for all of its warp, which the tool takes for a race
//   fused_moe time [tensor | block | bf16] [T ...]    the baselines' layers, by stage
//
// Built by `make kernel-tests`.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "fused_moe/gemm.h"
#include "fused_moe/heuristics.h"
#include "fused_moe/launch.h"
#include "fused_moe/wide_shape.h"
#include "tests/moe_judge.cuh"
#include "tests/moe_problem.cuh"
#include "tests/moe_timing.cuh"
#include "tests/support.cuh"

namespace {

using namespace jax_hpc::fused_moe;
using namespace jax_hpc::tests;

enum class Extent { kAll, kSmall, kRaces };

constexpr int kSms = 132;
constexpr int kGuard = 64;  // elements behind every array that is written

// Everything that a call writes, on the device with a guard behind it.
struct Device {
  DeviceArray<int> header, tiles, row_token, pair_row;
  DeviceArray<uint32_t> counts, arrivals;
  DeviceArray<uint8_t> x, act;
  DeviceArray<float> x_scale, act_scale;
  DeviceArray<__nv_bfloat16> outputs, out;

  explicit Device(const Problem& p)
      : header(4 + kGuard),
        tiles(4 * tile_capacity(p) + kGuard),
        row_token(num_pairs(p) + kGuard),
        pair_row(num_pairs(p) + kGuard),
        counts(num_counts(p) + kGuard),
        arrivals(num_arrivals(p) + kGuard),
        x(int64_t{p.tokens} * p.hidden + kGuard),
        act(num_pairs(p) * p.inter * value_bytes(p.format) + kGuard),
        x_scale(int64_t{p.tokens} * blocks_of(p.hidden, kBlock) + kGuard),
        act_scale(num_pairs(p) * blocks_of(p.inter, kBlock) + kGuard),
        outputs(num_outputs(p) + kGuard),
        out(int64_t{p.tokens} * p.hidden + kGuard) {}

  template <class Visit>
  void each(const Visit& visit) {
    visit("header", header), visit("tiles", tiles), visit("row_token", row_token);
    visit("pair_row", pair_row), visit("counts", counts), visit("arrivals", arrivals);
    visit("x", x), visit("act", act);
    visit("x_scale", x_scale), visit("act_scale", act_scale), visit("outputs", outputs);
    visit("out", out);
  }
  Workspace workspace() const {
    return {header.data(),    reinterpret_cast<Tile*>(tiles.data()),
            row_token.data(), pair_row.data(),
            counts.data(),    x.data(),
            x_scale.data(),   {act.data(), act_scale.data(), outputs.data(), arrivals.data()}};
  }
};

// All bytes of an array: to compare bits, NaN included.
template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// Names an array that was written behind its end.
std::string overrun(Device& device) {
  std::string name;
  device.each([&](const char* array, const auto& values) {
    const std::string bytes = bytes_of(values.host());
    const size_t guard = kGuard * bytes.size() / values.size();
    const auto is_written = [](char c) { return static_cast<uint8_t>(c) != 0xff; };
    if (std::any_of(bytes.end() - static_cast<std::ptrdiff_t>(guard), bytes.end(), is_written)) {
      name = array;
    }
  });
  return name;
}

std::string index_fault(const Setup& setup, const Config& config, const Truth& truth,
                        const Device& device) {
  const std::vector<int> rows = device.pair_row.host();
  if (!std::equal(truth.pair_row.begin(), truth.pair_row.end(), rows.begin())) return "pair_row";
  const std::vector<int> tokens = device.row_token.host();
  const auto num_rows = static_cast<int>(truth.row_token.size());
  if (!std::equal(truth.row_token.begin(), truth.row_token.end(), tokens.begin())) {
    return "row_token";
  }
  std::vector<int> tiles;
  for (int row = 0; row < num_rows;) {
    const int expert = truth.row_expert[row];
    int end = row;
    while (end < num_rows && truth.row_expert[end] == expert) ++end;
    for (; row < end; row += config.tile_rows) {
      tiles.insert(tiles.end(), {expert, row, std::min(config.tile_rows, end - row), 0});
    }
    row = end;
  }
  const std::vector<int> header = device.header.host();
  if (header[0] != static_cast<int>(tiles.size() / 4) || header[1] != num_rows) return "header";
  const std::vector<int> got = device.tiles.host();
  if (int64_t{header[0]} > max_tiles(setup.p, config)) return "more tiles than max_tiles";
  return std::equal(tiles.begin(), tiles.end(), got.begin()) ? "" : "tiles";
}

// Where the wide products read x, the outputs lie by now.
std::string x_fault(const Setup& setup, const Config& config, const Truth& truth,
                    const Device& device) {
  if (!quantizes_x(setup.p.format, setup.x_is_fp8) || config.is_wide) return "";
  const auto is_nan = [](uint8_t bits) { return (bits & 0x7f) == 0x7f; };
  const Bytes x = device.x.host();
  for (size_t i = 0; i < truth.x.values.size(); ++i) {
    const uint8_t want = truth.x.values[i];
    if (x[i] != want && !(is_nan(x[i]) && is_nan(want))) return "quantised x";
  }
  if (setup.p.format == Format::kTensor) return "";
  const Floats scale = device.x_scale.host();
  for (size_t i = 0; i < truth.x.scale.size(); ++i) {
    if (std::isnan(scale[i]) && std::isnan(truth.x.scale[i])) continue;
    if (scale[i] != truth.x.scale[i]) return "scale of quantised x";
  }
  return "";
}

std::string stage_fault(const Setup& setup, const Config& config, const Inputs& in,
                        const Device& device, Rounded* rounded) {
  const int hidden = setup.p.hidden;
  const Truth truth = truth_of(setup, in);
  std::string fault = index_fault(setup, config, truth, device);
  if (fault.empty()) fault = x_fault(setup, config, truth, device);
  if (!fault.empty()) return fault;
  const Bytes values = device.act.host();
  const Floats scales = device.act_scale.host();
  const Act quantized{values, scales};
  const Doubles act = act_of(setup, in, truth, quantized);
  const size_t otherwise_before = rounded->otherwise;
  fault = act_fault(setup, in, truth, quantized, act, rounded);
  const Sums outputs = outputs_of(setup, in, truth, act);
  const Doubles got = widened_outputs(device.outputs.host(), setup.p.format, outputs.value.size());
  if (fault.empty()) fault = compare("outputs", got, outputs, hidden);
  const Doubles out = widened(device.out.host(), truth.out.size());
  const Sums sums = weighted_sums(setup, in, truth, outputs);
  if (fault.empty()) fault = compare("out", out, sums, hidden);
  if (!fault.empty()) return fault;
  constexpr double kLeastOfOwnAct = 0.9999;  // of what the kernels' own act gives
  const double of_own = cosine(out, sums.value);
  if (of_own < kLeastOfOwnAct) return "cosine " + std::to_string(of_own) + " of its own act";
  // Of the whole, roundings to the other side and all: 1 of 100 values of act, by a step of up to
  // an eighth. Of few values one weighs: of a row of 256, of which one may be a tenth, 0.9994 was
  // seen.
  const bool has_few = truth.row_token.size() * static_cast<size_t>(setup.p.inter) < 4096;
  const double least_of_otherwise = has_few ? 0.998 : 0.9995;
  const double least_of_fp8 = rounded->otherwise > otherwise_before ? least_of_otherwise : 0.9999;
  const double least_cosine = setup.p.format == Format::kBf16 ? 0.99999 : least_of_fp8;
  const double of_truth = cosine(out, truth.out);
  return of_truth >= least_cosine ? "" : "cosine " + std::to_string(of_truth);
}

Config config_of(const Setup& setup) {
  Config config = setup.wide_rows > 0 ? wide_config(setup.wide_rows) : choose(setup.p, kSms);
  if (setup.output_slices > 0) config.output_slices = setup.output_slices;
  return config;
}

void poison(Device& device, const Problem& p) {
  device.each([](const char*, auto& values) { values.poison(); });
  // A tile that nobody wrote names an expert that nothing may be read of.
  require(cudaMemset(device.tiles.data(), 0x3f, sizeof(Tile) * tile_capacity(p)), "cudaMemset");
}

// What is wrong with a layer; empty if nothing is.
std::string fault_of(const Setup& setup, uint32_t seed, Extent extent, Rounded* rounded) {
  const Problem& p = setup.p;
  const Inputs in = make_inputs(setup, seed);
  DeviceArray<__nv_bfloat16> x(in.x), shared(in.shared);
  DeviceArray<uint8_t> x_fp8(in.x_fp8), gate_up(in.gate_up), down(in.down);
  DeviceArray<float> x_scale(in.x_scale), topk_weights(in.topk_weights), identity(in.identity);
  DeviceArray<float> input_scale(in.input_scale), gate_scale(in.gate_scale), up_scale(in.up_scale);
  DeviceArray<float> down_scale(in.down_scale), act_scale(in.act_scale);
  DeviceArray<float> gate_up_blocks(in.gate_up_blocks), down_blocks(in.down_blocks);
  DeviceArray<int> ids(in.ids), offset(std::vector<int>{setup.expert_offset});
  Device device(p);
  Arrays a{};
  a.x = setup.x_is_fp8 ? static_cast<const void*>(x_fp8.data()) : x.data();
  a.x_scale = x_scale.data();
  a.topk_ids = ids.data();
  a.topk_weights = topk_weights.data();
  a.expert_offset = offset.data();
  a.shared_output = setup.has_addends ? shared.data() : nullptr;
  a.identity_weight = setup.has_addends ? identity.data() : nullptr;
  a.out = device.out.data();
  a.weights = {gate_up.data(),     down.data(),
               gate_scale.data(),  up_scale.data(),
               down_scale.data(),  input_scale.data(),
               act_scale.data(),   gate_up_blocks.data(),
               down_blocks.data(), setup.shares_act_scale ? 0 : 1};
  a.workspace = device.workspace();
  a.x_is_fp8 = setup.x_is_fp8;
  Config config = config_of(setup);
  std::string first;
  for (const auto& [overlaps, discards] : {std::pair{false, false}, std::pair{false, true},
                                           std::pair{true, false}, std::pair{true, true}}) {
    config.discards_outputs = discards;  // the first run's are looked at
    poison(device, p);
    require(launch(p, config, a, overlaps, kSms, nullptr), "launch");
    require(cudaDeviceSynchronize(), "kernel");
    std::string fault = overrun(device);
    if (!fault.empty()) return fault + " is written behind its end";
    const std::string bits = bytes_of(device.out.host());
    if (!first.empty() && bits != first) {
      return std::string(overlaps ? "overlap" : "a repeat") + (discards ? " with discards" : "") +
             " differs";
    }
    if (first.empty()) fault = stage_fault(setup, config, in, device, rounded);
    if (!fault.empty()) return fault;
    first = bits;
  }
  // Fewer CTAs, which have several tasks each and fill stages again.
  if (extent == Extent::kRaces) return "";
  for (const int sms : {5, 20, kSms - 2}) {
    poison(device, p);
    require(launch(p, config, a, true, sms, nullptr), "launch");
    require(cudaDeviceSynchronize(), "kernel");
    const std::string fault = overrun(device);
    if (!fault.empty()) return fault + " is written behind its end";
    if (bytes_of(device.out.host()) != first) return std::to_string(sms) + " SMs differ";
  }
  return "";
}

// Token counts at which the height of tiles changes, the last of each and the first of the next.
std::vector<int> tile_boundaries(Problem p, int most) {
  std::vector<int> boundaries;
  for (p.tokens = 1; p.tokens < most; ++p.tokens) {
    Problem next = p;
    ++next.tokens;
    if (choose(p, kSms).tile_rows == choose(next, kSms).tile_rows) continue;
    boundaries.insert(boundaries.end(), {p.tokens, next.tokens});
  }
  return boundaries;
}

// What no kernel takes, and the handler refuses before it divides by a size.
static_assert(is_supported({1, 1, 1, 16, 16, Format::kBf16, 0}));
static_assert(is_supported({1 << 17, 128, 512, 8192, 8192, Format::kBlock, 64}));
static_assert(!is_supported({0, 1, 1, 16, 16, Format::kBf16, 0}));
static_assert(!is_supported({1, 0, 1, 16, 16, Format::kBf16, 0}));
static_assert(!is_supported({1, 1, 0, 16, 16, Format::kBf16, 0}));
static_assert(!is_supported({1, 1, 1, 0, 16, Format::kBf16, 0}));
static_assert(!is_supported({1, 1, 1, 24, 16, Format::kBf16, 0}));
static_assert(!is_supported({1, 1, 1, 16, 8, Format::kBf16, 0}));
static_assert(!is_supported({1, 1, 1, 16, 16, Format::kBlock, 32}));
static_assert(!is_supported({1, 129, 1, 16, 16, Format::kBf16, 0}));
static_assert(!is_supported({1, 1, 513, 16, 16, Format::kBf16, 0}));
static_assert(!is_supported({1 << 18, 128, 1, 16, 16, Format::kBf16, 0}));
static_assert(!is_supported({1 << 24, 1, 1, 8208, 16, Format::kBf16, 0}));

std::vector<Setup> all_setups(Extent extent) {
  std::vector<Setup> setups;
  const auto add = [&](const Problem& p, Routing routing) {
    const auto number = static_cast<uint32_t>(setups.size());
    const bool x_is_fp8 = mix(number) % 4 == 0 && p.format != Format::kBf16;
    setups.push_back({p, routing, x_is_fp8, mix(number + 7) % 3 == 0,
                      mix(number + 5) % 4 == 0 && p.tokens > 1, mix(number + 3) % 3 == 0,
                      number % 2 == 0 ? 0 : 9});
  };
  struct Kind {
    Format format;
    int block_rows;
  };
  const std::vector<Kind> kinds = {
      {Format::kTensor, 0}, {Format::kBlock, 128}, {Format::kBlock, 64}, {Format::kBf16, 0}};
  for (const auto& [format, rows] : kinds) {
    for (const int inter : {16, 48, 192, 256}) {
      for (const int hidden : {16, 144, 512}) {
        add({3, 2, 5, hidden, inter, format, rows}, Routing::kGarbage);
        add({33, 3, 7, hidden, inter, format, rows}, Routing::kUniform);
      }
    }
    for (const Routing routing : {Routing::kUniform, Routing::kSkewed, Routing::kOneExpert,
                                  Routing::kNobody, Routing::kGarbage}) {
      for (const int tokens : {1, 5, 70}) add({tokens, 8, 24, 256, 192, format, rows}, routing);
      add({150, 1, 3, 128, 64, format, rows}, routing);
      add({40, 16, 512, 128, 32, format, rows}, routing);
    }
    for (const int tokens : tile_boundaries({0, 2, 4, 128, 96, format, rows}, 140)) {
      add({tokens, 2, 4, 128, 96, format, rows}, Routing::kUniform);
    }
    add({2, 2, 3, 4096, 1536, format, rows}, Routing::kUniform);
    add({150, 1, 3, 144, 192, format, rows}, Routing::kSkewed);  // tiles of the most rows
    for (const Routing routing : {Routing::kUniform, Routing::kSkewed, Routing::kOneExpert}) {
      const Problem several_tasks{431, 2, 3, 656, 400, format, rows};  // of a cluster
      if (!can_be_wide(several_tasks)) break;
      add(several_tasks, routing);
      add({97, 2, 5, 4096, 320, format, rows}, routing);  // many stages
      add({40, 17, 24, 256, 64, format, rows}, routing);  // many choices, outputs of whole lines
    }
    add({1100, 2, 34, 144, 256, format, rows}, Routing::kUniform);  // enough for the wide products
    // One expert, whose pairs lanes of a warp sort, one CTA, or several.
    for (const int tokens : {1, 60, 3000}) {
      add({tokens, 1, 1, 144, 272, format, rows}, Routing::kUniform);
    }
    // Index by one CTA of many warps, by a cluster, and by the CTAs of segments.
    add({256, 8, 40, 16, 16, format, rows}, Routing::kGarbage);
    add({257, 8, 40, 32, 16, format, rows}, Routing::kSkewed);
    add({1024, 8, 40, 16, 16, format, rows}, Routing::kGarbage);
    add({1025, 8, 40, 32, 16, format, rows}, Routing::kSkewed);
    add({4000, 6, 512, 16, 16, format, rows}, Routing::kGarbage);
    // The most pairs of either, and one more or another token's.
    for (const int most : {kPairsOfOne, kPairsOfCluster}) {
      for (const int more : {0, 1}) {
        add({most + more, 1, 1, 16, 16, format, rows}, Routing::kUniform);
        add({most / 16 + more, 16, 512, 32, 16, format, rows}, Routing::kGarbage);
        add({most / 16 + more, 16, 511, 16, 16, format, rows}, Routing::kSkewed);
        add({most / 7 + more, 7, 33, 16, 16, format, rows}, Routing::kOneExpert);
        add({most / 3 + more, 3, 2, 16, 16, format, rows}, Routing::kNobody);
      }
    }
    // A cluster of which some CTAs have no pair, or no whole round of a warp.
    add({kPairsOfOne / 4 + 9, 4, 300, 144, 16, format, rows}, Routing::kUniform);
    add({467, 5, 24, 272, 32, format, rows}, Routing::kGarbage);
    add({1000, 8, 192, 80, 16, format, rows}, Routing::kSkewed);
  }
  // Slices of the hidden axis, of every product of down; the last one of a few values. Tiles of 16,
  // 64 and 128 rows; outputs whose rows are whole lines, which are discarded, and others.
  std::vector<Setup> sliced;
  for (const Format format : {Format::kTensor, Format::kBf16}) {
    for (const int inter : {192, 208}) {
      for (const int tokens : {6, 60, 700}) {
        for (const int slices : {2, 3}) {
          const Problem p{tokens, 3, 5, slices == 2 ? 1088 : 1040, inter, format, 0};
          sliced.push_back(
              {p, Routing::kUniform, false, slices == 2, slices == 3, false, 0, 0, slices});
        }
      }
    }
  }
  const size_t others = setups.size();
  // The wide products, which most of these are too small to be given, in tiles of two heights.
  constexpr int kLow = 128;
  for (size_t i = 0; i < others; ++i) {
    Setup setup = setups[i];
    if (!can_be_wide(setup.p)) continue;
    setup.wide_rows = i % 2 == 0 ? kLow : wide_most_rows(setup.p.format);
    setups.push_back(setup);
  }
  if (extent == Extent::kAll) {
    setups.insert(setups.end(), sliced.begin(), sliced.end());
    return setups;
  }
  std::vector<Setup> few;
  for (size_t i = 0; i < others; i += 9) {
    if (num_pairs(setups[i].p) < 500) few.push_back(setups[i]);
  }
  for (const Setup& setup : sliced) {
    if (extent == Extent::kSmall && setup.p.tokens == 60) few.push_back(setup);
  }
  // Of the wide products, so many experts that a CTA has several tasks, each of two stages.
  const int experts = extent == Extent::kRaces ? 24 : 256;
  const Problem per_tensor{33, 8, experts, 144, 80, Format::kTensor, 0};
  const Problem in_blocks{33, 8, experts, 144, 80, Format::kBlock, kBlock};
  const Problem in_bf16{33, 8, experts, 80, 80, Format::kBf16, 0};
  few.push_back({per_tensor, Routing::kUniform, false, true, false, false, 9, 192});
  few.push_back({in_blocks, Routing::kUniform, false, true, false, false, 9, 128});
  few.push_back({in_bf16, Routing::kUniform, false, true, false, false, 9, 256});
  return few;
}

// More values on the other side of a rounding would mean worse sums than the tensor cores', which
// put 0.3 % there, 1 % where they sum 128 values.
constexpr double kMostOtherwise = 0.02;

int check(Extent extent) {
  constexpr const char* kRoutings[] = {"uniform", "skewed", "one expert", "nobody", "garbage"};
  int failures = 0;
  Rounded rounded;
  const std::vector<Setup> setups = all_setups(extent);
  for (size_t i = 0; i < setups.size(); ++i) {
    const Setup& setup = setups[i];
    const std::string fault = fault_of(setup, static_cast<uint32_t>(i), extent, &rounded);
    if (fault.empty()) continue;
    ++failures;
    std::cout << setup.p << ", " << kRoutings[static_cast<int>(setup.routing)]
              << (setup.x_is_fp8 ? ", fp8 x" : "") << (setup.has_nan ? ", NaN" : "") << ", "
              << config_of(setup) << ": " << fault << std::endl;
  }
  std::cout << setups.size() - failures << " passed, " << failures << " failed; of " << rounded.all
            << " values of act " << rounded.otherwise << " are rounded to the other side\n";
  const bool rounds_well =
      static_cast<double>(rounded.otherwise) <= kMostOtherwise * static_cast<double>(rounded.all);
  return failures == 0 && rounds_well ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  if (command == "check") {
    const std::string extent = argc > 2 ? argv[2] : "";
    return check(extent == "races"   ? Extent::kRaces
                 : extent == "small" ? Extent::kSmall
                                     : Extent::kAll);
  }
  if (command != "time") {
    std::cerr << "usage: fused_moe check [small | races] | time [tensor | block | bf16] [T ...]\n";
    return 2;
  }
  constexpr std::pair<const char*, Format> kFormats[] = {
      {"tensor", Format::kTensor}, {"block", Format::kBlock}, {"bf16", Format::kBf16}};
  std::vector<int> tokens;
  std::string only;
  for (int i = 2; i < argc; ++i) {
    const int count = std::atoi(argv[i]);
    if (count > 0) {
      tokens.push_back(count);
    } else {
      only = argv[i];
    }
  }
  if (tokens.empty()) tokens = {1, 4, 16, 64, 128};
  for (const auto& [name, format] : kFormats) {
    if (only.empty() || only == name) time_layers(format, tokens);
  }
  return 0;
}
