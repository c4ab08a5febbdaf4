// What the handlers with a router product have in common: its buffers, their checks, its launch.
#pragma once

#include <cuda_runtime.h>

#include "ffi/status.h"
#include "router_gemm/heuristics.h"
#include "router_gemm/launch.h"
#include "xla/ffi/api/ffi.h"

namespace jax_hpc::router_gemm {

using Matrix = xla::ffi::Buffer<xla::ffi::BF16, 2>;
using Parts = xla::ffi::Buffer<xla::ffi::BF16, 3>;
using Logits = xla::ffi::ResultBuffer<xla::ffi::F32, 2>;

// Checks the buffers and describes the product.
inline xla::ffi::Error check(const char* operator_name, Matrix x, Parts parts, Logits logits,
                             Problem* problem) {
  const auto tokens = x.dimensions()[0];
  const auto hidden = x.dimensions()[1];
  const auto terms = parts.dimensions()[0];
  const auto experts = parts.dimensions()[1];
  if (parts.dimensions()[2] != hidden || logits->dimensions()[0] != tokens ||
      logits->dimensions()[1] != experts || terms < 1 || terms > 3) {
    return xla::ffi::Error::InvalidArgument(
        std::string(operator_name) +
        ": shapes must be x [T, H], parts [1 to 3, E, H], logits [T, E]");
  }
  *problem = {static_cast<int>(tokens), static_cast<int>(hidden), static_cast<int>(experts),
              static_cast<int>(terms)};
  return check_aligned(operator_name, {{"x", x.untyped_data()},
                                       {"parts", parts.untyped_data()},
                                       {"logits", logits->untyped_data()}});
}

inline cudaError_t run(const Problem& problem, int32_t device, Matrix x, Parts parts, Logits logits,
                       cudaStream_t stream) {
  int num_sms = 0;
  const cudaError_t status =
      cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  return launch(problem, choose(problem, num_sms), x.typed_data(), parts.typed_data(),
                logits->typed_data(), stream);
}

}  // namespace jax_hpc::router_gemm
