"""What decode_attention refuses, and with which words."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jax_hpc.ops.decode_attention import decode_attention
from tests.support.attention_truth import BF16, E4M3
from tests.support.decode_calls import schedule_for

F32 = np.dtype(np.float32)


def good() -> dict[str, Any]:
    pages = np.zeros((3, 2, 16, 8), BF16)
    return {
        "q": np.zeros((2, 1, 4, 8), BF16),
        "k_pages": pages,
        "v_pages": pages,
        "page_table": np.zeros((2, 2), np.int32),
        "kv_lens": np.zeros(2, np.int32),
    }


def good_fp8() -> dict[str, Any]:
    call = good()
    call["k_pages"] = call["v_pages"] = np.zeros((3, 2, 16, 8), E4M3)
    return call


ones = functools.partial(np.ones, dtype=F32)
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "q rank": ({"q": ones((2, 8))}, ValueError, "'q' must have shape [B, S, Hq, D]"),
    "q type": ({"q": 3}, TypeError, "'q' must be an array of shape [B, S, Hq, D], got int"),
    "q dtype": ({"q": ones((2, 1, 4, 8)).astype(np.float16)}, TypeError, "got float16"),
    "S": ({"q": ones((2, 9, 4, 8))}, ValueError, "'q' must be of 1 <= S <= 8, got S = 9"),
    "Hq": (
        {"q": ones((2, 1, 3, 8))},
        ValueError,
        "'q' must be of query heads in a multiple of Hkv = 2, got Hq = 3",
    ),
    "D": ({"q": ones((2, 1, 4, 16))}, ValueError, "[P, Hkv, N, D] with D = 16 from 'q'"),
    "v shape": ({"v_pages": ones((4, 2, 16, 8))}, ValueError, "'v_pages' must have shape"),
    "v dtype": ({"v_pages": ones((3, 2, 16, 8))}, TypeError, "'v_pages' must be bfloat16"),
    "table dtype": ({"page_table": ones((2, 2))}, TypeError, "'page_table' must be int32"),
    "table batch": (
        {"page_table": np.zeros((3, 2), np.int32)},
        ValueError,
        "'page_table' must have shape [B, M] with B = 2 from 'q', got (3, 2)",
    ),
    "lens": ({"kv_lens": np.zeros(3, np.int32)}, ValueError, "'kv_lens' must have shape [B]"),
    "lens dtype": ({"kv_lens": ones(2)}, TypeError, "'kv_lens' must be int32, got float32"),
    "sinks": ({"sinks": ones(2)}, ValueError, "'sinks' must have shape [Hq] with Hq = 4"),
    "sinks dtype": ({"sinks": np.ones(4, np.int32)}, TypeError, "'sinks' must be float32"),
    "scale": ({"scale": float("nan")}, ValueError, "'scale' must be finite, got nan"),
    "scale type": ({"scale": ones(())}, TypeError, "'scale' must be a Python number"),
    "window": ({"window": 0}, ValueError, "'window' must be window >= 1, got 0"),
    "window type": ({"window": 1.5}, TypeError, "'window' must be a Python int"),
    "cap": ({"logit_cap": 0.0}, ValueError, "'logit_cap' must be None or finite and > 0"),
    "splits": ({"num_splits": 0}, ValueError, "'num_splits' must be None, 'static' or num_spl"),
    "splits type": ({"num_splits": "dynamic"}, TypeError, "None, 'static' or a Python int"),
    "k_scale": ({"k_scale": 1.0}, ValueError, "'k_scale' must be None on a cache of bfloat16"),
    "q_scale": ({"q_scale": ones((2, 1, 4))}, ValueError, "'q_scale' must be float32 [B, S, Hq]"),
    "fp8 q": (
        {"q": np.zeros((2, 1, 4, 8), E4M3), "q_scale": ones((2, 1, 4))},
        TypeError,
        "'q' must be bfloat16 or float32 on a cache of bfloat16, got float8_e4m3fn",
    ),
    "implementation": ({"implementation": "gpu"}, ValueError, "one of 'auto', 'cuda', 'xla'"),
    "cuda": ({"implementation": "cuda"}, NotImplementedError, "no CUDA kernel for this call"),
    "schedule": ({"schedule": 3}, TypeError, "'schedule' must be a DecodeSchedule"),
}
BAD_FP8: dict[str, tuple[Any, type[Exception], str]] = {
    "no q_scale": (
        {"q": np.zeros((2, 1, 4, 8), E4M3)},
        ValueError,
        "with fp8 q, and None otherwise, got None with q of float8_e4m3fn",
    ),
    "q_scale shape": (
        {"q": np.zeros((2, 1, 4, 8), E4M3), "q_scale": ones((2, 4))},
        ValueError,
        "'q_scale' must have shape [B, S, Hq]",
    ),
    "k_scale rank": (
        {"k_scale": ones((2, 2))},
        ValueError,
        "'k_scale' must be of shape [] or [Hkv] or [P, Hkv, N], got (2, 2)",
    ),
    "k_scale heads": ({"k_scale": ones(3)}, ValueError, "'k_scale' must have shape [Hkv]"),
    "k_scale dtype": (
        {"k_scale": np.ones(2, BF16)},
        TypeError,
        "'k_scale' must be float32, got bfloat16",
    ),
    "v_scale rank": (
        {"v_scale": ones((3, 2, 16))},
        ValueError,
        "'v_scale' must be of shape [] or [Hkv], got (3, 2, 16)",
    ),
}


@pytest.mark.parametrize("name", [*BAD, *BAD_FP8])
def test_rejects_bad_arguments(name):
    changed, error, words = (BAD | BAD_FP8)[name]
    call = {**(good_fp8() if name in BAD_FP8 else good()), **changed}
    with pytest.raises(error, match="^decode_attention: ") as caught:
        decode_attention(**call)
    assert words in str(caught.value)


SCHEDULE_MISMATCH = {
    "num_q_heads": (8, "4 as in this call, got 8"),
    "num_kv_heads": (4, "2 as in this call, got 4"),
    "head_dim": (64, "8 as in this call, got 64"),
    "kv_dtype": (F32, "'bfloat16' as in this call, got 'float32'"),
    "page_size": (64, "16 as in this call, got 64"),
    "q_len": (2, "1 as in this call, got 2"),
    "window": (30, "None as in this call, got 30"),
}


@pytest.mark.parametrize("field", SCHEDULE_MISMATCH)
def test_rejects_another_calls_schedule(field):
    value, words = SCHEDULE_MISMATCH[field]
    call = good()
    # Only the static fields matter here: no need to compute the arrays.
    schedule = jax.eval_shape(lambda: schedule_for(list(call.values()), **{field: value}))
    with pytest.raises(ValueError, match=f"'schedule.{field}' must be {words}"):
        decode_attention(**call, schedule=schedule)


def test_rejects_another_batchs_schedule_and_splits():
    call = good()
    args = list(call.values())
    with pytest.raises(ValueError, match="'schedule.batch' must be 2 as in this call, got 3"):
        other = jax.eval_shape(lambda: schedule_for([*args[:4], np.zeros(3, np.int32)]))
        decode_attention(**call, schedule=other)
    with pytest.raises(ValueError, match="'num_splits' must be None with a schedule"):
        schedule = jax.eval_shape(lambda: schedule_for(args))
        decode_attention(**call, schedule=schedule, num_splits="static")
