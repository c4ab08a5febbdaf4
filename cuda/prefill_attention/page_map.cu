#include "prefill_attention/page_map.h"

#include "common/tensor_map.h"

namespace jax_hpc::prefill_attention {

cudaError_t make_page_map(const Problem& p, const void* pages, CUtensorMap* map) {
  const TensorMapEncoder& encoder = tensor_map_encoder();
  if (encoder.status != cudaSuccess) return encoder.status;
  constexpr int kElementBytes = 2;
  constexpr int kRowElements = 64;  // 128 bytes
  const cuuint64_t extent[4] = {kRowElements, static_cast<cuuint64_t>(p.page_size),
                                static_cast<cuuint64_t>(p.head_dim / kRowElements),
                                static_cast<cuuint64_t>(p.pages) * p.kv_heads};
  const auto token_bytes = static_cast<cuuint64_t>(p.head_dim) * kElementBytes;
  const cuuint64_t strides[3] = {token_bytes, kRowElements * kElementBytes,
                                 token_bytes * p.page_size};
  const cuuint32_t box[4] = {kRowElements, static_cast<cuuint32_t>(p.page_size), 1, 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  const CUresult result = encoder.encode(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(pages), extent, strides, box,
      element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jax_hpc::prefill_attention
