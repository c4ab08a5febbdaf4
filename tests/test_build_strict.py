"""The build stops where ptxas serialises warpgroup products."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Programs of the Python that runs the tests first: cmake and ninja are packages of the build.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
STRICT = [sys.executable, str(ROOT / "scripts" / "strict_nvcc.py")]

# A loop of products as our kernels run it; with TOUCHED, a product's registers change before its
# wait.
KERNEL = """
#include "common/ptx.cuh"
#include "common/wgmma.cuh"

__global__ void products_kernel(float* out, uint64_t a, uint64_t b, int n) {
  float sums[32] = {};
  for (int i = 0; i < n; ++i) {
    jax_hpc::wgmma_fence();
    for (int k = 0; k < 4; ++k) {
      jax_hpc::Wgmma<64>::multiply(sums, a + 2 * k, b + 2 * k, i + k > 0);
    }
    jax_hpc::wgmma_commit();
    if (TOUCHED && n == 7) {
      for (float& sum : sums) sum *= 2.0f;
    }
    jax_hpc::wgmma_wait<0>();
  }
  for (int i = 0; i < 32; ++i) out[threadIdx.x * 32 + i] = sums[i];
}
"""


def compiled(folder: Path, touched: int) -> subprocess.CompletedProcess[str]:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    source = folder / "products.cu"
    source.write_text(KERNEL)
    flags = ["-std=c++20", "-O3", "--generate-code=arch=compute_90a,code=[sm_90a]"]
    flags += [f"-DTOUCHED={touched}", f"-I{ROOT / 'cuda'}", "--Werror=all-warnings"]
    command = [*STRICT, nvcc, *flags, "-c", str(source)]
    output = ["-o", str(folder / "products.o")]
    return subprocess.run([*command, *output], capture_output=True, text=True, timeout=120)


def test_serialised_products_stop_the_build(tmp_path: Path) -> None:
    done = compiled(tmp_path, 1)
    assert done.returncode == 1 and "Potential Performance Loss" in done.stderr, done.stderr
    assert "error: ptxas serialises warpgroup products" in done.stderr


def test_a_pipeline_that_stays_one_does_not(tmp_path: Path) -> None:
    done = compiled(tmp_path, 0)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("said", "status", "want"),
    [
        ("ptxas info : (C7514) Potential Performance Loss: wgmma ...", 0, 1),
        ("ptxas info : (C7517) warpgroup.wait is injected in around line 3", 0, 1),
        ("ptxas info : Used 168 registers", 0, 0),
        ("error: expected a ';'", 2, 2),
    ],
)
def test_status(said: str, status: int, want: int) -> None:
    program = f"import sys; print({said!r}, file=sys.stderr); sys.exit({status})"
    done = subprocess.run(
        [*STRICT, sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == want
    assert said in done.stderr


def test_messages_are_passed_on_as_they_come() -> None:
    program = "import sys; print('first', file=sys.stderr, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [*STRICT, sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stderr is not None and running.stdin is not None
        assert running.stderr.readline() == "first\n"  # the program has not ended
        running.stdin.close()
    assert running.returncode == 0


def configured(folder: Path, *options: str) -> list[str]:
    """The commands that compile the kernels, of a tree that CMake has just configured."""
    missing = [
        name for name in ("cmake", "ninja", "nvcc") if shutil.which(name, path=PATH) is None
    ]
    if missing or importlib.util.find_spec("nanobind") is None:
        pytest.skip(f"needs cmake, ninja, nvcc and nanobind; not on PATH: {missing}")
    import nanobind

    environment = os.environ | {"PATH": PATH}
    command = ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", *options]
    command += ["-DSKBUILD_PROJECT_VERSION=0", f"-DPython_EXECUTABLE={sys.executable}"]
    command += [f"-Dnanobind_DIR={nanobind.cmake_dir()}"]
    for run in (command, ["ninja", "-C", str(folder), "-t", "commands", "jax_hpc_kernels"]):
        done = subprocess.run(run, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
    commands = [line for line in done.stdout.splitlines() if re.search(r"\.cu(\s|$)", line)]
    assert len(commands) >= len(list((ROOT / "cuda").glob("r*/*.cu"))) > 0, done.stdout
    return commands


def test_every_kernel_is_compiled_through_it(tmp_path: Path) -> None:
    """Where warnings are errors, and only there."""
    strict = configured(tmp_path / "strict", "-DJAX_HPC_WERROR=ON")
    assert not [line for line in strict if not re.search(r"strict_nvcc\.py \S*nvcc ", line)]
    assert not [line for line in strict if "--Werror=all-warnings" not in line]
    plain = configured(tmp_path / "plain")
    assert not [line for line in plain if "strict_nvcc.py" in line or "Werror" in line]


@pytest.mark.parametrize("target", ["wheel", "install", "kernel-tests"])
def test_make_asks_for_it(target: str) -> None:
    """In the commands that it would run for a build; the option is scikit-build's or CMake's."""
    if shutil.which("make") is None:
        pytest.skip("no make on PATH")
    command = ["make", "--dry-run", "--always-make", "-C", str(ROOT), target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.search(r"(-D|-C cmake\.define\.)JAX_HPC_WERROR=ON\b", done.stdout), done.stdout
