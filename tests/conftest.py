"""Shared by all tests: four host devices, strict promotion, a seed per test, GPU tests."""

import os
import zlib

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import jax  # noqa: E402  (after XLA_FLAGS, which JAX reads when it first makes a backend)
import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")


def has_gpu() -> bool:
    return jax.default_backend() == "gpu"


class NamesAtOnce:
    """A failed test's name as soon as it has failed: a run that is cut off has no summary."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._reporter.write_line(f" {report.when} failed: {report.nodeid}")


@pytest.hookimpl(trylast=True)  # behind the terminal's own
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        config.pluginmanager.register(NamesAtOnce(reporter), "names at once")
    if has_gpu():
        # Operators without a kernel say so on a GPU; tests of that warning catch it themselves.
        config.addinivalue_line("filterwarnings", "ignore::jax_hpc.types.FallbackWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests need a Hopper GPU: skipped without one, unless JAX_HPC_REQUIRE_GPU is set."""
    hopper = has_gpu() and jax.devices()[0].compute_capability == "9.0"
    if hopper or os.environ.get("JAX_HPC_REQUIRE_GPU"):
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA Hopper GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers seeded by the test's own id: stable, and different for each test."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
