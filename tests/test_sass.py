"""The machine code of the kernels: the instructions they are written for, and nothing spilled."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from jax_hpc import _registry

# Kernel -> instructions that its code must hold: without them it is correct and slow.
EXPECTED = {
    # wgmma, the copy engine, mbarriers, stores to the cluster
    "tiled_kernel": ("HGMMA", "UTMALDG", "SYNCS", "STAS"),
    "stream_kernel": ("HMMA.16816.F32.BF16", "SYNCS", "STAS"),
    "topk_register_kernel": ("ACQBULK", "REDUX.MAX", "REDUX.MIN"),  # overlap, warp-wide integers
    "topk_shared_kernel": ("ACQBULK", "REDUX.MAX", "REDUX.MIN"),
    # bf16 and f16 products from swizzled tiles that the copy engine brings.
    "attention_kernel": ("HMMA.16816.F32", "LDSM.16.MT88.4", "MOVM.16.MT88", "UTMALDG.4D"),
    "combine_kernel": ("ACQBULK",),
    "schedule_kernel": ("ACQBULK",),
    "probe_kernel": (),
}
# ptxas keeps a few uniform values on the stack outside the loops; an array there is a fault.
MOST_STACK_BYTES = 16


def tools() -> str:
    """A path with NVIDIA's cuobjdump and nvdisasm: of the wheels that the tests ask for first."""
    spec = importlib.util.find_spec("nvidia")
    folders = []
    for package in spec.submodule_search_locations or () if spec else ():
        for tool in Path(package).glob("*/bin/*"):
            if tool.name in ("cuobjdump", "nvdisasm"):
                tool.chmod(tool.stat().st_mode | 0o111)
                folders.append(str(tool.parent))
    return os.pathsep.join([*folders, os.environ["PATH"]])


@pytest.fixture(scope="module")
def library() -> str:
    extension = _registry.extension()
    if extension is None:
        pytest.skip(f"no extension: {_registry.why_no_extension()}")
    return extension.__file__


def dump(library: str, what: str) -> str:
    path = tools()
    tool = shutil.which("cuobjdump", path=path)
    assert tool is not None, "cuobjdump is missing: pip install nvidia-cuda-cuobjdump"
    environment = os.environ | {"PATH": path}
    done = subprocess.run([tool, what, library], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kernel_of(symbol: str) -> str:
    found = re.search(r"\d([a-z][a-z_]*_kernel)", symbol)
    assert found, f"a kernel's name ends with _kernel: {symbol}"
    return found[1]


def test_every_kernel_has_its_instructions(library: str) -> None:
    parts = re.split(r"Function : (\S+)", dump(library, "-sass"))
    code = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert {kernel_of(symbol) for symbol in code} == set(EXPECTED)
    for symbol, text in code.items():
        missing = [op for op in EXPECTED[kernel_of(symbol)] if op not in text]
        # Rows that are not 16-byte aligned are read without asynchronous copies.
        if kernel_of(symbol) == "stream_kernel" and "Lb1E" in symbol and "LDGSTS" not in text:
            missing.append("LDGSTS")
        assert not missing, f"{symbol} lacks {missing}"


def test_nothing_is_spilled(library: str) -> None:
    usage = dump(library, "-res-usage")
    found = re.findall(r"Function (\S+?):\s*\n.*?STACK:(\d+)", usage)
    assert len(found) >= len(EXPECTED)
    spilled = {symbol: int(size) for symbol, size in found if int(size) > MOST_STACK_BYTES}
    assert not spilled, spilled


def test_only_hopper_code_is_shipped(library: str) -> None:
    assert set(re.findall(r"sm_\w+", dump(library, "--list-elf"))) == {"sm_90a"}
    assert "ptx" not in dump(library, "--list-ptx").lower().replace("no ptx", "")
