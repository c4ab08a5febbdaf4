#include "decode_attention/page_map.h"

#include <algorithm>

#include "common/tensor_map.h"

namespace jax_hpc::decode_attention {
cudaError_t make_page_map(const Problem& p, const void* pages, CUtensorMap* map) {
  const TensorMapEncoder& encoder = tensor_map_encoder();
  if (encoder.status != cudaSuccess) return encoder.status;
  constexpr int kWidestRow = 128;  // bytes of a row in shared memory
  const int element = p.fp8_cache ? 1 : 2;
  const int token_bytes = p.head_dim * element;
  const int row_bytes = std::min(token_bytes, kWidestRow);
  const cuuint64_t extent[4] = {static_cast<cuuint64_t>(row_bytes / element),
                                static_cast<cuuint64_t>(p.page_size),
                                static_cast<cuuint64_t>(token_bytes / row_bytes),
                                static_cast<cuuint64_t>(p.pages) * p.kv_heads};
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(token_bytes),
                                 static_cast<cuuint64_t>(row_bytes),
                                 static_cast<cuuint64_t>(token_bytes) * p.page_size};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(extent[0]),
                             static_cast<cuuint32_t>(std::min(p.page_size, kTileTokens)),
                             static_cast<cuuint32_t>(extent[2]), 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  const CUresult result = encoder.encode(
      map, p.fp8_cache ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
      const_cast<void*>(pages), extent, strides, box, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE,
      row_bytes == kWidestRow ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jax_hpc::decode_attention
