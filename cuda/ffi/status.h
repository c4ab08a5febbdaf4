// What handlers answer XLA: CUDA's status codes as XLA's, and checks that all of them make.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jax_hpc {

inline xla::ffi::Error to_error(const char* operator_name, cudaError_t status) {
  if (status == cudaSuccess) return xla::ffi::Error::Success();
  return xla::ffi::Error::Internal(std::string(operator_name) + ": " + cudaGetErrorString(status));
}

struct NamedPointer {
  const char* name;
  const void* data;
};

// Kernels read and write in vectors of 16 bytes, and tensor maps refuse other addresses. XLA's own
// buffers are aligned further; a buffer that a caller brought, or a slice of one, need not be.
inline xla::ffi::Error check_aligned(const char* operator_name,
                                     std::initializer_list<NamedPointer> buffers) {
  constexpr uintptr_t kBytes = 16;
  for (const NamedPointer& buffer : buffers) {
    if (reinterpret_cast<uintptr_t>(buffer.data) % kBytes != 0) {
      return xla::ffi::Error::InvalidArgument(std::string(operator_name) + ": buffer '" +
                                              buffer.name + "' must be 16-byte aligned");
    }
  }
  return xla::ffi::Error::Success();
}

}  // namespace jax_hpc
