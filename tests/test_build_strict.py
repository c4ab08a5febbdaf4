"""The build stops where ptxas serialises warpgroup products."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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


def test_the_kernels_are_built_with_it() -> None:
    """CMake compiles every kernel through the check where warnings are errors, as make asks."""
    assert "CUDA_COMPILER_LAUNCHER" in (ROOT / "CMakeLists.txt").read_text()
    assert "-C cmake.define.JAX_HPC_WERROR=ON" in (ROOT / "Makefile").read_text()
