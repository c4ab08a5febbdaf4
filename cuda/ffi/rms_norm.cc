// XLA's call of rms_norm: checks the buffers and launches.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "ffi/buffer_reader.h"
#include "ffi/status.h"
#include "rms_norm/heuristics.h"
#include "rms_norm/launch.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
namespace norm = jax_hpc::rms_norm;

namespace {

// Which optional operands there are, in this order after the others.
struct Given {
  bool residual;
  bool out_scale;
};

}  // namespace

// As jax_hpc/ops/rms_norm/primitive.py gives them.
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::Given, StructMember<bool>("residual"),
                                      StructMember<bool>("out_scale"));

namespace {

using Rows = ffi::BufferR2<ffi::BF16>;

ffi::Error refuse(const char* what) {
  return ffi::Error::InvalidArgument(std::string("rms_norm: ") + what);
}

ffi::Error run(cudaStream_t stream, Rows x, ffi::AnyBuffer weight, ffi::RemainingArgs arguments,
               ffi::RemainingRets results, float eps, Given given) {
  const int64_t tokens = x.dimensions()[0];
  const int64_t hidden = x.dimensions()[1];
  if (hidden % norm::kChunk != 0 || hidden > norm::kMostHidden || tokens > INT32_MAX) {
    return refuse(
        "x [T, H] must have an H that is a multiple of 8 and at most 16384, and a T below 2^31");
  }
  const bool is_bf16 = weight.element_type() == ffi::BF16;
  if ((!is_bf16 && weight.element_type() != ffi::F32) || weight.dimensions().size() != 1 ||
      weight.dimensions()[0] != hidden) {
    return refuse("weight must be [H] in bf16 or f32");
  }
  const norm::Problem problem{static_cast<int>(tokens),
                              static_cast<int>(hidden),
                              eps,
                              is_bf16 ? norm::Weight::kBf16 : norm::Weight::kFloat,
                              given.residual,
                              given.out_scale};
  jax_hpc::BufferReader take(arguments, results);
  const int64_t count = tokens * hidden;
  norm::Arrays a{};
  a.x = x.untyped_data();
  a.weight = weight.untyped_data();
  if (given.residual) a.residual = take.argument(ffi::BF16, count);
  if (given.out_scale) a.out_scale = static_cast<const float*>(take.argument(ffi::F32, 1));
  a.y = take.result(given.out_scale ? ffi::F8E4M3FN : ffi::BF16, count);
  if (given.residual) a.sum = take.result(ffi::BF16, count);
  if (!take.fit()) {
    return refuse("the optional operands or the results do not fit the attributes");
  }
  const ffi::Error unaligned = jax_hpc::check_aligned(
      "rms_norm",
      {{"x", a.x}, {"weight", a.weight}, {"residual", a.residual}, {"y", a.y}, {"sum", a.sum}});
  if (unaligned.failure()) return unaligned;
  return jax_hpc::to_error("rms_norm", norm::launch(problem, norm::choose(), a, stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(rms_norm, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Rows>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<float>("eps")
                                  .Attr<Given>("given"),
                              {ffi::Traits::kCmdBufferCompatible});
