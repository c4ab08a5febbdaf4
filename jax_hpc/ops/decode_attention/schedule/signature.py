"""What decode_schedule takes and gives."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Operands(NamedTuple):
    kv_lens: jax.Array  # [B]


class Results(NamedTuple):
    span_pair: Any  # [num_ctas + 1]
    span_tile: Any  # [num_ctas + 1]
    merge_last: Any  # [num_ctas]


@dataclasses.dataclass(frozen=True)
class Params:
    num_kv_heads: int
    q_len: int
    window: int | None
    num_ctas: int
    fp8_cache: bool


def shape_rule(operands: Operands, params: Params) -> Results:
    del operands
    bounds = jax.ShapeDtypeStruct((params.num_ctas + 1,), jnp.int32)
    return Results(bounds, bounds, jax.ShapeDtypeStruct((params.num_ctas,), jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeSchedule:
    """Work of one decode step cut over persistent CTAs; made by :func:`decode_schedule`.

    A *pair* is a sequence and a KV head: pair ``p`` is sequence ``p // Hkv``, head ``p % Hkv``.
    Its tiles are 64 KV tokens each, aligned in the sequence, from the tile of the first key that
    any of its queries sees (tile 0 without a window) to the tile of its last; *tile* below
    counts from the pair's first. All S queries of a sequence share its tiles. A pair of a
    sequence without a key has no tile; the CTA whose span holds it writes its zeros.

    Arrays, int32:

    span_pair, span_tile ``[num_ctas + 1]``: CTA ``c`` works from (pair, tile) boundary ``c`` up
      to, not including, boundary ``c + 1``. Boundary 0 is (0, 0), the last one (B * Hkv, 0).
      A tile above 0 means that the boundary cuts the pair.
    merge_last ``[num_ctas]``: where CTA ``c`` holds the first piece of a cut pair (the pair
      ``span_pair[c + 1]``), the last CTA that holds a piece of it; -1 everywhere else.

    A piece that starts at its pair's tile 0 leaves its partial result in slot ``2 c + 1``, one
    that continues a pair in slot ``2 c``; an uncut pair needs no slot. So the pieces of the cut
    pair that starts in CTA ``c`` are, in order, in slots ``2 c + 1, 2 (c + 1), 2 (c + 2), ...,
    2 merge_last[c]``.

    The other fields are static: what the schedule was built for.
    """

    span_pair: jax.Array
    span_tile: jax.Array
    merge_last: jax.Array
    batch: int = dataclasses.field(metadata={"static": True})
    num_q_heads: int = dataclasses.field(metadata={"static": True})
    num_kv_heads: int = dataclasses.field(metadata={"static": True})
    head_dim: int = dataclasses.field(metadata={"static": True})
    kv_dtype: str = dataclasses.field(metadata={"static": True})
    page_size: int = dataclasses.field(metadata={"static": True})
    q_len: int = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(metadata={"static": True})

    @property
    def num_ctas(self) -> int:
        return self.merge_last.shape[-1]
