// How many clusters of a kernel run at once: SMs come in groups that no cluster crosses, and a
// cluster beyond would only start when another one has done all its tasks.
#pragma once

#include <cuda_runtime.h>

#include "common/launch.h"

namespace jax_hpc::fused_moe {

template <class Kernel>
cudaError_t count_resident_clusters(Kernel kernel, const LaunchShape& shape, int* count) {
  const auto* function = reinterpret_cast<const void*>(kernel);
  const cudaError_t status = cudaFuncSetAttribute(
      function, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.cluster));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(count, function, &config);
}

}  // namespace jax_hpc::fused_moe
