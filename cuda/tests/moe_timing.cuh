// Times of a layer of experts by stage, on cold weights.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "fused_moe/gemm.h"
#include "fused_moe/heuristics.h"
#include "fused_moe/launch.h"
#include "tests/support.cuh"

namespace jax_hpc::tests {

// e4m3 of moderate size, never NaN.
static __global__ void fill_weights(uint8_t* values, size_t size, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < size;
       i += size_t{gridDim.x} * blockDim.x) {
    const uint32_t random = mix(static_cast<uint32_t>(i) + mix(seed));
    values[i] = static_cast<uint8_t>((random & 0x87) | ((3 + (random >> 8) % 4) << 3));
  }
}

// bf16 of the same magnitudes.
static __global__ void fill_bf16_weights(__nv_bfloat16* values, size_t size, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < size;
       i += size_t{gridDim.x} * blockDim.x) {
    const uint32_t random = mix(static_cast<uint32_t>(i) + mix(seed));
    const auto bits = (random & 0x807f) | ((123 + (random >> 16) % 4) << 7);
    values[i] = __ushort_as_bfloat16(static_cast<uint16_t>(bits));
  }
}

struct Layer {
  const char* name;
  fused_moe::Problem p;
};

// One shape: a few sets of weights, and more routings in turn.
class LayerTiming {
 public:
  LayerTiming(const fused_moe::Problem& p, int sms)
      : p_(p),
        sms_(sms),
        config_(fused_moe::choose(p, sms)),
        x_(kCalls * size_t(p.tokens) * p.hidden),
        quantized_(size_t(p.tokens) * p.hidden),
        act_(num_pairs(p) * p.inter * value_bytes(p.format)),
        outputs_(fused_moe::num_outputs(p)),
        out_(size_t(p.tokens) * p.hidden),
        scales_(std::vector<float>(scale_count(), 1e-3f)),
        x_scale_(size_t(p.tokens) * fused_moe::blocks_of(p.hidden, fused_moe::kBlock)),
        act_scale_(num_pairs(p) * fused_moe::blocks_of(p.inter, fused_moe::kBlock)),
        ids_(make_ids()),
        offset_(std::vector<int>{0}),
        index_(8 + 4 * fused_moe::tile_capacity(p) + 2 * num_pairs(p) + 64),
        counts_(fused_moe::num_counts(p) + 1),
        arrivals_(fused_moe::num_arrivals(p) + 1),
        topk_weights_(std::vector<float>(num_pairs(p), 0.125f)) {
    fill_normal<<<256, 256>>>(x_.data(), x_.size(), 1, false);
    for (int set = 0; set < kSets; ++set) {
      weights_.push_back(std::make_unique<DeviceArray<uint8_t>>(3 * matrix_bytes()));
      uint8_t* weights = weights_.back()->data();
      if (p.format == fused_moe::Format::kBf16) {
        fill_bf16_weights<<<1024, 256>>>(reinterpret_cast<__nv_bfloat16*>(weights), 3 * matrix(),
                                         7u + set);
      } else {
        fill_weights<<<1024, 256>>>(weights, 3 * matrix(), 7u + set);
      }
    }
    require(cudaDeviceSynchronize(), "filling");
  }

  // Of the first `stages` of four. Without reductions the slices of down follow each other.
  double microseconds(int stages, bool overlaps) {
    return time_in_graph(kCalls, [&](int call, cudaStream_t stream) {
      const fused_moe::Arrays a = arrays(call);
      const fused_moe::Workspace& w = a.workspace;
      const fused_moe::Index index{w.tiles, w.header, w.row_token, a.topk_ids, a.expert_offset};
      cudaError_t status = launch_prepare(p_, config_, a, overlaps, stream);
      if (status == cudaSuccess && stages > 1) {
        status = launch_gate_up(p_, config_, index, prepared_rows(p_, config_, a), a.weights,
                                w.rows, overlaps, sms_, stream);
      }
      const int slices = stages > 2 ? config_.output_slices : 0;
      for (int i = 0; status == cudaSuccess && i < slices; ++i) {
        const fused_moe::Slice slice = slice_of(p_, config_, i);
        status = launch_down(p_, config_, index, a.weights, w.rows, slice, overlaps, sms_, stream);
        if (status == cudaSuccess && stages > 3) {
          status = launch_reduce(p_, config_, a, slice, overlaps, stream);
        }
      }
      return status;
    });
  }
  const fused_moe::Config& config() const { return config_; }
  // Weights of the experts that a call meets, once, on average.
  double bytes() const {
    return active_ * 3.0 * p_.hidden * p_.inter * fused_moe::value_bytes(p_.format);
  }
  double flops() const { return 6.0 * num_pairs(p_) * p_.hidden * p_.inter; }

 private:
  static constexpr int kCalls = 24;
  static constexpr int kSets = 3;

  size_t matrix() const { return size_t(p_.experts) * p_.hidden * p_.inter; }
  size_t matrix_bytes() const { return matrix() * fused_moe::value_bytes(p_.format); }
  size_t scale_count() const {
    const size_t blocks = matrix() / (64 * 128) + 2 * p_.experts;
    return 4 * blocks + 64;
  }
  // Uniform without replacement, as the baselines are routed.
  std::vector<int> make_ids() {
    std::mt19937 random(5);
    std::vector<int> order(p_.experts);
    std::iota(order.begin(), order.end(), 0);
    std::vector<int> ids;
    active_ = 0;
    for (int call = 0; call < kCalls; ++call) {
      std::vector<bool> is_hit(p_.experts);
      for (int token = 0; token < p_.tokens; ++token) {
        for (int k = 0; k < p_.top_k; ++k) {
          std::swap(order[k], order[k + random() % (p_.experts - k)]);
          ids.push_back(order[k]);
          is_hit[order[k]] = true;
        }
      }
      active_ += static_cast<double>(std::count(is_hit.begin(), is_hit.end(), true)) / kCalls;
    }
    return ids;
  }
  fused_moe::Arrays arrays(int call) const {
    const int64_t pairs = num_pairs(p_);
    int* rows = index_.data() + 8 + 4 * fused_moe::tile_capacity(p_);
    int* pair_row = rows + (pairs + 3) / 4 * 4;
    const float* scale = scales_.data();
    const uint8_t* weights = weights_[call % kSets]->data();
    fused_moe::Arrays a{};
    a.x = x_.data() + call * out_.size();
    a.topk_ids = ids_.data() + call * pairs;
    a.topk_weights = topk_weights_.data();
    a.expert_offset = offset_.data();
    a.out = out_.data();
    a.weights = {
        weights, weights + 2 * matrix_bytes(), scale, scale, scale, scale, scale, scale, scale, 1};
    a.workspace = {index_.data(),
                   reinterpret_cast<fused_moe::Tile*>(index_.data() + 8),
                   rows,
                   pair_row,
                   counts_.data(),
                   quantized_.data(),
                   x_scale_.data(),
                   {act_.data(), act_scale_.data(), outputs_.data(), arrivals_.data()}};
    return a;
  }

  fused_moe::Problem p_;
  int sms_;
  fused_moe::Config config_;
  double active_ = 0;
  DeviceArray<__nv_bfloat16> x_;
  DeviceArray<uint8_t> quantized_, act_;
  DeviceArray<__nv_bfloat16> outputs_, out_;
  DeviceArray<float> scales_, x_scale_, act_scale_;
  DeviceArray<int> ids_, offset_, index_;
  DeviceArray<uint32_t> counts_, arrivals_;
  DeviceArray<float> topk_weights_;
  std::vector<std::unique_ptr<DeviceArray<uint8_t>>> weights_;
};

inline void time_layer(const Layer& layer) {
  int sms = 0;
  require(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "device");
  LayerTiming timing(layer.p, sms);
  constexpr const char* kFormats[] = {" tensor", " block", " bf16"};
  std::cout << layer.name << kFormats[static_cast<int>(layer.p.format)] << " T=" << layer.p.tokens
            << ", " << timing.config() << ": floor " << timing.bytes() / 4.3e6 << ", up to";
  constexpr const char* kStages[] = {" prepare ", ", gate-up ", ", down ", ", all "};
  double all = 0;
  for (int stages = 1; stages <= 4; ++stages) {
    all = timing.microseconds(stages, true);
    std::cout << kStages[stages - 1] << all;
  }
  std::cout << " us, " << timing.flops() / all / 1e6 << " TFLOP/s; without overlap "
            << timing.microseconds(4, false) << " us" << std::endl;
}

inline void time_layers(fused_moe::Format format, const std::vector<int>& tokens) {
  using fused_moe::Format;
  const bool is_block = format == Format::kBlock;
  for (const int count : tokens) {
    time_layer({"hy3-tp8", {count, 8, 192, 4096, 192, format, is_block ? 64 : 0}});
    time_layer({"hy3-ep8", {count, 8, 24, 4096, 1536, format, is_block ? 128 : 0}});
    if (format != Format::kBf16) continue;
    time_layer({"qwen3-tp8", {count, 8, 128, 4096, 192, format, 0}});
    time_layer({"qwen3-ep8", {count, 8, 16, 4096, 1536, format, 0}});
  }
}

}  // namespace jax_hpc::tests
