// XLA's call of route_topk: checks the buffers and launches.
#include "ffi/route_topk.h"

namespace ffi = xla::ffi;
namespace topk = jax_hpc::route_topk;

namespace {

using Logits = ffi::BufferR2<ffi::F32>;

ffi::Error run(cudaStream_t stream, Logits logits, std::optional<topk::Bias> bias,
               ffi::Result<topk::Ids> ids, ffi::Result<topk::Weights> weights,
               ffi::Result<topk::IdentityWeight> identity_weight, topk::Options options) {
  const topk::Buffers buffers{bias, ids, weights, identity_weight};
  topk::Problem problem{};
  ffi::Error wrong = topk::check("route_topk", logits.dimensions()[0], logits.dimensions()[1],
                                 options, buffers, &problem);
  if (wrong.failure()) return wrong;
  return jax_hpc::to_error("route_topk",
                           topk::run(problem, logits.typed_data(), buffers, false, stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(route_topk, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Logits>()
                                  .OptionalArg<topk::Bias>()
                                  .Ret<topk::Ids>()
                                  .Ret<topk::Weights>()
                                  .Ret<topk::IdentityWeight>()
                                  .Attr<topk::Options>("options"),
                              {ffi::Traits::kCmdBufferCompatible});
