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

// As jax_hpc/ops/prefill_attention/primitive.py gives them.
struct Options {
  float scale;
  int32_t window;   // 0: none
  float logit_cap;  // 0: none
  int32_t max_q_len;
  bool return_lse;
  bool has_sinks;
  bool pdl;
};

}  // namespace

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::Options, ffi::StructMember<float>("scale"),
                                      ffi::StructMember<int32_t>("window"),
                                      ffi::StructMember<float>("logit_cap"),
                                      ffi::StructMember<int32_t>("max_q_len"),
                                      ffi::StructMember<bool>("return_lse"),
                                      ffi::StructMember<bool>("has_sinks"),
                                      ffi::StructMember<bool>("pdl"));

namespace {

using Query = ffi::Buffer<ffi::BF16, 3>;
using Pages = ffi::Buffer<ffi::BF16, 4>;
using Table = ffi::Buffer<ffi::S32, 2>;
using Lengths = ffi::Buffer<ffi::S32, 1>;

ffi::Error refuse(const char* what) {
  return ffi::Error::InvalidArgument(std::string("prefill_attention: ") + what);
}

// Sizes, as the buffers of fixed place tell them.
attention::Problem problem_of(Query q, Pages pages, Table table, const Options& options) {
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
  p.scale = options.scale;
  p.window = options.window;
  p.cap = options.logit_cap;
  return p;
}

ffi::Error run(cudaStream_t stream, Query q, Pages k_pages, Pages v_pages, Table table,
               Lengths q_starts, Lengths q_lens, Lengths kv_lens, ffi::RemainingArgs arguments,
               ffi::Result<Query> out, ffi::RemainingRets results, Options options) {
  const attention::Problem p = problem_of(q, k_pages, table, options);
  const auto fits = [&](Lengths lengths) { return lengths.dimensions()[0] == p.batch; };
  if (q.dimensions()[2] != p.head_dim || q.dimensions()[1] != p.q_heads() ||
      v_pages.element_count() != k_pages.element_count() || !fits(q_starts) || !fits(q_lens) ||
      !fits(kv_lens) || out->element_count() != q.element_count()) {
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

  jax_hpc::BufferReader optional(arguments, results);
  if (options.has_sinks) {
    b.sinks = static_cast<const float*>(optional.argument(ffi::F32, p.q_heads()));
  }
  if (options.return_lse) {
    const int64_t rows = int64_t{p.tokens} * p.q_heads();
    b.lse = static_cast<float*>(optional.result(ffi::F32, rows));
  }
  const int64_t plan_ints = attention::plan_ints(p.tokens, p.batch, p.group);
  b.plan = static_cast<int*>(optional.result(ffi::S32, plan_ints));
  if (!optional.fit()) {
    return refuse("the optional operands, results or workspaces do not fit the attributes");
  }
  const ffi::Error unaligned = jax_hpc::check_aligned("prefill_attention", {{"q", b.q},
                                                                            {"k_pages", b.k_pages},
                                                                            {"v_pages", b.v_pages},
                                                                            {"out", b.out},
                                                                            {"plan", b.plan}});
  if (unaligned.failure()) return unaligned;
  return jax_hpc::to_error("prefill_attention", attention::launch(p, b, options.pdl, stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(prefill_attention, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Query>()
                                  .Arg<Pages>()
                                  .Arg<Pages>()
                                  .Arg<Table>()
                                  .Arg<Lengths>()
                                  .Arg<Lengths>()
                                  .Arg<Lengths>()
                                  .RemainingArgs()
                                  .Ret<Query>()
                                  .RemainingRets()
                                  .Attr<Options>("options"),
                              {ffi::Traits::kCmdBufferCompatible});
