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

using Bias = xla::ffi::BufferR1<xla::ffi::F32>;
using Ids = xla::ffi::BufferR2<xla::ffi::S32>;
using Weights = xla::ffi::BufferR2<xla::ffi::F32>;
using IdentityWeight = xla::ffi::BufferR1<xla::ffi::F32>;

struct Buffers {
  std::optional<Bias> bias;
  xla::ffi::Result<Ids> ids;
  xla::ffi::Result<Weights> weights;
  xla::ffi::Result<IdentityWeight> identity_weight;
};

// Checks the buffers of a choice among logits [tokens, experts] and describes it.
inline xla::ffi::Error check(const char* operator_name, int64_t tokens, int64_t experts,
                             const Options& options, const Buffers& b, Problem* problem) {
  const auto is_token_matrix = [&](xla::ffi::AnyBuffer::Dimensions dims) {
    return dims[0] == tokens && dims[1] == options.k;
  };
  const bool fits =
      is_token_matrix(b.ids->dimensions()) && is_token_matrix(b.weights->dimensions()) &&
      b.identity_weight->dimensions()[0] == tokens &&
      (!b.bias.has_value() || b.bias->dimensions()[0] == experts) && options.k <= experts;
  if (!fits) {
    return xla::ffi::Error::InvalidArgument(
        std::string(operator_name) +
        ": shapes must be logits [T, E], bias [E], ids [T, K], weights [T, K], identity_weight "
        "[T]");
  }
  *problem = {static_cast<int>(tokens), static_cast<int>(experts), options};
  return xla::ffi::Error::Success();
}

inline cudaError_t run(const Problem& problem, const float* logits, Buffers b,
                       bool overlaps_previous, cudaStream_t stream) {
  const Arrays arrays{logits, b.bias.has_value() ? b.bias->typed_data() : nullptr,
                      b.ids->typed_data(), b.weights->typed_data(),
                      b.identity_weight->typed_data()};
  return launch(problem, choose(problem), arrays, overlaps_previous, stream);
}

}  // namespace jax_hpc::route_topk
