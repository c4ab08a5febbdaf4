"""decode_schedule as a JAX primitive."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_hpc._primitive import Kernel, Operator
from jax_hpc.ops.decode_attention.schedule import reference
from jax_hpc.ops.decode_attention.schedule.signature import Operands, Params, shape_rule


def _unsupported(operands: Operands, params: Params) -> str | None:
    """The public function bounds all sizes, and the kernel takes whatever passes it."""
    del operands, params
    return None


def _attributes(operands: Operands, params: Params) -> Mapping[str, Any]:
    del operands
    return {
        "num_kv_heads": np.int32(params.num_kv_heads),
        "q_len": np.int32(params.q_len),
        "window": np.int32(params.window or 0),
        "fp8_cache": params.fp8_cache,
    }


KERNEL = Kernel(
    target="jax_hpc.decode_schedule.v1",
    unsupported=_unsupported,
    attributes=_attributes,
)

OPERATOR = Operator(
    "decode_schedule",
    shape_rule=shape_rule,
    reference=reference.decode_schedule,
    kernel=KERNEL,
    gradient="it maps integer lengths to an integer plan",
)
