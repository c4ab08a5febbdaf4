"""Root-mean-square norm of rows, with the addition of a residual before it."""

from jax_hpc.ops.rms_norm.api import rms_norm
from jax_hpc.ops.rms_norm.signature import NormOut

__all__ = ["NormOut", "rms_norm"]
