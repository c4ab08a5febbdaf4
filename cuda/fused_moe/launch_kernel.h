// Launching the kernels of the chain.
#pragma once

#include <cuda_runtime.h>

#include "common/launch.h"

namespace jax_hpc::fused_moe {

// As jax_hpc::launch, and the SM's memory is shared memory as far as possible: an SM changes the
// division only when idle, so what a kernel asks for decides how many CTAs of one that overlaps
// with it find room.
template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), const LaunchShape& shape,
                          cudaStream_t stream, Arguments... arguments) {
  const cudaError_t status = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                  cudaFuncAttributePreferredSharedMemoryCarveout,
                                                  cudaSharedmemCarveoutMaxShared);
  if (status != cudaSuccess) return status;
  return jax_hpc::launch(kernel, shape, stream, arguments...);
}

}  // namespace jax_hpc::fused_moe
