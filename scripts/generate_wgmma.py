#!/usr/bin/env python3
"""Writes cuda/common/wgmma.cuh and wgmma_fp8.cuh: one wrapper per width N of a warpgroup product.

The accumulator of m64nN is N / 2 registers, each an operand of its own in inline PTX, so the
wrappers are the same text at different lengths.

    python scripts/generate_wgmma.py bf16 > cuda/common/wgmma.cuh
    python scripts/generate_wgmma.py e4m3 > cuda/common/wgmma_fp8.cuh
"""

import sys

BF16_WIDTHS = (16, 32, 64, 96, 128, 192, 256)
E4M3_WIDTHS = (8, 16, 32, 64, 128)

HEADERS = {
    "bf16": """\
// Warpgroup matrix products of bf16 operands in shared memory (wgmma, sm_90a).
// Written by scripts/generate_wgmma.py.
#pragma once

#include <cstdint>

namespace jax_hpc {

// d[64, N] = a[64, 16] b[N, 16]^T, plus d unless `accumulate` is false. Both operands are K-major
// shared memory described by a matrix descriptor. The registers of d hold, for lane l of warp w
// and j < N / 8: d[4j], d[4j + 1] = row 16w + l / 4, columns 8j + 2 (l % 4) and the next;
// d[4j + 2], d[4j + 3] = the same columns eight rows below.
template <int N>
struct Wgmma;
""",
    "e4m3": """\
// Warpgroup matrix products of e4m3 operands in shared memory (wgmma, sm_90a).
// Written by scripts/generate_wgmma.py.
#pragma once

#include <cstdint>

namespace jax_hpc {

// d[64, N] = a[64, 32] b[N, 32]^T, plus d unless `accumulate` is false; operands and registers as
// those of Wgmma (wgmma.cuh). Sums keep 13 bits behind the first of their largest term.
template <int N>
struct WgmmaE4m3;
""",
}

SHAPE = """
template <>
struct {name}<{n}> {{
  static __device__ __forceinline__ void multiply(float (&d)[{registers}], uint64_t a, uint64_t b,
                                                  bool accumulate) {{
    asm volatile(
        "{{\\n"
        ".reg .pred p;\\n"
        "setp.ne.b32 p, %{flag}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}{operands} "
        "{{"
{places}
        "}}, "
        "%{a}, %{b}, p, {options};\\n"
        "}}\\n"
        : {outputs}
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  }}
}};
"""


def shape(name: str, n: int, operands: str, options: str) -> str:
    registers = n // 2
    rows = [range(i, min(i + 8, registers)) for i in range(0, registers, 8)]
    places = [", ".join(f"%{i}" for i in row) for row in rows]
    outputs = [", ".join(f'"+f"(d[{i}])' for i in row) for row in rows]
    return SHAPE.format(
        name=name,
        n=n,
        operands=operands,
        options=options,
        registers=registers,
        flag=registers + 2,
        a=registers,
        b=registers + 1,
        places=",\n".join(f'        "{row}' for row in places).replace(",\n", ', "\n') + '"',
        outputs=",\n          ".join(outputs),
    )


def main() -> None:
    operands = sys.argv[1]
    if operands == "bf16":
        shapes = [shape("Wgmma", n, "k16.f32.bf16.bf16", "1, 1, 0, 0") for n in BF16_WIDTHS]
    else:
        shapes = [shape("WgmmaE4m3", n, "k32.f32.e4m3.e4m3", "1, 1") for n in E4M3_WIDTHS]
    print("// clang-format off")
    print(HEADERS[operands] + "".join(shapes))
    print("}  // namespace jax_hpc")
    print("// clang-format on")


if __name__ == "__main__":
    main()
