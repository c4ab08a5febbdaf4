// XLA's call of route_topk: checks the buffers and launches.
#include "ffi/route_topk.h"

namespace ffi = xla::ffi;
namespace topk = jax_hpc::route_topk;

namespace {

using Logits = ffi::Buffer<ffi::F32, 2>;

ffi::Error run(cudaStream_t stream, Logits logits, std::optional<topk::Bias> bias,
               ffi::Result<topk::Ids> ids, ffi::Result<topk::Weights> weights,
               ffi::Result<topk::IdentityWeight> identity_weight, topk::Options options) {
  const auto tokens = logits.dimensions()[0];
  const auto experts = logits.dimensions()[1];
  return topk::run("route_topk", stream, options, tokens, experts, logits.typed_data(), bias, ids,
                   weights, identity_weight, false);
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
