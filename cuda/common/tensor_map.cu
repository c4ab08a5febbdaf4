#include "common/tensor_map.h"

namespace jax_hpc {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

struct EntryPoint {
  cudaError_t status;
  Encode encode;
};

// The driver's entry point by name, so that the library need not be linked to libcuda, which a
// machine without a GPU does not have.
EntryPoint find_encode() {
  constexpr unsigned kIntroducedIn = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t status = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &function, kIntroducedIn, cudaEnableDefault, &found);
  if (status != cudaSuccess) return {status, nullptr};
  if (found != cudaDriverEntryPointSuccess) return {cudaErrorSymbolNotFound, nullptr};
  return {cudaSuccess, reinterpret_cast<Encode>(function)};
}

}  // namespace

cudaError_t make_tensor_map(const void* array, const TensorMapShape& shape, CUtensorMap* map) {
  static const EntryPoint entry_point = find_encode();  // the same for all devices
  if (entry_point.status != cudaSuccess) return entry_point.status;
  constexpr uint64_t kElementBytes = 2;
  const cuuint32_t element_strides[3] = {1, 1, 1};
  cuuint64_t strides[2];  // in bytes, of all dimensions but the innermost
  uint64_t stride = kElementBytes;
  for (int i = 0; i + 1 < shape.rank; ++i) {
    stride *= shape.extent[i];
    strides[i] = stride;
  }
  const CUresult result =
      entry_point.encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, static_cast<cuuint32_t>(shape.rank),
                         const_cast<void*>(array), shape.extent, strides, shape.box,
                         element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jax_hpc
