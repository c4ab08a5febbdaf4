// XLA's call of decode_attention: checks the buffers; launches the schedule where none is given,
// the attention and the merge.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "decode_attention/launch.h"
#include "decode_schedule/launch.h"
#include "ffi/paged_attention.h"
#include "ffi/status.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
namespace attention = jax_hpc::decode_attention;

namespace {

// As jax_hpc/ops/decode_attention/primitive.py gives them. Which optional operands there are, in
// this order after the others: a schedule's three arrays, sinks, q_scale, k_scale, v_scale.
struct Options {
  float scale;
  int32_t window;      // 0: none
  float logit_cap;     // 0: none
  int32_t num_splits;  // 0: by a schedule
  int32_t min_split_tiles;
  bool return_lse;
  bool has_schedule;
  bool has_sinks;
  bool has_q_scale;
  bool has_k_scale;
  bool has_v_scale;
  bool pdl;
};

}  // namespace

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::Options, ffi::StructMember<float>("scale"), ffi::StructMember<int32_t>("window"),
    ffi::StructMember<float>("logit_cap"), ffi::StructMember<int32_t>("num_splits"),
    ffi::StructMember<int32_t>("min_split_tiles"), ffi::StructMember<bool>("return_lse"),
    ffi::StructMember<bool>("has_schedule"), ffi::StructMember<bool>("has_sinks"),
    ffi::StructMember<bool>("has_q_scale"), ffi::StructMember<bool>("has_k_scale"),
    ffi::StructMember<bool>("has_v_scale"), ffi::StructMember<bool>("pdl"));

namespace {

using Output = ffi::Buffer<ffi::BF16, 4>;

class Reader : public jax_hpc::AttentionReader {
 public:
  using AttentionReader::AttentionReader;

  void* result_of_at_least(ffi::DataType type, int64_t count) {
    const MaybeBuffer buffer = next_result();
    const int64_t size = buffer.has_value() ? static_cast<int64_t>(buffer->element_count()) : 0;
    return size < count ? missing() : fitting(buffer, type, size);
  }
};

ffi::Error refuse(const char* what) {
  return ffi::Error::InvalidArgument(std::string("decode_attention: ") + what);
}

ffi::Error run(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k_pages,
               ffi::AnyBuffer v_pages, jax_hpc::PageTable table, jax_hpc::Lengths lengths,
               ffi::RemainingArgs arguments, ffi::Result<Output> out, ffi::RemainingRets results,
               Options options, int32_t num_ctas) {
  if (!jax_hpc::are_attention_operands(q, 4, k_pages, v_pages)) {
    return refuse("q [B, S, Hq, D] and k_pages, v_pages [P, Hkv, N, D] must be bf16 or f8e4m3fn");
  }
  attention::Problem p{};
  const bool fits = jax_hpc::read_common(q, k_pages, table, options, &p);
  p.q_len = static_cast<int>(q.dimensions()[1]);
  const int64_t rows = int64_t{p.batch} * p.q_len * p.group * p.kv_heads;
  if (!fits || q.dimensions()[0] != p.batch || lengths.dimensions()[0] != p.batch ||
      out->element_count() != q.element_count()) {
    return refuse(
        "shapes must be q, out [B, S, Hq, D], pages [P, Hkv, N, D], page_table [B, M], kv_lens "
        "[B]");
  }
  const attention::Cut cut{num_ctas, options.num_splits, options.min_split_tiles};
  attention::Buffers b{};
  b.q = q.untyped_data();
  b.k_pages = k_pages.untyped_data();
  b.v_pages = v_pages.untyped_data();
  b.page_table = table.typed_data();
  b.kv_lens = lengths.typed_data();
  b.out = out->untyped_data();

  Reader reader(arguments, results);
  if (options.has_schedule) {
    b.span_pair = reader.integers(num_ctas + 1);
    b.span_tile = reader.integers(num_ctas + 1);
    b.merge_last = reader.integers(num_ctas);
  }
  reader.read_optional(options, rows, &p, &b);
  if (options.return_lse) b.lse = static_cast<float*>(reader.result_of_at_least(ffi::F32, rows));
  const int64_t partial_rows = attention::workspace_slots(p, cut) * p.rows();
  b.partial_out =
      static_cast<float*>(reader.result_of_at_least(ffi::F32, partial_rows * p.head_dim));
  b.partial_state = static_cast<float*>(reader.result_of_at_least(ffi::F32, partial_rows * 2));
  const bool makes_schedule = !options.has_schedule && options.num_splits == 0;
  int* made[3] = {};
  if (makes_schedule) {
    for (int i = 0; i < 3; ++i) {
      made[i] = static_cast<int*>(reader.result_of_at_least(ffi::S32, num_ctas + (i < 2)));
    }
    b.span_pair = made[0];
    b.span_tile = made[1];
    b.merge_last = made[2];
  }
  if (!reader.fit() || p.fp8_query != options.has_q_scale) {
    return refuse("the optional operands, results or workspaces do not fit the attributes");
  }
  const bool token_scales = p.k_scale == attention::ScaleKind::kToken;
  const ffi::Error unaligned =
      jax_hpc::check_aligned("decode_attention", {{"q", b.q},
                                                  {"k_pages", b.k_pages},
                                                  {"v_pages", b.v_pages},
                                                  {"k_scale", token_scales ? b.k_scale : nullptr},
                                                  {"out", b.out}});
  if (unaligned.failure()) return unaligned;
  cudaError_t status = cudaSuccess;
  if (makes_schedule) {
    status = jax_hpc::decode_schedule::launch({p.batch, p.kv_heads, p.q_len, p.window, num_ctas,
                                               jax_hpc::decode_schedule::task_cost(p.fp8_cache)},
                                              b.kv_lens, made[0], made[1], made[2], stream);
  }
  if (status == cudaSuccess) {
    status =
        attention::launch(p, attention::choose(p), cut, b, {makes_schedule, options.pdl}, stream);
  }
  return jax_hpc::to_error("decode_attention", status);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(decode_attention, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jax_hpc::PageTable>()
                                  .Arg<jax_hpc::Lengths>()
                                  .RemainingArgs()
                                  .Ret<Output>()
                                  .RemainingRets()
                                  .Attr<Options>("options")
                                  .Attr<int32_t>("num_ctas"),
                              {ffi::Traits::kCmdBufferCompatible});
