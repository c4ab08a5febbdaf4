#include "common/probe.h"

#include <cuda_runtime.h>

namespace jax_hpc {
namespace {

constexpr int kAnswer = 90;
constexpr int kWarpgroup = 128;

// wgmma exists in 90a code only, so this kernel loads exactly where the real ones do.
__global__ void __launch_bounds__(kWarpgroup) probe_kernel(int* answer) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  if (threadIdx.x == 0) *answer = kAnswer;
}

// Selects a device for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int ordinal) {
    status_ = cudaGetDevice(&previous_);
    if (status_ == cudaSuccess) status_ = cudaSetDevice(ordinal);
  }
  ~DeviceScope() { cudaSetDevice(previous_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

  cudaError_t status() const { return status_; }

 private:
  int previous_ = 0;
  cudaError_t status_;
};

// The answer lies in pinned host memory: JAX may have taken all of the device's.
cudaError_t run_probe(int* answer) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(kWarpgroup);
  // The launch's own status: cudaGetLastError() could be an earlier call's.
  if (cudaError_t status = cudaLaunchKernelEx(&config, probe_kernel, answer);
      status != cudaSuccess) {
    return status;
  }
  return cudaDeviceSynchronize();
}

}  // namespace

std::string probe(int ordinal) {
  DeviceScope scope(ordinal);
  if (scope.status() != cudaSuccess) return cudaGetErrorString(scope.status());
  int* answer = nullptr;
  cudaError_t status = cudaMallocHost(&answer, sizeof(int));
  if (status != cudaSuccess) return cudaGetErrorString(status);
  *answer = 0;
  status = run_probe(answer);
  const bool correct = *answer == kAnswer;
  cudaFreeHost(answer);
  if (status != cudaSuccess) return cudaGetErrorString(status);
  return correct ? "" : "the probe kernel ran but gave a wrong answer";
}

std::string toolkit_version() {
  return std::to_string(__CUDACC_VER_MAJOR__) + "." + std::to_string(__CUDACC_VER_MINOR__);
}

std::string architecture() { return JAX_HPC_ARCH; }

}  // namespace jax_hpc
