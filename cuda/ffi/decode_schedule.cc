// XLA's call of decode_schedule: checks the buffers, launches.
#include "decode_schedule/launch.h"

#include <cuda_runtime.h>

#include "ffi/status.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
namespace schedule = jax_hpc::decode_schedule;

namespace {

using Integers = ffi::Buffer<ffi::S32, 1>;

ffi::Error run(cudaStream_t stream, Integers kv_lens, ffi::Result<Integers> span_pair,
               ffi::Result<Integers> span_tile, ffi::Result<Integers> merge_last,
               int32_t num_kv_heads, int32_t q_len, int32_t window, bool fp8_cache) {
  const auto num_ctas = merge_last->dimensions()[0];
  if (span_pair->dimensions()[0] != num_ctas + 1 || span_tile->dimensions()[0] != num_ctas + 1) {
    return ffi::Error::InvalidArgument(
        "decode_schedule: shapes must be span_pair and span_tile [num_ctas + 1], merge_last "
        "[num_ctas]");
  }
  const schedule::Problem problem{static_cast<int>(kv_lens.dimensions()[0]),
                                  num_kv_heads,
                                  q_len,
                                  window,
                                  static_cast<int>(num_ctas),
                                  schedule::task_cost(fp8_cache)};
  return jax_hpc::to_error(
      "decode_schedule",
      schedule::launch(problem, kv_lens.typed_data(), span_pair->typed_data(),
                       span_tile->typed_data(), merge_last->typed_data(), stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(decode_schedule, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Integers>()
                                  .Ret<Integers>()
                                  .Ret<Integers>()
                                  .Ret<Integers>()
                                  .Attr<int32_t>("num_kv_heads")
                                  .Attr<int32_t>("q_len")
                                  .Attr<int32_t>("window")
                                  .Attr<bool>("fp8_cache"),
                              {ffi::Traits::kCmdBufferCompatible});
