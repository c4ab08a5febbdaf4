"""A schedule that fits the arguments of a decode_attention call."""

from typing import Any

from jax_hpc.ops.decode_attention import decode_schedule


def schedule_for(args: Any, **changed: Any) -> Any:
    """decode_schedule for (q, k_pages, v_pages, page_table, kv_lens), with some sizes changed."""
    q, k_pages, _, _, kv_lens = args
    sizes = {
        "num_q_heads": q.shape[2],
        "num_kv_heads": k_pages.shape[1],
        "head_dim": q.shape[3],
        "kv_dtype": k_pages.dtype,
        "page_size": k_pages.shape[2],
        "q_len": q.shape[1],
    }
    return decode_schedule(kv_lens, **{**sizes, "num_ctas": 3, **changed})
