// XLA's call of router_gemm: checks the buffers, chooses a configuration, launches.
#include "ffi/router_gemm.h"

namespace ffi = xla::ffi;
namespace gemm = jax_hpc::router_gemm;

namespace {

ffi::Error run(cudaStream_t stream, int32_t device, gemm::Matrix x, gemm::Parts parts,
               gemm::Logits logits) {
  gemm::Problem problem{};
  ffi::Error wrong = gemm::check("router_gemm", x, parts, logits, &problem);
  if (wrong.failure()) return wrong;
  return jax_hpc::to_error("router_gemm", gemm::run(problem, device, x, parts, logits, stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(router_gemm, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<gemm::Matrix>()
                                  .Arg<gemm::Parts>()
                                  .Ret<ffi::BufferR2<ffi::F32>>(),
                              {ffi::Traits::kCmdBufferCompatible});
