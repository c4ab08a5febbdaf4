// XLA's call of fused_moe: checks the buffers and launches the chain.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "ffi/buffer_reader.h"
#include "ffi/status.h"
#include "fused_moe/heuristics.h"
#include "fused_moe/launch.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
namespace moe = jax_hpc::fused_moe;

namespace {

// As jax_hpc/ops/fused_moe/primitive.py gives them. Which optional operands there are, in this
// order after the scales of the weights.
struct Options {
  int32_t block_rows;    // 0: a scale per matrix, or of bf16 none
  int32_t chosen_among;  // experts of all ranks; 0: those of the call
  bool has_x_scale;
  bool has_shared_output;
  bool has_identity_weight;
  bool pdl;
};

}  // namespace

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::Options, ffi::StructMember<int32_t>("block_rows"),
                                      ffi::StructMember<int32_t>("chosen_among"),
                                      ffi::StructMember<bool>("has_x_scale"),
                                      ffi::StructMember<bool>("has_shared_output"),
                                      ffi::StructMember<bool>("has_identity_weight"),
                                      ffi::StructMember<bool>("pdl"));

namespace {

using Ids = ffi::BufferR2<ffi::S32>;
using TopkWeights = ffi::BufferR2<ffi::F32>;
using Offset = ffi::BufferR0<ffi::S32>;
using Output = ffi::Result<ffi::BufferR2<ffi::BF16>>;

class Optional : public jax_hpc::BufferReader {
 public:
  using BufferReader::BufferReader;

  const float* floats(int64_t count) {
    return static_cast<const float*>(argument(ffi::F32, count));
  }
  // A single value, or `count` of them.
  const float* one_or(int64_t count, int* stride) {
    const MaybeBuffer buffer = next_argument();
    const bool is_one = buffer.has_value() && buffer->dimensions().size() == 0;
    *stride = is_one ? 0 : 1;
    return static_cast<const float*>(fitting(buffer, ffi::F32, is_one ? 1 : count));
  }
  int* integers(int64_t count) { return static_cast<int*>(result(ffi::S32, count)); }
  float* float_result(int64_t count) { return static_cast<float*>(result(ffi::F32, count)); }
};

ffi::Error refuse(const char* what) {
  return ffi::Error::InvalidArgument(std::string("fused_moe: ") + what);
}

moe::Format format_of(ffi::DataType weights, const Options& options) {
  if (weights == ffi::BF16) return moe::Format::kBf16;
  return options.block_rows > 0 ? moe::Format::kBlock : moe::Format::kTensor;
}

// Of x beside weights of some type.
bool types_fit(ffi::DataType x, ffi::DataType gate_up, ffi::DataType down, const Options& options) {
  if (gate_up != down) return false;
  if (down == ffi::BF16) return x == ffi::BF16 && options.block_rows == 0;
  return down == ffi::F8E4M3FN && (x == ffi::BF16 || x == ffi::F8E4M3FN);
}

// Sizes, as far as the buffers of fixed place tell them.
moe::Problem problem_of(ffi::AnyBuffer x, Ids ids, ffi::AnyBuffer down, const Options& options) {
  moe::Problem p{};
  p.tokens = static_cast<int>(x.dimensions()[0]);
  p.hidden = static_cast<int>(x.dimensions()[1]);
  p.top_k = static_cast<int>(ids.dimensions()[1]);
  p.experts = static_cast<int>(down.dimensions()[0]);
  p.inter = static_cast<int>(down.dimensions()[2]);
  p.format = format_of(down.element_type(), options);
  p.block_rows = options.block_rows;
  p.chosen_among = options.chosen_among;
  return p;
}

moe::Weights take_weights(const moe::Problem& p, Optional& take) {
  moe::Weights w{};
  if (p.format == moe::Format::kBf16) return w;
  if (p.format == moe::Format::kBlock) {
    const int64_t blocks = int64_t{p.experts} * moe::blocks_of(p.hidden, moe::kBlock) *
                           moe::blocks_of(p.inter, p.block_rows);
    w.gate_up_block_scale = take.floats(2 * blocks);
    w.down_block_scale = take.floats(blocks);
    return w;
  }
  w.gate_scale = take.floats(p.experts);
  w.up_scale = take.floats(p.experts);
  w.down_scale = take.floats(p.experts);
  w.input_scale = take.floats(1);
  w.act_scale = take.one_or(p.experts, &w.act_scale_stride);
  return w;
}

// In the order of _workspaces in primitive.py; what a case has no use for is not there.
moe::Workspace take_workspace(const moe::Problem& p, bool quantizes, Optional& take) {
  const bool is_block = p.format == moe::Format::kBlock;
  const int64_t pairs = moe::num_pairs(p);
  moe::Workspace w{};
  w.header = take.integers(4);
  w.tiles = reinterpret_cast<moe::Tile*>(take.integers(4 * moe::tile_capacity(p)));
  w.row_token = take.integers(pairs);
  w.pair_row = take.integers(pairs);
  w.counts = static_cast<uint32_t*>(take.result(ffi::U32, moe::num_counts(p)));
  if (quantizes) {
    w.x = take.result(ffi::F8E4M3FN, int64_t{p.tokens} * p.hidden);
    if (is_block) {
      w.x_scale = take.float_result(int64_t{p.tokens} * moe::blocks_of(p.hidden, moe::kBlock));
    }
  }
  const bool is_bf16 = p.format == moe::Format::kBf16;
  w.rows.act = take.result(is_bf16 ? ffi::BF16 : ffi::F8E4M3FN, pairs * p.inter);
  if (is_block) w.rows.act_scale = take.float_result(pairs * moe::blocks_of(p.inter, moe::kBlock));
  w.rows.outputs = take.result(ffi::BF16, moe::num_outputs(p));
  if (is_block) {
    w.rows.arrivals = static_cast<uint32_t*>(take.result(ffi::U32, moe::num_arrivals(p)));
  }
  return w;
}

ffi::Error run(cudaStream_t stream, int32_t device, ffi::AnyBuffer x, Ids ids, TopkWeights weights,
               ffi::AnyBuffer gate_up, ffi::AnyBuffer down, Offset offset,
               ffi::RemainingArgs arguments, Output out, ffi::RemainingRets results,
               Options options) {
  const bool x_is_fp8 = x.element_type() == ffi::F8E4M3FN;
  if (x.dimensions().size() != 2 || down.dimensions().size() != 3 ||
      !types_fit(x.element_type(), gate_up.element_type(), down.element_type(), options)) {
    return refuse(
        "gate_up [E, 2, I, H] and down [E, H, I] must be bf16 with x in bf16, or f8e4m3fn with x "
        "in bf16 or f8e4m3fn");
  }
  const moe::Problem p = problem_of(x, ids, down, options);
  const int64_t matrices = int64_t{p.experts} * p.hidden * p.inter;
  if (ids.dimensions()[0] != p.tokens || weights.dimensions() != ids.dimensions() ||
      static_cast<int64_t>(down.element_count()) != matrices ||
      static_cast<int64_t>(gate_up.element_count()) != 2 * matrices ||
      out->dimensions() != x.dimensions()) {
    return refuse(
        "shapes must be x, out [T, H], topk_ids, topk_weights [T, K], gate_up [E, 2, I, H], down "
        "[E, H, I]");
  }
  // Before the sizes of workspaces, which divide by some of these.
  if (!moe::is_supported(p)) {
    return refuse(
        "T, K, E, H and I must be 1 or more, H and I multiples of 16, E at most 512, K at most "
        "128, T * K at most 2^24, T * ceil(H / 128) at most 2^30, and block_rows 0, 64 or 128");
  }
  Optional take(arguments, results);
  moe::Arrays a{};
  a.x = x.untyped_data();
  a.x_is_fp8 = x_is_fp8;
  a.topk_ids = ids.typed_data();
  a.topk_weights = weights.typed_data();
  a.expert_offset = offset.typed_data();
  a.out = out->untyped_data();
  a.weights = take_weights(p, take);
  a.weights.gate_up = gate_up.untyped_data();
  a.weights.down = down.untyped_data();
  const int64_t groups = int64_t{p.tokens} * moe::blocks_of(p.hidden, moe::kBlock);
  if (options.has_x_scale) a.x_scale = take.floats(groups);
  if (options.has_shared_output) {
    a.shared_output = take.argument(ffi::BF16, int64_t{p.tokens} * p.hidden);
  }
  if (options.has_identity_weight) a.identity_weight = take.floats(p.tokens);
  a.workspace = take_workspace(p, moe::quantizes_x(p.format, x_is_fp8), take);
  const bool needs_x_scale = x_is_fp8 && p.format == moe::Format::kBlock;
  if (!take.fit() || options.has_x_scale != needs_x_scale) {
    return refuse("the scales, optional operands or workspaces do not fit the attributes");
  }
  const ffi::Error unaligned =
      jax_hpc::check_aligned("fused_moe", {{"x", a.x},
                                           {"experts.gate_up", a.weights.gate_up},
                                           {"experts.down", a.weights.down},
                                           {"shared_output", a.shared_output},
                                           {"out", a.out}});
  if (unaligned.failure()) return unaligned;
  int num_sms = 0;
  cudaError_t status = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess) {
    status = moe::launch(p, moe::choose(p, num_sms), a, options.pdl, num_sms, stream);
  }
  return jax_hpc::to_error("fused_moe", status);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(fused_moe, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Ids>()
                                  .Arg<TopkWeights>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Offset>()
                                  .RemainingArgs()
                                  .Ret<ffi::BufferR2<ffi::BF16>>()
                                  .RemainingRets()
                                  .Attr<Options>("options"),
                              {ffi::Traits::kCmdBufferCompatible});
