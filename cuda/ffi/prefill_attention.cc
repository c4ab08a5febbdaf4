// XLA's call of prefill_attention: checks the buffers; launches the plan and the attention.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "ffi/paged_attention.h"
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
ffi::Error refuse(const char* what) {
  return ffi::Error::InvalidArgument(std::string("prefill_attention: ") + what);
}

ffi::Error run(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k_pages,
               ffi::AnyBuffer v_pages, jax_hpc::PageTable table, jax_hpc::Lengths q_starts,
               jax_hpc::Lengths q_lens, jax_hpc::Lengths kv_lens, ffi::RemainingArgs arguments,
               ffi::Result<Output> out, ffi::RemainingRets results, Options options) {
  if (!jax_hpc::are_attention_operands(q, 3, k_pages, v_pages)) {
    return refuse("q [T, Hq, D] and k_pages, v_pages [P, Hkv, N, D] must be bf16 or f8e4m3fn");
  }
  attention::Problem p{};
  const bool fits = jax_hpc::read_common(q, k_pages, table, options, &p);
  p.tokens = static_cast<int>(q.dimensions()[0]);
  p.max_q_len = options.max_q_len;
  const auto are_all = [&](jax_hpc::Lengths lengths) { return lengths.dimensions()[0] == p.batch; };
  if (!fits || !are_all(q_starts) || !are_all(q_lens) || !are_all(kv_lens) ||
      out->element_count() != q.element_count()) {
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

  jax_hpc::AttentionReader reader(arguments, results);
  const int64_t rows = int64_t{p.tokens} * p.q_heads();
  reader.read_optional(options, rows, &p, &b);
  if (options.return_lse) b.lse = static_cast<float*>(reader.result(ffi::F32, rows));
  const int64_t plan_ints = attention::plan_ints(p.tokens, p.batch, p.group);
  b.plan = static_cast<int*>(reader.result(ffi::S32, plan_ints));
  if (!reader.fit() || p.fp8_query != options.has_q_scale) {
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
                                  .Arg<jax_hpc::PageTable>()
                                  .Arg<jax_hpc::Lengths>()
                                  .Arg<jax_hpc::Lengths>()
                                  .Arg<jax_hpc::Lengths>()
                                  .RemainingArgs()
                                  .Ret<Output>()
                                  .RemainingRets()
                                  .Attr<Options>("options"),
                              {ffi::Traits::kCmdBufferCompatible});
