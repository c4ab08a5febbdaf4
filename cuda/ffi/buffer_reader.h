// Reads a handler's buffers of no fixed place one by one, and remembers whether all were there and
// fitted. Handlers derive from it to read what is their own.
#pragma once

#include <cstdint>
#include <optional>

#include "xla/ffi/api/ffi.h"

namespace jax_hpc {

class BufferReader {
 public:
  BufferReader(xla::ffi::RemainingArgs arguments, xla::ffi::RemainingRets results)
      : arguments_(arguments), results_(results) {}

  const void* argument(xla::ffi::DataType type, int64_t count) {
    return fitting(next_argument(), type, count);
  }
  void* result(xla::ffi::DataType type, int64_t count) {
    return fitting(next_result(), type, count);
  }
  // Whether all buffers have been read, and fitted.
  bool fit() const {
    return fits_ && next_argument_ == arguments_.size() && next_result_ == results_.size();
  }

 protected:
  using MaybeBuffer = std::optional<xla::ffi::AnyBuffer>;

  MaybeBuffer next_argument() {
    const auto buffer = arguments_.get<xla::ffi::AnyBuffer>(next_argument_++);
    return buffer.has_value() ? MaybeBuffer(*buffer) : std::nullopt;
  }
  MaybeBuffer next_result() {
    const auto buffer = results_.get<xla::ffi::AnyBuffer>(next_result_++);
    return buffer.has_value() ? MaybeBuffer(**buffer) : std::nullopt;
  }
  void* missing() {
    fits_ = false;
    return nullptr;
  }
  // Its data where there are `count` elements of the type.
  void* fitting(MaybeBuffer buffer, xla::ffi::DataType type, int64_t count) {
    const bool fits = buffer.has_value() && buffer->element_type() == type &&
                      static_cast<int64_t>(buffer->element_count()) == count;
    return fits ? buffer->untyped_data() : missing();
  }

  xla::ffi::RemainingRets results() const { return results_; }

 private:
  xla::ffi::RemainingArgs arguments_;
  xla::ffi::RemainingRets results_;
  size_t next_argument_ = 0;
  size_t next_result_ = 0;
  bool fits_ = true;
};

}  // namespace jax_hpc
