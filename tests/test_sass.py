"""The machine code of the kernels: the instructions they are written for, and nothing spilled."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from jax_hpc import _registry

# Of the wide products of experts: weights and rows that the copy engine brings.
WIDE = ("UTMALDG.5D", "UTMALDG.2D", "SYNCS", "USETMAXREG", "ACQBULK", "PREEXIT")
# Kernel -> instructions that its code must hold: without them it is correct and slow.
EXPECTED = {
    # wgmma, the copy engine, mbarriers, stores to the cluster, leave to start for the next kernel
    "tiled_kernel": ("HGMMA", "UTMALDG", "SYNCS", "STAS", "PREEXIT"),
    "stream_kernel": ("HMMA.16816.F32.BF16", "SYNCS", "STAS", "PREEXIT"),
    "topk_cta_kernel": ("ACQBULK", "REDUX.MAX", "REDUX.SUM"),  # overlap, warp-wide integers
    "topk_warp_kernel": ("ACQBULK", "REDUX.MAX", "REDUX.MIN"),
    "topk_shared_kernel": ("ACQBULK", "REDUX.MAX", "REDUX.MIN"),
    # bf16 and f16 products from swizzled tiles that the copy engine brings.
    "attention_kernel": ("HMMA.16816.F32", "LDSM.16.MT88.4", "MOVM.16.MT88", "UTMALDG.4D"),
    "combine_kernel": ("ACQBULK",),  # overlap
    "schedule_kernel": ("ACQBULK",),
    # 16 bytes at a time: copies that no register waits for, loads from them, stores
    "prologue_kernel": ("LDGSTS.E.BYPASS", "LDS.128", "STG.E.128", "MUFU.RSQ"),
    "prepare_kernel": ("MATCH.ANY", "F2FP.SATFINITE.E4M3", "PREEXIT"),
    # Counts go to the other CTAs of a cluster.
    "prepare_cluster_kernel": (
        *("MATCH.ANY", "F2FP.SATFINITE.E4M3", "PREEXIT"),
        *("STAS", "UCGABAR_ARV", "UCGABAR_WAIT"),
    ),
    "count_kernel": ("ATOMS", "F2FP.SATFINITE.E4M3", "PREEXIT"),
    "place_kernel": ("ACQBULK", "MATCH.ANY", "PREEXIT"),
    "sort_kernel": ("ACQBULK", "PREEXIT", "LDG.E.128", "STG.E.128"),
    # Products of weights that the copy engine brings.
    "gate_up_kernel": ("UTMALDG", "LDGSTS", "SYNCS", "ACQBULK", "PREEXIT"),
    "down_kernel": ("UTMALDG", "SYNCS", "ACQBULK", "PREEXIT"),
    "down_pairs_kernel": ("QGMMA", "UTMALDG", "SYNCS", "ACQBULK", "PREEXIT"),
    "wide_gate_up_kernel": WIDE,
    "wide_down_kernel": WIDE,
    # Of blocks, where two CTAs of a cluster share a scale.
    "wide_row_gate_up_kernel": ("QGMMA.64x128x32", "STAS", "UCGABAR_ARV", "UCGABAR_WAIT", *WIDE),
    "wide_row_down_kernel": ("QGMMA.64x128x32", "STSM.16.M88.4", *WIDE),
    "reduce_kernel": ("ACQBULK", "LDG.E.128", "STG.E.128", "CCTL.E.RML2"),  # it discards
    # Warpgroup products of tiles in shared memory and of probabilities in registers.
    "prefill_kernel": ("UTMALDG.4D", "LDGSTS", "USETMAXREG", "ACQBULK"),
    "prefill_plan_kernel": ("PREEXIT",),
    # 16 bytes at a time; fp8
    "rms_norm_kernel": ("LDG.E.128", "STG.E.128", "MUFU.RSQ", "F2FP.SATFINITE.E4M3"),
    "probe_kernel": (),
}
# Kernel, of some template arguments (as mangled) -> what these instances need as well.
EXPECTED_OF_INSTANCES = {
    ("tiled_kernel", "ELi128EE"): ("USETMAXREG",),  # 128 tokens: registers change hands
    # Rows that are 16-byte aligned are read by asynchronous copies.
    ("stream_kernel", "Lb1E"): ("LDGSTS",),
    ("prologue_kernel", "Lb1ENS"): ("F2FP.SATFINITE.E4M3", "FMNMX.NAN", "STG.E.64"),
    # fp8 per tensor, in blocks, and bf16
    ("gate_up_kernel", "FormatE0E"): ("QGMMA",),
    ("gate_up_kernel", "FormatE1E"): ("QGMMA",),
    ("gate_up_kernel", "FormatE2E"): ("HGMMA",),
    # With one piece, weights are asked for before the index is there.
    ("gate_up_kernel", "ELi1ELNS"): ("UTMAPF.L2.5D",),
    ("down_kernel", "FormatE0E"): ("QGMMA",),
    ("down_kernel", "FormatE1E"): ("QGMMA",),
    ("down_kernel", "FormatE2E"): ("HGMMA",),
    ("sort_kernel", "FormatE0E"): ("F2FP.SATFINITE.E4M3",),
    ("sort_kernel", "FormatE1E"): ("F2FP.SATFINITE.E4M3",),
    ("wide_gate_up_kernel", "FormatE0E"): ("QGMMA.64x128x32", "QGMMA.64x192x32"),
    ("wide_gate_up_kernel", "FormatE2E"): ("HGMMA.64x128x16", "HGMMA.64x256x16", "STSM.16.MT88.4"),
    ("wide_down_kernel", "FormatE0E"): ("QGMMA.64x128x32", "QGMMA.64x192x32", "STSM.16.MT88.4"),
    ("wide_down_kernel", "FormatE2E"): ("HGMMA.64x128x16", "HGMMA.64x256x16"),
    ("prefill_kernel", "Bf16CacheE"): ("HGMMA", "tnspB"),
    ("prefill_kernel", "Fp8CacheE"): ("QGMMA", "LDSM.16.MT88.4", "STSM.16.M88.4"),
}
# What none of a kernel's code may hold: a fence of all memory costs as much as these kernels gain.
FORBIDDEN = {
    "tiled_kernel": ("MEMBAR",),
    "stream_kernel": ("MEMBAR",),
    "prepare_cluster_kernel": ("MEMBAR",),
    "prologue_kernel": ("LDL", "STL", "BAR.SYNC", " ST.E"),  # stores of no known memory
    "wide_gate_up_kernel": ("MEMBAR",),
    "wide_down_kernel": ("MEMBAR",),
    "wide_row_gate_up_kernel": ("MEMBAR",),
    "wide_row_down_kernel": ("MEMBAR",),
}
# Bytes of stack that an instance may have, where ptxas runs out of registers for a few values.
STACK = {
    # Scores, sums and a tile's own sums of 128 dimensions: 208 of 224 registers. What is spilled
    # is mostly of the cap's code.
    ("prefill_kernel", "Fp8CacheELi128EE"): 112,
    ("prefill_kernel", "Fp8CacheELi64EE"): 8,
    # The warp that copies 128 rows of tokens: a value, once a task.
    ("gate_up_kernel", "ILi128ELi1ELNS0_6FormatE0EE"): 8,
    # Three CTAs of seven warps, which take the registers of eight, so that a thread has 80: one
    # value that a task's results need.
    ("gate_up_kernel", "ILi64ELi1ELNS0_6FormatE0EE"): 8,
}


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
    seen = set()
    for symbol, text in code.items():
        kernel, needed = kernel_of(symbol), list(EXPECTED[kernel_of(symbol)])
        for instance, more in EXPECTED_OF_INSTANCES.items():
            if instance[0] == kernel and instance[1] in symbol:
                seen.add(instance)
                needed += more
        missing = [op for op in needed if op not in text]
        assert not missing, f"{symbol} lacks {missing}"
        found = [op for op in FORBIDDEN.get(kernel, ()) if op in text]
        assert not found, f"{symbol} holds {found}"
    assert seen == set(EXPECTED_OF_INSTANCES), "an instance's name is spelled otherwise"


def test_nothing_is_spilled(library: str) -> None:
    usage = dump(library, "-res-usage")
    found = re.findall(r"Function (\S+?):\s*\n.*?STACK:(\d+)", usage)
    assert len(found) >= len(EXPECTED)
    allowed = {
        symbol: size
        for symbol, _ in found
        for (kernel, instance), size in STACK.items()
        if kernel_of(symbol) == kernel and instance in symbol
    }
    assert len(allowed) == len(STACK), "an instance's name is spelled otherwise"
    spilled = {symbol: int(size) for symbol, size in found if int(size) > allowed.get(symbol, 0)}
    assert not spilled, spilled


def test_only_hopper_code_is_shipped(library: str) -> None:
    assert set(re.findall(r"sm_\w+", dump(library, "--list-elf"))) == {"sm_90a"}
    assert "ptx" not in dump(library, "--list-ptx").lower().replace("no ptx", "")
