"""The shapes that the router's GPU tests run: between them they take every kernel and tile."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.operator_calls import ROUTER_PATHS
from tests.support.router_products import SHAPES

ROOT = Path(__file__).parents[2]
H200_SMS = 132

# Prints, for every line "T H E terms", what the launcher chooses: kernel, tile, cluster.
PROGRAM = """
#include <iostream>
#include "router_gemm/heuristics.h"

int main() {
  jax_hpc::router_gemm::Problem p;
  while (std::cin >> p.tokens >> p.hidden >> p.experts >> p.terms) {
    const auto c = jax_hpc::router_gemm::choose(p, SMS);
    const bool tiled = c.kernel == jax_hpc::router_gemm::Kernel::kTiled;
    std::cout << (tiled ? "tiled " : "stream ") << c.expert_tile << " " << c.token_tile << " "
              << c.cluster << "\\n";
  }
}
"""

Choice = tuple[str, int, int, int]


@pytest.fixture(scope="module")
def choose(tmp_path_factory: pytest.TempPathFactory):
    """choose(problems): the kernel, experts and tokens of a CTA, and cluster of each problem."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on PATH: the launcher's header includes CUDA's")
    folder = tmp_path_factory.mktemp("choose")
    (folder / "choose.cpp").write_text(PROGRAM)
    command = [nvcc, "-std=c++20", f"-DSMS={H200_SMS}", f"-I{ROOT / 'cuda'}"]
    command += [str(folder / "choose.cpp"), "-o", str(folder / "choose")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

    def run(problems: list[tuple[int, int, int, int]]) -> list[Choice]:
        lines = "\n".join(" ".join(map(str, problem)) for problem in problems)
        said = subprocess.run(
            [str(folder / "choose")], input=lines, capture_output=True, text=True, timeout=60
        ).stdout.splitlines()
        assert len(said) == len(problems)
        return [(kernel, *map(int, sizes)) for kernel, *sizes in map(str.split, said)]

    return run


def instances(terms: int) -> set[tuple[int, int]]:
    """Experts and tokens of every tile that the tiled kernel is compiled for."""
    source = (ROOT / "cuda" / "router_gemm" / "launch_terms.cuh").read_text()
    found = {}
    for name in ("TILES", "WIDEST_TILE"):
        (line,) = re.findall(rf"#define JAX_HPC_{name}\(TILE\)(.*)", source)
        found[name] = {(int(e), int(t)) for e, t in re.findall(r"TILE\((\d+), (\d+)\)", line)}
        assert found[name], line
    return found["TILES"] | (found["WIDEST_TILE"] if terms < 3 else set())


@pytest.mark.parametrize("terms", [1, 2, 3])
def test_every_tile_is_chosen_by_a_shape(choose, terms: int) -> None:
    chosen = choose([(*shape, terms) for shape in SHAPES])
    tiles = {(experts, tokens) for kernel, experts, tokens, _ in chosen if kernel == "tiled"}
    assert tiles == instances(terms)
    streams = {(experts, tokens) for kernel, experts, tokens, _ in chosen if kernel == "stream"}
    assert streams == {(16, 8), (16, 16)}
    for kernel in ("tiled", "stream"):
        assert {cluster for name, *_, cluster in chosen if name == kernel} >= {1, 8}


def test_launch_tests_take_clusters_and_large_tiles(choose) -> None:
    names = list(ROUTER_PATHS)
    sizes = [ROUTER_PATHS[name] for name in names]
    chosen = choose([(s["tokens"], s["hidden"], s["experts"], 2) for s in sizes])
    kinds = {
        name: (kernel, tokens, cluster > 1)
        for name, (kernel, _, tokens, cluster) in zip(names, chosen, strict=True)
    }
    assert kinds == {
        "few tokens": ("stream", 8, False),
        "few tokens, cluster": ("stream", 8, True),
        "64 tokens, cluster": ("tiled", 64, True),
        "many tokens": ("tiled", 128, False),
        "unaligned rows": ("stream", 16, False),
    }
