"""Rotary position tables."""

import numpy as np


def rope_table(num_positions: int, rotary_dim: int, theta: float) -> np.ndarray:
    """Cosines and sines of rotary position embedding, ``[num_positions, rotary_dim]`` float32.

    A row holds cos for the ``rotary_dim / 2`` frequencies ``theta^(-2i / rotary_dim)``, then sin;
    the same table serves half-split and interleaved rotation. Angles are formed in float64: in
    float32 the angle of position 100,000 is off by up to 4e-3 radians.

    Raises:
      ValueError: rotary_dim is odd, or theta is not above 0.

    Source: Su et al., RoFormer (arXiv 2104.09864).
    """
    if rotary_dim % 2:
        raise ValueError(f"rope_table: argument 'rotary_dim' must be even, got {rotary_dim}")
    if theta <= 0:
        raise ValueError(f"rope_table: argument 'theta' must be > 0, got {theta}")
    frequencies = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    angles = np.arange(num_positions, dtype=np.float64)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
