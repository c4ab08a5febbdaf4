// From CUDA's status codes to XLA's.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "xla/ffi/api/ffi.h"

namespace jax_hpc {

inline xla::ffi::Error to_error(const char* operator_name, cudaError_t status) {
  if (status == cudaSuccess) return xla::ffi::Error::Success();
  return xla::ffi::Error::Internal(std::string(operator_name) + ": " + cudaGetErrorString(status));
}

}  // namespace jax_hpc
