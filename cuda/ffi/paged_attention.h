// What XLA's calls of the two attentions over a paged cache have in common: the same operands, the
// same options, and sizes read off the same buffers.
#pragma once

#include <cstdint>

#include "ffi/buffer_reader.h"
#include "xla/ffi/api/ffi.h"

namespace jax_hpc {

using PageTable = xla::ffi::Buffer<xla::ffi::S32, 2>;
using Lengths = xla::ffi::Buffer<xla::ffi::S32, 1>;

// Whether q, of `q_rank` dimensions, and pages [P, Hkv, N, D] are bf16 or fp8, and the two caches
// alike.
inline bool are_attention_operands(xla::ffi::AnyBuffer q, size_t q_rank,
                                   xla::ffi::AnyBuffer k_pages, xla::ffi::AnyBuffer v_pages) {
  const auto is_kind = [](xla::ffi::DataType type) {
    return type == xla::ffi::BF16 || type == xla::ffi::F8E4M3FN;
  };
  return q.dimensions().size() == q_rank && k_pages.dimensions().size() == 4 &&
         is_kind(q.element_type()) && is_kind(k_pages.element_type()) &&
         v_pages.element_type() == k_pages.element_type() &&
         v_pages.element_count() == k_pages.element_count();
}

// What the cache, its table, q's heads (the axis before the last) and the options tell of a
// problem; false where q does not fit the cache.
template <class Problem, class Options>
bool read_common(xla::ffi::AnyBuffer q, xla::ffi::AnyBuffer pages, PageTable table,
                 const Options& options, Problem* p) {
  const auto q_shape = q.dimensions();
  const auto q_heads = static_cast<int>(q_shape[q_shape.size() - 2]);
  p->batch = static_cast<int>(table.dimensions()[0]);
  p->table_width = static_cast<int>(table.dimensions()[1]);
  p->pages = static_cast<int>(pages.dimensions()[0]);
  p->kv_heads = static_cast<int>(pages.dimensions()[1]);
  p->page_size = static_cast<int>(pages.dimensions()[2]);
  p->head_dim = static_cast<int>(pages.dimensions()[3]);
  p->group = p->kv_heads > 0 ? q_heads / p->kv_heads : 0;
  p->fp8_cache = pages.element_type() == xla::ffi::F8E4M3FN;
  p->fp8_query = q.element_type() == xla::ffi::F8E4M3FN;
  p->scale = options.scale;
  p->window = options.window;
  p->cap = options.logit_cap;
  return q_shape.back() == p->head_dim && q_heads == p->group * p->kv_heads;
}

// Reads the optional operands, which come in this order: sinks, q_scale, k_scale, v_scale.
class AttentionReader : public BufferReader {
 public:
  using BufferReader::BufferReader;

  // `rows` of q and heads together.
  template <class Options, class Problem, class Buffers>
  void read_optional(const Options& options, int64_t rows, Problem* p, Buffers* b) {
    const int64_t slots = int64_t{p->pages} * p->kv_heads * p->page_size;
    if (options.has_sinks) b->sinks = floats(int64_t{p->group} * p->kv_heads);
    if (options.has_q_scale) b->q_scale = floats(rows);
    if (options.has_k_scale) b->k_scale = scale(p->kv_heads, slots, &p->k_scale);
    if (options.has_v_scale) b->v_scale = scale(p->kv_heads, p->kv_heads, &p->v_scale);
  }

  const int* integers(int64_t count) {
    return static_cast<const int*>(argument(xla::ffi::S32, count));
  }

 private:
  const float* floats(int64_t count) {
    return static_cast<const float*>(argument(xla::ffi::F32, count));
  }

  // Of [], [Hkv] or one value for each of `slots`; its rank tells which.
  template <class Kind>
  const float* scale(int64_t heads, int64_t slots, Kind* kind) {
    const MaybeBuffer buffer = next_argument();
    const size_t rank = buffer.has_value() ? buffer->dimensions().size() : 0;
    *kind = rank == 0 ? Kind::kTensor : rank == 1 ? Kind::kHead : Kind::kToken;
    const int64_t count = rank == 0 ? 1 : rank == 1 ? heads : slots;
    return static_cast<const float*>(fitting(buffer, xla::ffi::F32, count));
  }
};

}  // namespace jax_hpc
