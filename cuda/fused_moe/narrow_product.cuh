// clang-format off
// The product of eight rows of tokens, which no other operator has.
// Written by scripts/generate_wgmma.py.
#pragma once

#include <cstdint>

#include "common/wgmma.cuh"

namespace jax_hpc {

template <>
struct Wgmma<8> {
  static __device__ __forceinline__ void multiply(float (&d)[4], uint64_t a, uint64_t b,
                                                  bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
        "{"
        "%0, %1, %2, %3"
        "}, "
        "%4, %5, p, 1, 1, 0, 0;\n"
        "}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  }
};

}  // namespace jax_hpc
// clang-format on
