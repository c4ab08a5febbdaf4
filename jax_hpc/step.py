"""What one forward step of a model sees: its token rows and where they live in the cache."""

import dataclasses

import jax

from jax_hpc.ops.decode_attention import DecodeSchedule


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """Token rows of one step, for decode (every sequence has S rows) or prefill (ragged rows).

    tokens, positions: int32 ``[T]``. Rows of no sequence hold any valid token id.
    slots: int32 ``[T]``, where each row's K and V go; -1 writes nothing and routes to no expert.
    page_table: int32 ``[B, M]``; kv_lens: int32 ``[B]``, counting the rows of this step.
    q_starts, q_lens: int32 ``[B]``, prefill only: sequence b owns rows
        ``q_starts[b] .. q_starts[b] + q_lens[b]``.
    max_q_len: static, the bound of q_lens in prefill; 0 in decode.
    schedule: work split of decode attention, built once per step and shared by the layers.
    """

    tokens: jax.Array
    positions: jax.Array
    slots: jax.Array
    page_table: jax.Array
    kv_lens: jax.Array
    q_starts: jax.Array | None = None
    q_lens: jax.Array | None = None
    schedule: DecodeSchedule | None = None
    max_q_len: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def is_prefill(self) -> bool:
        return self.q_starts is not None

    @property
    def active(self) -> jax.Array:
        """bool ``[T]``: rows that belong to a running sequence."""
        return self.slots >= 0
