"""Shared by all tests: four host devices, strict promotion, a seed per test."""

import os
import zlib

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import jax  # noqa: E402  (after XLA_FLAGS, which JAX reads when it first makes a backend)
import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers seeded by the test's own id: stable, and different for each test."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
