// Descriptors of arrays for the copy engine (TMA), encoded on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace jax_hpc {

// The driver's function by name, so that the library need not be linked to libcuda, which a machine
// without a GPU does not have.
struct TensorMapEncoder {
  cudaError_t status;
  decltype(&cuTensorMapEncodeTiled) encode;
};
const TensorMapEncoder& tensor_map_encoder();

// A row-major bf16 array, innermost extent first, read in boxes with the 128-byte swizzle. What
// lies outside the array is read as zero. The innermost extent must be a multiple of 8, the box's
// 64 (128 bytes). `rank` is 2 or 3.
struct TensorMapShape {
  int rank;
  uint64_t extent[3];
  uint32_t box[3];
};

cudaError_t make_tensor_map(const void* array, const TensorMapShape& shape, CUtensorMap* map);

}  // namespace jax_hpc
