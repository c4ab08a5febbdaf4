// XLA's call of router_topk: router_gemm, then route_topk on its logits, in one stream. The choice
// may start while the product ends (pdl) and waits for its logits itself.
#include "ffi/route_topk.h"
#include "ffi/router_gemm.h"

namespace ffi = xla::ffi;
namespace gemm = jax_hpc::router_gemm;
namespace topk = jax_hpc::route_topk;

namespace {

ffi::Error run(cudaStream_t stream, int32_t device, gemm::Matrix x, gemm::Parts parts,
               std::optional<topk::Bias> bias, ffi::Result<topk::Ids> ids,
               ffi::Result<topk::Weights> weights,
               ffi::Result<topk::IdentityWeight> identity_weight, gemm::Logits logits,
               topk::Options options, bool pdl) {
  constexpr const char* kName = "router_topk";
  const topk::Buffers buffers{bias, ids, weights, identity_weight};
  gemm::Problem product{};
  ffi::Error wrong = gemm::check(kName, x, parts, logits, &product);
  if (wrong.failure()) return wrong;
  topk::Problem choice{};
  wrong = topk::check(kName, product.tokens, product.experts, options, buffers, &choice);
  if (wrong.failure()) return wrong;
  cudaError_t status = gemm::run(product, device, x, parts, logits, stream);
  if (status == cudaSuccess) {
    status = topk::run(choice, logits->typed_data(), buffers, pdl, stream);
  }
  return jax_hpc::to_error(kName, status);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(router_topk, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<gemm::Matrix>()
                                  .Arg<gemm::Parts>()
                                  .OptionalArg<topk::Bias>()
                                  .Ret<topk::Ids>()
                                  .Ret<topk::Weights>()
                                  .Ret<topk::IdentityWeight>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Attr<topk::Options>("options")
                                  .Attr<bool>("pdl"),
                              {ffi::Traits::kCmdBufferCompatible});
