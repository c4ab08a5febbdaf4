"""Pages of a cache in no order, as a pool that sequences come from and go to leaves them."""

import numpy as np


def scattered_pages(count: int) -> np.ndarray:
    """int32 ``[count]``, each page once, the same for all layers, as a model's page table is.

    Made by the host: on a device a random order is a sort, which takes a second to compile.
    """
    return np.random.default_rng(count).permutation(count).astype(np.int32)
