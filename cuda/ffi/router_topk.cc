// XLA's call of router_topk: router_gemm, then route_topk on its logits, in one stream.
#include "ffi/route_topk.h"
#include "router_gemm/heuristics.h"
#include "router_gemm/launch.h"

namespace ffi = xla::ffi;
namespace gemm = jax_hpc::router_gemm;
namespace topk = jax_hpc::route_topk;

namespace {

using Matrix = ffi::Buffer<ffi::BF16, 2>;
using Parts = ffi::Buffer<ffi::BF16, 3>;
using Logits = ffi::Buffer<ffi::F32, 2>;

ffi::Error run(cudaStream_t stream, int32_t device, Matrix x, Parts parts,
               std::optional<topk::Bias> bias, ffi::Result<topk::Ids> ids,
               ffi::Result<topk::Weights> weights,
               ffi::Result<topk::IdentityWeight> identity_weight, ffi::Result<Logits> logits,
               topk::Options options, bool pdl) {
  const auto tokens = x.dimensions()[0];
  const auto hidden = x.dimensions()[1];
  const auto terms = parts.dimensions()[0];
  const auto experts = parts.dimensions()[1];
  if (parts.dimensions()[2] != hidden || logits->dimensions()[0] != tokens ||
      logits->dimensions()[1] != experts || terms < 1 || terms > 3) {
    return ffi::Error::InvalidArgument(
        "router_topk: shapes must be x [T, H], parts [1 to 3, E, H], logits [T, E]");
  }
  ffi::Error misaligned =
      jax_hpc::check_aligned("router_topk", {{"x", x.untyped_data()},
                                             {"parts", parts.untyped_data()},
                                             {"logits", logits->untyped_data()}});
  if (misaligned.failure()) return misaligned;
  const gemm::Problem problem{static_cast<int>(tokens), static_cast<int>(hidden),
                              static_cast<int>(experts), static_cast<int>(terms)};
  int num_sms = 0;
  cudaError_t status = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess) {
    status = gemm::launch(problem, gemm::choose(problem, num_sms), x.typed_data(),
                          parts.typed_data(), logits->typed_data(), stream);
  }
  if (status != cudaSuccess) return jax_hpc::to_error("router_topk", status);
  return topk::run("router_topk", stream, options, tokens, experts, logits->typed_data(), bias, ids,
                   weights, identity_weight, pdl);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(router_topk, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<Matrix>()
                                  .Arg<Parts>()
                                  .OptionalArg<topk::Bias>()
                                  .Ret<topk::Ids>()
                                  .Ret<topk::Weights>()
                                  .Ret<topk::IdentityWeight>()
                                  .Ret<Logits>()
                                  .Attr<topk::Options>("options")
                                  .Attr<bool>("pdl"),
                              {ffi::Traits::kCmdBufferCompatible});
