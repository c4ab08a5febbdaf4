#include "fused_moe/maps.h"

#include "common/tensor_map.h"
#include "fused_moe/stage.h"
#include "fused_moe/wide_shape.h"

namespace jax_hpc::fused_moe {
namespace {

// Of weights, of a CTA.
uint32_t weight_rows(const Problem& p, const Config& config) {
  return static_cast<uint32_t>(warpgroups_of(p.format, config.tile_rows) * kWeightRows);
}

// Bytes of a row of `values` weights or activations.
uint64_t bytes_of(const Problem& p, int values) {
  return static_cast<uint64_t>(values) * static_cast<uint64_t>(value_bytes(p.format));
}

// One dimension: how many, how many of a box, and bytes from one to the next.
struct Dimension {
  uint64_t extent;
  uint32_t box;
  uint64_t stride;
};

template <int Rank>
cudaError_t encode(const void* array, const Dimension (&dimensions)[Rank], CUtensorMap* map,
                   CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  const TensorMapEncoder& encoder = tensor_map_encoder();
  if (encoder.status != cudaSuccess) return encoder.status;
  cuuint64_t extent[Rank];
  cuuint64_t strides[Rank];
  cuuint32_t box[Rank];
  cuuint32_t element_strides[Rank];
  for (int i = 0; i < Rank; ++i) {
    extent[i] = dimensions[i].extent;
    box[i] = dimensions[i].box;
    element_strides[i] = 1;
    if (i > 0) strides[i - 1] = dimensions[i].stride;
  }
  const CUresult result =
      encoder.encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, Rank, const_cast<void*>(array), extent,
                     strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// A box is eight gate rows, the eight up rows that belong to them, and so on: of one piece four
// times for each warpgroup, of four pieces of the hidden axis once each.
cudaError_t encode_gate_up(const Problem& p, uint32_t rows_of_cta, int pieces_of_hidden,
                           const void* gate_up, CUtensorMap* map) {
  const uint64_t hidden = bytes_of(p, p.hidden);
  const auto inter = static_cast<uint64_t>(p.inter);
  const auto experts = static_cast<uint64_t>(p.experts);
  const Dimension gate_or_up{2, 2, inter * hidden};
  const Dimension expert{experts, 1, 2 * inter * hidden};
  if (pieces_of_hidden == 1) {
    const Dimension dimensions[] = {
        {hidden, kStageRow, 1},
        {kGroupRows, kGroupRows, hidden},
        gate_or_up,
        {inter / kGroupRows, rows_of_cta / (2 * kGroupRows), kGroupRows * hidden},
        expert};
    return encode(gate_up, dimensions, map);
  }
  if (hidden % kStageRow != 0) return cudaErrorInvalidValue;
  const auto pieces = static_cast<uint32_t>(pieces_of_hidden);
  const Dimension dimensions[] = {{kStageRow, kStageRow, 1},
                                  {inter, kGroupRows, hidden},
                                  gate_or_up,
                                  {hidden / kStageRow, pieces, kStageRow},
                                  expert};
  return encode(gate_up, dimensions, map);
}

}  // namespace

cudaError_t make_gate_up_map(const Problem& p, const Config& config, const void* gate_up,
                             CUtensorMap* map) {
  return encode_gate_up(p, weight_rows(p, config), config.gate_up_pieces, gate_up, map);
}

cudaError_t make_down_map(const Problem& p, const Config& config, const void* down,
                          CUtensorMap* map) {
  const auto hidden = static_cast<uint64_t>(p.hidden);
  const uint64_t inter = bytes_of(p, p.inter);
  const Dimension dimensions[] = {{inter, kStageRow, 1},
                                  {hidden, weight_rows(p, config), inter},
                                  {static_cast<uint64_t>(p.experts), 1, hidden * inter}};
  return encode(down, dimensions, map);
}

cudaError_t make_act_map(const Problem& p, const void* act, CUtensorMap* map) {
  const uint64_t inter = bytes_of(p, p.inter);
  const Dimension dimensions[] = {{inter, kStageRow, 1},
                                  {static_cast<uint64_t>(num_pairs(p)), kGroupRows, inter}};
  return encode(act, dimensions, map);
}

cudaError_t make_down_pairs_map(const Problem& p, const void* down, CUtensorMap* map) {
  constexpr int kRowsOfPair = 2 * kPairColumns / kStageRow;
  const auto hidden = static_cast<uint64_t>(p.hidden);
  const auto inter = static_cast<uint64_t>(p.inter);
  const Dimension dimensions[] = {{kStageRow, kStageRow, 1},
                                  {hidden / 2, kPairs, 2 * inter},
                                  {kRowsOfPair, kRowsOfPair, kStageRow},
                                  {static_cast<uint64_t>(p.experts), 1, hidden * inter}};
  return encode(down, dimensions, map);
}

cudaError_t make_act_pieces_map(const Problem& p, const void* act, CUtensorMap* map) {
  const Dimension dimensions[] = {
      {kPieceColumns, kPieceColumns, 1},
      {static_cast<uint64_t>(num_pairs(p)), kGroupRows, static_cast<uint64_t>(p.inter)},
      {kPieces, kPieces, kPieceColumns}};
  return encode(act, dimensions, map, CU_TENSOR_MAP_SWIZZLE_64B);
}

cudaError_t make_wide_gate_up_map(const Problem& p, const void* gate_up, CUtensorMap* map) {
  return encode_gate_up(p, kWideWeightRows, 1, gate_up, map);
}

cudaError_t make_wide_down_map(const Problem& p, const void* down, CUtensorMap* map) {
  constexpr int kSlabRows = 2 * kGroupRows;
  const auto hidden = static_cast<uint64_t>(p.hidden);
  const uint64_t inter = bytes_of(p, p.inter);
  const Dimension dimensions[] = {
      {inter, kStageRow, 1},
      {kGroupRows, kGroupRows, inter},
      {2, 2, kGroupRows * inter},
      {hidden / kSlabRows, kWideWeightRows / kSlabRows, kSlabRows * inter},
      {static_cast<uint64_t>(p.experts), 1, hidden * inter}};
  return encode(down, dimensions, map);
}

cudaError_t make_sorted_map(const Problem& p, int columns, const void* rows, CUtensorMap* map) {
  const uint64_t stride = bytes_of(p, columns);
  const Dimension dimensions[] = {{stride, kStageRow, 1},
                                  {static_cast<uint64_t>(num_pairs(p)), kWideBoxRows, stride}};
  return encode(rows, dimensions, map);
}

}  // namespace jax_hpc::fused_moe
