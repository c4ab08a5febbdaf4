#!/usr/bin/env python3
"""Writes the wrappers of warpgroup products: one for each width N, the same text at other lengths.

The accumulator of m64nN is N / 2 registers, each an operand of its own in inline PTX.

    python scripts/generate_wgmma.py             writes the files
    python scripts/generate_wgmma.py --check     fails where a file is not what would be written
"""

import argparse
import dataclasses
import sys
from pathlib import Path

CUDA = Path(__file__).parents[1] / "cuda"


@dataclasses.dataclass(frozen=True)
class Product:
    """A kind of product: its struct's name and comment, what PTX calls it, and its widths."""

    name: str
    about: str
    instruction: str
    options: str
    widths: tuple[int, ...]
    a_in_registers: bool = False
    always_accumulates: bool = False
    declared_in: str = ""
    """The file that declares the template, where this one only adds widths to it."""


@dataclasses.dataclass(frozen=True)
class File:
    path: str
    title: str
    namespace: str
    products: tuple[Product, ...]


BF16 = "k16.f32.bf16.bf16"
E4M3 = "k32.f32.e4m3.e4m3"
FILES = (
    File(
        "common/wgmma.cuh",
        "Warpgroup matrix products of bf16 operands in shared memory (wgmma, sm_90a).",
        "jax_hpc",
        (
            Product(
                "Wgmma",
                """\
// d[64, N] = a[64, 16] b[N, 16]^T, plus d unless `accumulate` is false. Both operands are K-major
// shared memory described by a matrix descriptor. The registers of d hold, for lane l of warp w
// and j < N / 8: d[4j], d[4j + 1] = row 16w + l / 4, columns 8j + 2 (l % 4) and the next;
// d[4j + 2], d[4j + 3] = the same columns eight rows below.
""",
                BF16,
                "1, 1, 0, 0",
                (16, 32, 64, 96, 128, 192, 256),
            ),
        ),
    ),
    File(
        "common/wgmma_fp8.cuh",
        "Warpgroup matrix products of e4m3 operands in shared memory (wgmma, sm_90a).",
        "jax_hpc",
        (
            Product(
                "WgmmaE4m3",
                """\
// d[64, N] = a[64, 32] b[N, 32]^T, plus d unless `accumulate` is false; operands and registers as
// those of Wgmma (wgmma.cuh). Sums keep 13 bits behind the first of their largest term.
""",
                E4M3,
                "1, 1",
                (8, 16, 32, 64, 128),
            ),
        ),
    ),
    File(
        "fused_moe/narrow_product.cuh",
        "The product of eight rows of tokens, which no other operator has.",
        "jax_hpc",
        (Product("Wgmma", "", BF16, "1, 1, 0, 0", (8,), declared_in="common/wgmma.cuh"),),
    ),
    File(
        "fused_moe/wide_products.cuh",
        "Products of the wide tiles' rows of tokens, which no other operator has.",
        "jax_hpc",
        (
            Product(
                "WgmmaE4m3",
                "",
                E4M3,
                "1, 1",
                (96, 160, 192),
                declared_in="common/wgmma_fp8.cuh",
            ),
            Product("Wgmma", "", BF16, "1, 1, 0, 0", (160, 224), declared_in="common/wgmma.cuh"),
        ),
    ),
    File(
        "prefill_attention/value_products.cuh",
        "Warpgroup matrix products of probabilities in registers and values in shared memory.",
        "jax_hpc::prefill_attention",
        (
            Product(
                "WgmmaValues",
                """\
// d[64, N] += a[64, 16] b[16, N], all as bf16 but d. The registers of d are those of Wgmma<N>, and
// those of a the same as bf16 pairs: columns 2 (l % 4) and the next of row l / 4 (a[0], a[2] eight
// columns on), and of the row eight below (a[1], a[3]). b is MN-major: rows of N values.
""",
                BF16,
                "1, 1, 1",
                (64, 128),
                a_in_registers=True,
                always_accumulates=True,
            ),
            Product(
                "WgmmaE4m3Values",
                """\
// d[64, N] = a[64, 32] b[N, 32]^T of e4m3, plus d unless `accumulate` is false. a in registers:
// columns 4 (l % 4) and the next three of row l / 4 (a[0], a[2] sixteen columns on), and of the
// row eight below (a[1], a[3]). b is K-major.
""",
                E4M3,
                "1, 1",
                (64, 128),
                a_in_registers=True,
            ),
        ),
    ),
)


def instance(product: Product, n: int) -> str:
    registers = n // 2
    rows = [range(i, min(i + 8, registers)) for i in range(0, registers, 8)]
    outputs = ",\n".join("          " + ", ".join(f'"+f"(d[{i}])' for i in row) for row in rows)
    places = [", ".join(f"%{i}" for i in row) for row in rows]
    b = registers + (4 if product.a_in_registers else 1)
    if product.a_in_registers:
        a_type, a_inputs = "const uint32_t*", ", ".join(f'"r"(a[{i}])' for i in range(4))
        a = "{" + ", ".join(f"%{registers + i}" for i in range(4)) + "}"
    else:
        a_type, a_inputs, a = "uint64_t", '"l"(a)', f"%{registers}"
    signature = f"(float (&d)[{registers}], {a_type} a, uint64_t b"
    instruction = f"wgmma.mma_async.sync.aligned.m64n{n}{product.instruction} "
    lines = [instruction, "{", *(f"{row}, " for row in places[:-1]), places[-1], "}, "]
    if product.always_accumulates:
        signature += ")"
        lines.append(f"{a}, %{b}, 1, {product.options};\\n")
        inputs = f'{a_inputs}, "l"(b)'
    else:
        signature += ",\n" + " " * 50 + "bool accumulate)"
        lines = ["{\\n", ".reg .pred p;\\n", f"setp.ne.b32 p, %{b + 1}, 0;\\n", *lines]
        lines += [f"{a}, %{b}, p, {product.options};\\n", "}\\n"]
        inputs = f'{a_inputs}, "l"(b), "r"(static_cast<int>(accumulate))'
    text = "\n".join(f'        "{line}"' for line in lines)
    return f"""
template <>
struct {product.name}<{n}> {{
  static __device__ __forceinline__ void multiply{signature} {{
    asm volatile(
{text}
        : {outputs.lstrip()}
        : {inputs});
  }}
}};
"""


def text_of(file: File) -> str:
    text = f"""\
// clang-format off
// {file.title}
// Written by scripts/generate_wgmma.py.
#pragma once

#include <cstdint>
"""
    text += "".join(f'\n#include "{p.declared_in}"\n' for p in file.products if p.declared_in)
    text += f"\nnamespace {file.namespace} {{\n"
    for product in file.products:
        if not product.declared_in:
            text += f"\n{product.about}template <int N>\nstruct {product.name};\n"
        text += "".join(instance(product, n) for n in product.widths)
    return text + f"\n}}  // namespace {file.namespace}\n// clang-format on\n"


def is_current(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = [file for file in FILES if not is_current(CUDA / file.path, text_of(file))]
    for file in stale:
        print(f"{'differs' if check else 'written'}: cuda/{file.path}")
        if not check:
            (CUDA / file.path).write_text(text_of(file))
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
