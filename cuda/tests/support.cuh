// What the kernels' test programs share: errors, arrays, random numbers, timing in a graph.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <vector>

namespace jax_hpc::tests {

inline void require(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::cerr << what << ": " << cudaGetErrorString(status) << "\n";
  std::exit(2);
}

// An array on the device that lives as long as the scope.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t size) : size_(size) {
    require(cudaMalloc(&data_, size * sizeof(T)), "cudaMalloc");
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    require(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice),
            "cudaMemcpy");
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }
  size_t size() const { return size_; }
  // Every bit set: NaN as a float, -1 as an integer.
  void poison() { require(cudaMemset(data_, 0xff, size_ * sizeof(T)), "cudaMemset"); }
  std::vector<T> host() const {
    std::vector<T> copy(size_);
    require(cudaMemcpy(copy.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost),
            "cudaMemcpy");
    return copy;
  }

 private:
  T* data_ = nullptr;
  size_t size_;
};

// Random numbers from a counter: the same on every machine.

__host__ __device__ inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

__host__ __device__ inline float normal(size_t index, uint32_t seed) {
  constexpr float kTurn = 6.28318531f;
  const uint32_t key = mix(static_cast<uint32_t>(index) + mix(seed));
  const float radius = (static_cast<float>(key) + 1.0f) * 0x1p-32f;
  const float turn = static_cast<float>(mix(key + 1)) * 0x1p-32f;
  return sqrtf(-2.0f * logf(radius)) * cosf(kTurn * turn);
}

static __global__ void fill_normal(__nv_bfloat16* x, size_t size, uint32_t seed, bool positive) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < size;
       i += size_t{gridDim.x} * blockDim.x) {
    const float value = normal(i, seed);
    x[i] = __float2bfloat16(positive ? fabsf(value) : value);
  }
}

// Microseconds of one call inside a graph of them, the median of 15 replays; negative where a
// launch is refused. launch(i, stream) launches call i.
template <class Launch>
double time_in_graph(int calls, const Launch& launch) {
  constexpr int kWarmUp = 3;
  constexpr int kReplays = 15;
  cudaStream_t stream;
  require(cudaStreamCreate(&stream), "cudaStreamCreate");
  cudaGraph_t graph;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  bool exists = true;
  for (int i = 0; i < calls && exists; ++i) exists = launch(i, stream) == cudaSuccess;
  require(cudaStreamEndCapture(stream, &graph), "capture");
  std::vector<float> times;
  if (exists) {
    cudaGraphExec_t program;
    require(cudaGraphInstantiate(&program, graph, 0), "cudaGraphInstantiate");
    cudaEvent_t begin;
    cudaEvent_t end;
    require(cudaEventCreate(&begin), "cudaEventCreate");
    require(cudaEventCreate(&end), "cudaEventCreate");
    for (int i = 0; i < kWarmUp + kReplays; ++i) {
      require(cudaEventRecord(begin, stream), "cudaEventRecord");
      require(cudaGraphLaunch(program, stream), "cudaGraphLaunch");
      require(cudaEventRecord(end, stream), "cudaEventRecord");
      require(cudaEventSynchronize(end), "cudaEventSynchronize");
      float milliseconds = 0;
      require(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
      if (i >= kWarmUp) times.push_back(milliseconds);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaGraphExecDestroy(program);
  }
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  if (times.empty()) return -1;
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return 1000.0 * times[times.size() / 2] / calls;
}

}  // namespace jax_hpc::tests
