#include "common/tensor_map.h"

namespace jax_hpc {
namespace {

TensorMapEncoder find_encoder() {
  constexpr unsigned kIntroducedIn = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t status = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &function, kIntroducedIn, cudaEnableDefault, &found);
  if (status != cudaSuccess) return {status, nullptr};
  if (found != cudaDriverEntryPointSuccess) return {cudaErrorSymbolNotFound, nullptr};
  return {cudaSuccess, reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)};
}

}  // namespace

const TensorMapEncoder& tensor_map_encoder() {
  static const TensorMapEncoder encoder = find_encoder();  // the same for all devices
  return encoder;
}

cudaError_t make_tensor_map(const void* array, const TensorMapShape& shape, CUtensorMap* map) {
  const TensorMapEncoder& encoder = tensor_map_encoder();
  if (encoder.status != cudaSuccess) return encoder.status;
  constexpr uint64_t kElementBytes = 2;
  const cuuint32_t element_strides[3] = {1, 1, 1};
  cuuint64_t strides[2];  // in bytes, of all dimensions but the innermost
  uint64_t stride = kElementBytes;
  for (int i = 0; i + 1 < shape.rank; ++i) {
    stride *= shape.extent[i];
    strides[i] = stride;
  }
  const CUresult result =
      encoder.encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, static_cast<cuuint32_t>(shape.rank),
                     const_cast<void*>(array), shape.extent, strides, shape.box, element_strides,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jax_hpc
