// XLA's call of prefill_attention: checks the buffers; launches the plan and the attention.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "ffi/buffer_reader.h"
#include "ffi/status.h"
#include "prefill_attention/launch.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
namespace attention = jax_hpc::prefill_attention;

namespace {

// As jax_hpc/ops/prefill_attention/primitive.py gives them. Which optional operands there are, in
// this order after the others: sinks, q_scale, k_scale, v_scale.
struct Options {
  float scale;
  int32_t window;   // 0: none
  float logit_cap;  // 0: none
  int32_t max_q_len;
  bool return_lse;
  bool has_sinks;
  bool has_q_scale;
  bool has_k_scale;
  bool has_v_scale;
  bool pdl;
};

}  // namespace

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::Options, ffi::StructMember<float>("scale"), ffi::StructMember<int32_t>("window"),
    ffi::StructMember<float>("logit_cap"), ffi::StructMember<int32_t>("max_q_len"),
    ffi::StructMember<bool>("return_lse"), ffi::StructMember<bool>("has_sinks"),
    ffi::StructMember<bool>("has_q_scale"), ffi::StructMember<bool>("has_k_scale"),
    ffi::StructMember<bool>("has_v_scale"), ffi::StructMember<bool>("pdl"));

namespace {

using Output = ffi::Buffer<ffi::BF16, 3>;
using Table = ffi::Buffer<ffi::S32, 2>;
using Lengths = ffi::Buffer<ffi::S32, 1>;

class Optional : public jax_hpc::BufferReader {
 public:
  using BufferReader::BufferReader;

  // Of [], [Hkv] or `tokens` values; its rank tells which.
  const float* scale(int64_t heads, int64_t tokens, attention::ScaleKind* kind) {
    const MaybeBuffer buffer = next_argument();
    const size_t rank = buffer.has_value() ? buffer->dimensions().size() : 0;
    using attention::ScaleKind;
    *kind = rank == 0 ? ScaleKind::kTensor : rank == 1 ? ScaleKind::kHead : ScaleKind::kToken;
    const int64_t count = rank == 0 ? 1 : rank == 1 ? heads : tokens;
    return static_cast<const float*>(fitting(buffer, ffi::F32, count));
  }
};

ffi::Error refuse(const char* what) {
  return ffi::Error::InvalidArgument(std::string("prefill_attention: ") + what);
}

// Sizes, as the buffers of fixed place tell them.
attention::Problem problem_of(ffi::AnyBuffer q, ffi::AnyBuffer pages, Table table,
                              const Options& options) {
  attention::Problem p{};
  p.tokens = static_cast<int>(q.dimensions()[0]);
  p.batch = static_cast<int>(table.dimensions()[0]);
  p.max_q_len = options.max_q_len;
  p.pages = static_cast<int>(pages.dimensions()[0]);
  p.kv_heads = static_cast<int>(pages.dimensions()[1]);
  p.page_size = static_cast<int>(pages.dimensions()[2]);
  p.head_dim = static_cast<int>(pages.dimensions()[3]);
  p.group = static_cast<int>(q.dimensions()[1]) / p.kv_heads;
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
               ffi::AnyBuffer v_pages, Table table, Lengths q_starts, Lengths q_lens,
               Lengths kv_lens, ffi::RemainingArgs arguments, ffi::Result<Output> out,
               ffi::RemainingRets results, Options options) {
  if (q.dimensions().size() != 3 || k_pages.dimensions().size() != 4 ||
      !is_kind(q.element_type()) || !is_kind(k_pages.element_type()) ||
      v_pages.element_type() != k_pages.element_type() ||
      v_pages.element_count() != k_pages.element_count()) {
    return refuse("q [T, Hq, D] and k_pages, v_pages [P, Hkv, N, D] must be bf16 or f8e4m3fn");
  }
  attention::Problem p = problem_of(q, k_pages, table, options);
  const auto fits = [&](Lengths lengths) { return lengths.dimensions()[0] == p.batch; };
  if (q.dimensions()[2] != p.head_dim || q.dimensions()[1] != p.q_heads() || !fits(q_starts) ||
      !fits(q_lens) || !fits(kv_lens) || out->element_count() != q.element_count()) {
    return refuse(
        "shapes must be q, out [T, Hq, D], pages [P, Hkv, N, D], page_table [B, M], q_starts, "
        "q_lens, kv_lens [B]");
  }
  attention::Buffers b{};
  b.q = q.untyped_data();
  b.k_pages = k_pages.untyped_data();
  b.v_pages = v_pages.untyped_data();
  b.page_table = table.typed_data();
  b.q_starts = q_starts.typed_data();
  b.q_lens = q_lens.typed_data();
  b.kv_lens = kv_lens.typed_data();
  b.out = out->untyped_data();

  Optional optional(arguments, results);
  const int64_t rows = int64_t{p.tokens} * p.q_heads();
  const int64_t slots = int64_t{p.pages} * p.kv_heads * p.page_size;
  if (options.has_sinks) {
    b.sinks = static_cast<const float*>(optional.argument(ffi::F32, p.q_heads()));
  }
  if (options.has_q_scale) {
    b.q_scale = static_cast<const float*>(optional.argument(ffi::F32, rows));
  }
  if (options.has_k_scale) b.k_scale = optional.scale(p.kv_heads, slots, &p.k_scale);
  if (options.has_v_scale) b.v_scale = optional.scale(p.kv_heads, p.kv_heads, &p.v_scale);
  if (options.return_lse) b.lse = static_cast<float*>(optional.result(ffi::F32, rows));
  const int64_t plan_ints = attention::plan_ints(p.tokens, p.batch, p.group);
  b.plan = static_cast<int*>(optional.result(ffi::S32, plan_ints));
  if (!optional.fit() || p.fp8_query != options.has_q_scale) {
    return refuse("the optional operands, results or workspaces do not fit the attributes");
  }
  const bool token_scales = p.k_scale == attention::ScaleKind::kToken;
  const ffi::Error unaligned =
      jax_hpc::check_aligned("prefill_attention", {{"q", b.q},
                                                   {"k_pages", b.k_pages},
                                                   {"v_pages", b.v_pages},
                                                   {"k_scale", token_scales ? b.k_scale : nullptr},
                                                   {"out", b.out},
                                                   {"plan", b.plan}});
  if (unaligned.failure()) return unaligned;
  return jax_hpc::to_error("prefill_attention", attention::launch(p, b, options.pdl, stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(prefill_attention, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Table>()
                                  .Arg<Lengths>()
                                  .Arg<Lengths>()
                                  .Arg<Lengths>()
                                  .RemainingArgs()
                                  .Ret<Output>()
                                  .RemainingRets()
                                  .Attr<Options>("options"),
                              {ffi::Traits::kCmdBufferCompatible});
