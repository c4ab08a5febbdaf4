"""Prefill batches of the recorded baselines, shared by tests and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """Equal chunks of several sequences, each on tokens that are in the cache already."""

    name: str
    batch: int
    q_len: int
    context: int = 0

    @property
    def tokens(self) -> int:
        return self.batch * self.q_len

    @property
    def kv_len(self) -> int:
        return self.context + self.q_len


CASES = (
    Case("1x8K", batch=1, q_len=8192),
    Case("1x16K", batch=1, q_len=16384),
    Case("1x1K on 2K", batch=1, q_len=1024, context=2048),
    Case("16x512 on 8K", batch=16, q_len=512, context=8192),
    Case("8x2K", batch=8, q_len=2048),
)
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 64, 8, 128, 64
