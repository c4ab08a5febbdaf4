// XLA's call of router_gemm: checks the buffers, chooses a configuration, launches.
#include <cuda_runtime.h>

#include "ffi/status.h"
#include "router_gemm/heuristics.h"
#include "router_gemm/launch.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using Matrix = ffi::Buffer<ffi::BF16, 2>;
using Parts = ffi::Buffer<ffi::BF16, 3>;
using Logits = ffi::Buffer<ffi::F32, 2>;

ffi::Error run(cudaStream_t stream, int32_t device, Matrix x, Parts parts,
               ffi::Result<Logits> logits) {
  const auto tokens = x.dimensions()[0];
  const auto hidden = x.dimensions()[1];
  const auto terms = parts.dimensions()[0];
  const auto experts = parts.dimensions()[1];
  if (parts.dimensions()[2] != hidden || logits->dimensions()[0] != tokens ||
      logits->dimensions()[1] != experts || terms < 1 || terms > 3) {
    return ffi::Error::InvalidArgument(
        "router_gemm: shapes must be x [T, H], parts [1 to 3, E, H], logits [T, E]");
  }
  ffi::Error misaligned =
      jax_hpc::check_aligned("router_gemm", {{"x", x.untyped_data()},
                                             {"parts", parts.untyped_data()},
                                             {"logits", logits->untyped_data()}});
  if (misaligned.failure()) return misaligned;
  const jax_hpc::router_gemm::Problem problem{static_cast<int>(tokens), static_cast<int>(hidden),
                                              static_cast<int>(experts), static_cast<int>(terms)};
  int num_sms = 0;
  cudaError_t status = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess) {
    const auto config = jax_hpc::router_gemm::choose(problem, num_sms);
    status = jax_hpc::router_gemm::launch(problem, config, x.typed_data(), parts.typed_data(),
                                          logits->typed_data(), stream);
  }
  return jax_hpc::to_error("router_gemm", status);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(router_gemm, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<Matrix>()
                                  .Arg<Parts>()
                                  .Ret<Logits>(),
                              {ffi::Traits::kCmdBufferCompatible});
