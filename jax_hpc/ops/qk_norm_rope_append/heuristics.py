"""Decisions of qk_norm_rope_append."""

AUTO_TAKES_KERNEL = False
"""Whether "auto" takes the kernel. It agrees with the jax.numpy form in an emulation on the host,
but has not run within a program on a GPU yet: until then only "cuda" does."""
