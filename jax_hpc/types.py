"""Names shared by every operator.

Axis letters used in shapes throughout the library:

| letter | meaning                                   | letter | meaning                    |
|--------|-------------------------------------------|--------|----------------------------|
| T      | token rows                                | P      | pages of a KV cache        |
| B      | sequences                                 | N      | tokens per page            |
| S      | query tokens per sequence in decode       | M      | width of a page table      |
| H      | hidden size                               | E      | experts                    |
| Hq     | query heads                               | K      | experts chosen per token   |
| Hkv    | key/value heads                           | I      | expert intermediate size   |
| G      | Hq / Hkv                                  | V      | vocabulary                 |
| D      | head dimension                            | L      | layers                     |
"""

import dataclasses
from typing import Literal, get_args

Implementation = Literal["auto", "cuda", "xla"]
"""Which form of an operator runs.

- ``"auto"``: the CUDA kernel where it can take the case and is not measured to be the slower
  form, else the XLA form; where no kernel can take it, a GPU's user is told once, by
  :class:`FallbackWarning`.
- ``"cuda"``: the kernel, or ``NotImplementedError`` saying why it cannot.
- ``"xla"``: the jax.numpy / XLA form, on every platform.
"""

IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)


class FallbackWarning(UserWarning):
    """An operator runs on its XLA form on a GPU because no kernel takes the case."""


@dataclasses.dataclass(frozen=True)
class Implementations:
    """The choice of form for each operator of a model."""

    attention: Implementation = "auto"
    moe: Implementation = "auto"
    router: Implementation = "auto"
    norm: Implementation = "auto"
