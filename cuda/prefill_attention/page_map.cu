#include "prefill_attention/page_map.h"

#include <algorithm>

#include "common/tensor_map.h"

namespace jax_hpc::prefill_attention {

namespace {

constexpr int kWidestRow = 128;  // bytes of a row in shared memory
constexpr int kMostRank = 5;

struct Box {
  cuuint32_t rank;
  bool fp8;
  int row_bytes;
  cuuint64_t extent[kMostRank];
  cuuint64_t strides[kMostRank - 1];  // in bytes, of all dimensions but the innermost
  cuuint32_t box[kMostRank];
};

cudaError_t encode(const Box& b, const void* array, CUtensorMap* map) {
  const TensorMapEncoder& encoder = tensor_map_encoder();
  if (encoder.status != cudaSuccess) return encoder.status;
  const cuuint32_t element_strides[kMostRank] = {1, 1, 1, 1, 1};
  const CUresult result = encoder.encode(
      map, b.fp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, b.rank,
      const_cast<void*>(array), b.extent, b.strides, b.box, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE,
      b.row_bytes == kWidestRow ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t make_page_map(const Problem& p, const void* pages, CUtensorMap* map) {
  const int token_bytes = p.head_dim * (p.fp8_cache ? 1 : 2);
  const int row_bytes = std::min(token_bytes, kWidestRow);
  const auto elements = static_cast<cuuint32_t>(row_bytes / (p.fp8_cache ? 1 : 2));
  const auto size = static_cast<cuuint32_t>(p.page_size);
  const auto columns = static_cast<cuuint64_t>(token_bytes / row_bytes);
  const Box box{4,
                p.fp8_cache,
                row_bytes,
                {elements, size, columns, static_cast<cuuint64_t>(p.pages) * p.kv_heads},
                {static_cast<cuuint64_t>(token_bytes), static_cast<cuuint64_t>(row_bytes),
                 static_cast<cuuint64_t>(token_bytes) * size},
                {elements, size, 1, 1}};
  return encode(box, pages, map);
}

bool is_query_box(const Problem& p) {
  return kTileRows % p.group == 0 && p.fp8_query == p.fp8_cache;
}

cudaError_t make_query_map(const Problem& p, const void* q, CUtensorMap* map) {
  const int head_bytes = p.head_dim * (p.fp8_query ? 1 : 2);
  const int row_bytes = std::min(head_bytes, kWidestRow);
  const auto elements = static_cast<cuuint32_t>(row_bytes / (p.fp8_query ? 1 : 2));
  const auto group = static_cast<cuuint32_t>(p.group);
  const auto columns = static_cast<cuuint64_t>(head_bytes / row_bytes);
  const auto head = static_cast<cuuint64_t>(head_bytes);
  const Box box{5,
                p.fp8_query,
                row_bytes,
                {elements, group, columns, static_cast<cuuint64_t>(p.kv_heads),
                 static_cast<cuuint64_t>(p.tokens)},
                {head, static_cast<cuuint64_t>(row_bytes), head * group, head * p.q_heads()},
                {elements, group, 1, 1, kTileRows / group}};
  return encode(box, q, map);
}

}  // namespace jax_hpc::prefill_attention
