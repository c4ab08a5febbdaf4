#include "common/device.h"

#include <cuda_runtime_api.h>

namespace jax_hpc {

DeviceList list_devices() {
  DeviceList list;
  int count = 0;
  cudaError_t status = cudaGetDeviceCount(&count);
  for (int ordinal = 0; status == cudaSuccess && ordinal < count; ++ordinal) {
    cudaDeviceProp properties;
    status = cudaGetDeviceProperties(&properties, ordinal);
    if (status != cudaSuccess) break;
    list.devices.push_back({
        .ordinal = ordinal,
        .name = properties.name,
        .compute_major = properties.major,
        .compute_minor = properties.minor,
        .multiprocessors = properties.multiProcessorCount,
        .l2_bytes = static_cast<std::size_t>(properties.l2CacheSize),
        .memory_bytes = properties.totalGlobalMem,
    });
  }
  if (status != cudaSuccess) {
    list.devices.clear();
    list.problem = cudaGetErrorString(status);
  } else if (count == 0) {
    list.problem = "no CUDA device is visible";
  }
  return list;
}

}  // namespace jax_hpc
