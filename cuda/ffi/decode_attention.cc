// XLA's call of decode_attention: checks the buffers; launches the schedule where none is given,
// the attention and the merge.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "decode_attention/launch.h"
#include "decode_schedule/launch.h"
#include "ffi/buffer_reader.h"
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

using Table = ffi::Buffer<ffi::S32, 2>;
using Lengths = ffi::Buffer<ffi::S32, 1>;
using Output = ffi::Buffer<ffi::BF16, 4>;

class Optional : public jax_hpc::BufferReader {
 public:
  using BufferReader::BufferReader;

  // Any count; its rank tells what kind of scale it is.
  const void* scale(attention::ScaleKind* kind) {
    const MaybeBuffer buffer = next_argument();
    if (!buffer.has_value()) return missing();
    using attention::ScaleKind;
    const size_t rank = buffer->dimensions().size();
    *kind = rank == 0 ? ScaleKind::kTensor : rank == 1 ? ScaleKind::kHead : ScaleKind::kToken;
    return fitting(buffer, ffi::F32, static_cast<int64_t>(buffer->element_count()));
  }
  void* result_of_at_least(ffi::DataType type, int64_t count) {
    const MaybeBuffer buffer = next_result();
    const int64_t size = buffer.has_value() ? static_cast<int64_t>(buffer->element_count()) : 0;
    return size < count ? missing() : fitting(buffer, type, size);
  }
};

ffi::Error refuse(const char* what) {
  return ffi::Error::InvalidArgument(std::string("decode_attention: ") + what);
}

// Sizes, as far as the buffers of fixed place tell them.
attention::Problem problem_of(ffi::AnyBuffer q, ffi::AnyBuffer pages, Table table,
                              const Options& options) {
  attention::Problem p{};
  p.batch = static_cast<int>(q.dimensions()[0]);
  p.q_len = static_cast<int>(q.dimensions()[1]);
  p.pages = static_cast<int>(pages.dimensions()[0]);
  p.kv_heads = static_cast<int>(pages.dimensions()[1]);
  p.page_size = static_cast<int>(pages.dimensions()[2]);
  p.head_dim = static_cast<int>(pages.dimensions()[3]);
  p.group = static_cast<int>(q.dimensions()[2]) / p.kv_heads;
  p.table_width = static_cast<int>(table.dimensions()[1]);
  p.fp8_cache = pages.element_type() == ffi::F8E4M3FN;
  p.fp8_query = q.element_type() == ffi::F8E4M3FN;
  p.scale = options.scale;
  p.window = options.window;
  p.cap = options.logit_cap;
  return p;
}

bool is_kind(ffi::DataType type) { return type == ffi::BF16 || type == ffi::F8E4M3FN; }

ffi::Error run(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k_pages,
               ffi::AnyBuffer v_pages, Table table, Lengths lengths, ffi::RemainingArgs arguments,
               ffi::Result<Output> out, ffi::RemainingRets results, Options options,
               int32_t num_ctas) {
  if (q.dimensions().size() != 4 || k_pages.dimensions().size() != 4 ||
      !is_kind(q.element_type()) || !is_kind(k_pages.element_type()) ||
      v_pages.element_type() != k_pages.element_type() ||
      v_pages.element_count() != k_pages.element_count()) {
    return refuse("q [B, S, Hq, D] and k_pages, v_pages [P, Hkv, N, D] must be bf16 or f8e4m3fn");
  }
  attention::Problem p = problem_of(q, k_pages, table, options);
  const int64_t q_heads = q.dimensions()[2];
  const int64_t rows = int64_t{p.batch} * p.q_len * q_heads;
  if (q.dimensions()[3] != p.head_dim || q_heads != int64_t{p.group} * p.kv_heads ||
      table.dimensions()[0] != p.batch || lengths.dimensions()[0] != p.batch ||
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

  Optional optional(arguments, results);
  const auto floats = [](const void* data) { return static_cast<const float*>(data); };
  const auto integers = [](const void* data) { return static_cast<const int*>(data); };
  if (options.has_schedule) {
    b.span_pair = integers(optional.argument(ffi::S32, num_ctas + 1));
    b.span_tile = integers(optional.argument(ffi::S32, num_ctas + 1));
    b.merge_last = integers(optional.argument(ffi::S32, num_ctas));
  }
  if (options.has_sinks) b.sinks = floats(optional.argument(ffi::F32, q_heads));
  if (options.has_q_scale) b.q_scale = floats(optional.argument(ffi::F32, rows));
  if (options.has_k_scale) b.k_scale = floats(optional.scale(&p.k_scale));
  if (options.has_v_scale) b.v_scale = floats(optional.scale(&p.v_scale));
  if (options.return_lse) b.lse = static_cast<float*>(optional.result_of_at_least(ffi::F32, rows));
  const int64_t partial_rows = attention::workspace_slots(p, cut) * p.rows();
  b.partial_out =
      static_cast<float*>(optional.result_of_at_least(ffi::F32, partial_rows * p.head_dim));
  b.partial_state = static_cast<float*>(optional.result_of_at_least(ffi::F32, partial_rows * 2));
  const bool makes_schedule = !options.has_schedule && options.num_splits == 0;
  int* made[3] = {};
  if (makes_schedule) {
    for (int i = 0; i < 3; ++i) {
      made[i] = static_cast<int*>(optional.result_of_at_least(ffi::S32, num_ctas + (i < 2)));
    }
    b.span_pair = made[0];
    b.span_tile = made[1];
    b.merge_last = made[2];
  }
  if (!optional.fit() || p.fp8_query != options.has_q_scale) {
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
                                  .Arg<Table>()
                                  .Arg<Lengths>()
                                  .RemainingArgs()
                                  .Ret<Output>()
                                  .RemainingRets()
                                  .Attr<Options>("options")
                                  .Attr<int32_t>("num_ctas"),
                              {ffi::Traits::kCmdBufferCompatible});
