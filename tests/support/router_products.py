"""Shapes of router products that between them take every kernel and tile, and their operands."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_hpc import split_router_weight

BOUNDS = {1: 2.0**-16, 2: 2.0**-16, 3: 2.0**-21}
"""Most error of a logit in units of ``sum |x| |W|``; one term is of a weight that is bf16."""

MOST_HIDDEN_OF_THREE_TERMS = 49152

# Tokens on both sides of tile boundaries, experts and hidden sizes that fill no tile, hidden sizes
# that are not 16-byte aligned, and the shapes of Hy3 and LongCat-Flash.
SHAPES = [
    (1, 4096, 192),
    (8, 4096, 192),
    (9, 520, 33),
    (16, 64, 7),
    (17, 1000, 70),
    (33, 96, 128),
    (64, 4096, 192),
    (64, 6144, 768),
    (65, 520, 257),
    (128, 72, 1),
    (129, 4096, 192),
    (300, 3072, 384),
    (1000, 512, 100),
    (5, 123, 19),
    (150, 77, 65),
    (1, 1, 1),
    (2049, 264, 150),
    (2100, 4096, 128),
    (4099, 256, 96),
    # Tiles of 128 tokens.
    (3000, 520, 160),
    (3000, 1000, 500),
    (3000, 6144, 96),
    (4099, 520, 380),
    (4096, 4096, 192),
    (4096, 6144, 768),
    # Long hidden axes: the sums of every kernel are emptied many times.
    (8, 65536, 20),
    (64, 16384, 2112),
    (40, 12289, 1100),
    (64, 49152, 64),
]

# For three terms: most hidden values in a cluster of 8, and most in one CTA by itself.
LONG_SHAPES = [
    (8192, 16384, 256),
    (64, 49152, 64),
    (8, 49152, 64),
    (20, 49151, 64),
    (1100, 49151, 32),
    (4096, 6144, 768),
    (8, 6144, 2112),
    (1100, 6143, 32),
]


@dataclasses.dataclass(frozen=True)
class Product:
    """Operands, and the truth of a few distinct rows that x holds in a random order."""

    x: jax.Array
    weight: Any
    want: np.ndarray  # float64 [T, E]
    magnitude: np.ndarray  # sum |x| |W|


def exact_weight(w: np.ndarray, terms: int) -> np.ndarray:
    """The weight that the parts stand for: one term is meant for weights that are bf16."""
    return w.astype(ml_dtypes.bfloat16).astype(np.float32) if terms == 1 else w


def product(x: np.ndarray, w: np.ndarray, terms: int, order: np.ndarray | None = None) -> Product:
    """x's rows in an order, by default as they are, and w split into terms."""
    order = np.arange(len(x)) if order is None else order
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    want, magnitude = x64 @ w64.T, np.abs(x64) @ np.abs(w64).T
    rows = jnp.asarray(x)[jnp.asarray(order)]
    weight = split_router_weight(jnp.asarray(w), terms)
    return Product(rows, weight, want[order], magnitude[order])


def random_product(
    rng: np.random.Generator, shape: tuple[int, int, int], terms: int, positive: bool = False
) -> Product:
    """Of normal numbers. 64 rows at most differ, so that all of many can be checked quickly."""
    tokens, hidden, experts = shape
    distinct = min(tokens, 64)
    x = rng.standard_normal((distinct, hidden), np.float32)
    w = rng.standard_normal((experts, hidden), np.float32) * np.float32(0.1)
    if positive:
        x, w = np.abs(x), np.abs(w)
    order = np.concatenate([np.arange(distinct), rng.integers(0, distinct, tokens - distinct)])
    rng.shuffle(order)
    return product(x.astype(ml_dtypes.bfloat16), exact_weight(w, terms), terms, order)


def constant_product(rng: np.random.Generator, shape: tuple[int, int, int], terms: int) -> Product:
    """Every x the same and every W: each sum is rounded the same way all along the axis."""
    tokens, hidden, experts = shape
    x = np.full((1, hidden), rng.uniform(0.5, 2.0)).astype(ml_dtypes.bfloat16)
    w = np.full((experts, hidden), rng.uniform(0.05, 0.2), np.float32)
    return product(x, exact_weight(w, terms), terms, np.zeros(tokens, np.int32))
