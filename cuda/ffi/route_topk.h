// What the handlers with a choice of experts have in common: its options and its results.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <optional>

#include "ffi/status.h"
#include "route_topk/heuristics.h"
#include "route_topk/launch.h"
#include "xla/ffi/api/ffi.h"

XLA_FFI_REGISTER_ENUM_ATTR_DECODING(::jax_hpc::route_topk::Scoring);

// As jax_hpc/ops/route_topk/primitive.py gives them.
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_hpc::route_topk::Options, StructMember<int32_t>("k"),
                                      StructMember<::jax_hpc::route_topk::Scoring>("scoring"),
                                      StructMember<bool>("renormalize"),
                                      StructMember<float>("scale"),
                                      StructMember<int32_t>("num_zero_experts"),
                                      StructMember<int32_t>("num_groups"),
                                      StructMember<int32_t>("topk_groups"));

namespace jax_hpc::route_topk {

using Bias = xla::ffi::Buffer<xla::ffi::F32, 1>;
using Ids = xla::ffi::Buffer<xla::ffi::S32, 2>;
using Weights = xla::ffi::Buffer<xla::ffi::F32, 2>;
using IdentityWeight = xla::ffi::Buffer<xla::ffi::F32, 1>;

// Chooses experts by logits [tokens, experts] on the device.
inline xla::ffi::Error run(const char* operator_name, cudaStream_t stream, const Options& options,
                           int64_t tokens, int64_t experts, const float* logits,
                           std::optional<Bias> bias, xla::ffi::Result<Ids> ids,
                           xla::ffi::Result<Weights> weights,
                           xla::ffi::Result<IdentityWeight> identity_weight,
                           bool overlaps_previous) {
  const bool fits = ids->dimensions()[0] == tokens && ids->dimensions()[1] == options.k &&
                    weights->dimensions()[0] == tokens && weights->dimensions()[1] == options.k &&
                    identity_weight->dimensions()[0] == tokens &&
                    (!bias.has_value() || bias->dimensions()[0] == experts) && options.k <= experts;
  if (!fits) {
    return xla::ffi::Error::InvalidArgument(
        std::string(operator_name) +
        ": shapes must be logits [T, E], bias [E], ids [T, K], weights [T, K], identity_weight "
        "[T]");
  }
  const Problem problem{static_cast<int>(tokens), static_cast<int>(experts), options};
  const Arrays arrays{logits, bias.has_value() ? bias->typed_data() : nullptr, ids->typed_data(),
                      weights->typed_data(), identity_weight->typed_data()};
  return to_error(operator_name,
                  launch(problem, choose(problem), arrays, overlaps_previous, stream));
}

}  // namespace jax_hpc::route_topk
