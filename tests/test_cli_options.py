"""The command line refuses what cannot work before it looks at a checkpoint."""

import pytest

import jax_hpc
from jax_hpc import cli, cli_generate


@pytest.mark.parametrize(
    ("option", "kernels", "gpus", "unusable", "reason"),
    [
        ("router", ("router_gemm",), (), None, "no CUDA kernel for router_topk in this version"),
        ("router", ("router_topk",), (), None, "no CUDA device"),
        ("moe", (), ("a GPU",), None, "no CUDA kernel for fused_moe in this version"),
        ("moe", ("fused_moe",), (), None, "no CUDA device"),
        ("moe", ("fused_moe",), ("a GPU",), "built without CUDA", "built without CUDA"),
    ],
)
def test_kernels_that_cannot_run_are_refused_before_loading(
    option: str,
    kernels: tuple[str, ...],
    gpus: tuple[str, ...],
    unusable: str | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, operator in jax_hpc._registry.OPERATORS.items():
        monkeypatch.setattr(operator, "kernel", "a kernel" if name in kernels else None)
    monkeypatch.setattr(cli_generate._registry, "gpus", lambda: gpus)
    monkeypatch.setattr(cli_generate._registry, "unusable_reason", lambda: unusable)
    assert (
        cli.main(["generate", "--model", "nowhere", "--prompt", "x", f"--{option}", "cuda"]) == 2
    )
    err = capsys.readouterr().err
    words = f"generate: --{option} cuda cannot run here: {reason}; use --{option} auto"
    assert err.startswith(f"jax-hpc: error: {words}") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["generate", "--prompt", "x"], "required: --model"),
        (["generate", "--model", "x"], "one of the arguments --prompt --chat is required"),
        (
            ["generate", "--model", "x", "--prompt", "x", "--moe", "triton"],
            "invalid choice: 'triton'",
        ),
    ],
)
def test_usage_errors_exit_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2 and message in capsys.readouterr().err
