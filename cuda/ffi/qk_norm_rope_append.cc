// XLA's call of qk_norm_rope_append: checks the buffers and launches.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "ffi/buffer_reader.h"
#include "ffi/status.h"
#include "qk_norm_rope_append/heuristics.h"
#include "qk_norm_rope_append/launch.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
namespace prologue = jax_hpc::qk_norm_rope_append;

namespace {

// Which optional operands there are, in this order after the others.
struct Given {
  bool q_norm;
  bool k_norm;
  bool k_scale;
  bool v_scale;
  bool k_scale_pages;
};

}  // namespace

// As jax_hpc/ops/qk_norm_rope_append/primitive.py gives them.
XLA_FFI_REGISTER_ENUM_ATTR_DECODING(::jax_hpc::qk_norm_rope_append::Norm);
XLA_FFI_REGISTER_ENUM_ATTR_DECODING(::jax_hpc::qk_norm_rope_append::Style);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax_hpc::qk_norm_rope_append::Options, StructMember<float>("eps"),
    StructMember<::jax_hpc::qk_norm_rope_append::Norm>("norm"),
    StructMember<::jax_hpc::qk_norm_rope_append::Style>("rope_style"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::Given, StructMember<bool>("q_norm"),
                                      StructMember<bool>("k_norm"), StructMember<bool>("k_scale"),
                                      StructMember<bool>("v_scale"),
                                      StructMember<bool>("k_scale_pages"));

namespace {

using Qkv = ffi::BufferR2<ffi::BF16>;
using Table = ffi::BufferR2<ffi::F32>;
using Tokens = ffi::BufferR1<ffi::S32>;

bool is_stored(ffi::DataType type) { return type == ffi::BF16 || type == ffi::F8E4M3FN; }

class Taker : public jax_hpc::BufferReader {
 public:
  using BufferReader::BufferReader;

  const void* weight(bool is_given, int64_t count, prologue::Weight* kind) {
    *kind = prologue::Weight::kNone;
    if (!is_given) return nullptr;
    const MaybeBuffer buffer = next_argument();
    const bool is_bf16 = buffer.has_value() && buffer->element_type() == ffi::BF16;
    *kind = is_bf16 ? prologue::Weight::kBf16 : prologue::Weight::kFloat;
    return fitting(buffer, is_bf16 ? ffi::BF16 : ffi::F32, count);
  }
  const float* scale(bool is_given, int64_t kv_heads, prologue::Scale* kind) {
    *kind = prologue::Scale::kNone;
    if (!is_given) return nullptr;
    const MaybeBuffer buffer = next_argument();
    const bool is_one = buffer.has_value() && buffer->dimensions().size() == 0;
    *kind = is_one ? prologue::Scale::kTensor : prologue::Scale::kHead;
    return static_cast<float*>(fitting(buffer, ffi::F32, is_one ? 1 : kv_heads));
  }
  const void* argument_if(bool is_given, ffi::DataType type, int64_t count) {
    return is_given ? argument(type, count) : nullptr;
  }
  // A result that is written in place of an operand.
  void* in_place(ffi::DataType type, int64_t count, const void* operand) {
    void* data = result(type, count);
    return data == operand ? data : missing();
  }
  ffi::DataType first_result_type() const {
    const auto buffer = results().get<ffi::AnyBuffer>(0);
    return buffer.has_value() ? (*buffer)->element_type() : ffi::DataType::INVALID;
  }
};

ffi::Error refuse(const char* what) {
  return ffi::Error::InvalidArgument(std::string("qk_norm_rope_append: ") + what);
}

// Sizes, as far as the buffers of fixed place tell them.
prologue::Problem problem_of(Qkv qkv, Table cos_sin, ffi::AnyBuffer k_pages, ffi::AnyBuffer v_pages,
                             const prologue::Options& options, const Given& given) {
  const auto dims = k_pages.dimensions();
  prologue::Problem p{};
  p.tokens = static_cast<int>(qkv.dimensions()[0]);
  p.pages = static_cast<int>(dims[0]);
  p.kv_heads = static_cast<int>(dims[1]);
  p.page_size = static_cast<int>(dims[2]);
  p.head_dim = static_cast<int>(dims[3]);
  p.q_heads = static_cast<int>(qkv.dimensions()[1] / dims[3] - 2 * dims[1]);
  p.positions = static_cast<int>(cos_sin.dimensions()[0]);
  p.rotary = static_cast<int>(cos_sin.dimensions()[1]);
  p.options = options;
  p.fp8_k = k_pages.element_type() == ffi::F8E4M3FN;
  p.fp8_v = v_pages.element_type() == ffi::F8E4M3FN;
  p.k_scale_per_token = given.k_scale_pages;
  return p;
}

ffi::Error run(cudaStream_t stream, Qkv qkv, Table cos_sin, Tokens positions, Tokens slots,
               ffi::AnyBuffer k_pages, ffi::AnyBuffer v_pages, ffi::RemainingArgs arguments,
               ffi::RemainingRets results, prologue::Options options, Given given) {
  if (k_pages.dimensions().size() != 4 || !is_stored(k_pages.element_type()) ||
      !is_stored(v_pages.element_type()) || v_pages.dimensions() != k_pages.dimensions()) {
    return refuse("k_pages and v_pages must be [P, Hkv, N, D] in bf16 or f8e4m3fn");
  }
  prologue::Problem p = problem_of(qkv, cos_sin, k_pages, v_pages, options, given);
  const int64_t tokens = p.tokens;
  if (p.q_heads < 1 || qkv.dimensions()[1] != int64_t{p.heads()} * p.head_dim ||
      p.rotary % 2 != 0 || p.rotary > p.head_dim || positions.dimensions()[0] != tokens ||
      slots.dimensions()[0] != tokens) {
    return refuse("shapes must be qkv [T, (Hq + 2 Hkv) D], cos_sin [any, R], positions, slots [T]");
  }
  Taker take(arguments, results);
  prologue::Arrays a{};
  a.qkv = qkv.untyped_data();
  a.cos_sin = cos_sin.typed_data();
  a.positions = positions.typed_data();
  a.slots = slots.typed_data();
  a.q_norm = take.weight(given.q_norm, p.head_dim, &p.q_weight);
  a.k_norm = take.weight(given.k_norm, p.head_dim, &p.k_weight);
  a.k_scale = take.scale(given.k_scale, p.kv_heads, &p.k_scale);
  a.v_scale = take.scale(given.v_scale, p.kv_heads, &p.v_scale);
  const int64_t rows = int64_t{p.pages} * p.kv_heads * p.page_size;
  const void* scale_pages = take.argument_if(given.k_scale_pages, ffi::F32, rows);

  p.fp8_q = take.first_result_type() == ffi::F8E4M3FN;
  const int64_t q_rows = tokens * p.q_heads;
  a.q = take.result(p.fp8_q ? ffi::F8E4M3FN : ffi::BF16, q_rows * p.head_dim);
  if (p.fp8_q) a.q_scale = static_cast<float*>(take.result(ffi::F32, q_rows));
  a.k_pages = take.in_place(k_pages.element_type(), rows * p.head_dim, k_pages.untyped_data());
  a.v_pages = take.in_place(v_pages.element_type(), rows * p.head_dim, v_pages.untyped_data());
  if (given.k_scale_pages) {
    a.k_scale_pages = static_cast<float*>(take.in_place(ffi::F32, rows, scale_pages));
  }
  if (!take.fit() || (given.k_scale_pages && !p.fp8_k)) {
    return refuse(
        "the optional operands or the results do not fit the attributes, or pages are not written "
        "in place");
  }
  const ffi::Error unaligned =
      jax_hpc::check_aligned("qk_norm_rope_append", {{"qkv", a.qkv},
                                                     {"q_norm", a.q_norm},
                                                     {"k_norm", a.k_norm},
                                                     {"cos_sin", a.cos_sin},
                                                     {"k_pages", a.k_pages},
                                                     {"v_pages", a.v_pages},
                                                     {"q", a.q}});
  if (unaligned.failure()) return unaligned;
  return jax_hpc::to_error("qk_norm_rope_append",
                           prologue::launch(p, prologue::choose(p), a, stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(qk_norm_rope_append, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Qkv>()
                                  .Arg<Table>()
                                  .Arg<Tokens>()
                                  .Arg<Tokens>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<prologue::Options>("options")
                                  .Attr<Given>("given"),
                              {ffi::Traits::kCmdBufferCompatible});
