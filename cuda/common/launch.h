// Launching kernels: one function for grid, cluster, shared memory and errors.
#pragma once

#include <cuda_runtime.h>

namespace jax_hpc {

constexpr int kWarpSize = 32;
constexpr int kWarpgroup = 128;
constexpr int kPortableCluster = 8;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int log2_of(int power_of_two) {
  int log2 = 0;
  while (1 << log2 < power_of_two) ++log2;
  return log2;
}

struct LaunchShape {
  dim3 grid;
  int threads = 0;
  int shared_bytes = 0;
  int cluster = 1;  // CTAs along x that share a cluster
  // Programmatic dependent launch: the kernel may start while the one before it in the stream still
  // runs, and waits for it itself (wait_for_previous_kernel).
  bool overlaps_previous = false;
};

// Returns the launch's own status, never an earlier call's. The function attributes are set on
// every launch: they belong to a function on a device, and a handler may run on any device.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
                   Arguments... arguments) {
  constexpr int kDefaultSharedBytes = 48 * 1024;
  const void* function = reinterpret_cast<const void*>(kernel);
  if (shape.shared_bytes > kDefaultSharedBytes) {
    const cudaError_t status = cudaFuncSetAttribute(
        function, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (status != cudaSuccess) return status;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (shape.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
  }
  if (shape.overlaps_previous) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace jax_hpc
