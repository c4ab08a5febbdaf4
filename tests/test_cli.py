"""The command line: what it prints, what it makes of its options, and its one-line errors."""

import dataclasses
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import jax_hpc
from jax_hpc import cli, cli_generate
from jax_hpc.generate import Burst, GenerationStats
from jax_hpc.models import registry
from tests.support import tiny_checkpoint as tiny

END = 1
WORDS = ["<pad>", "<end>", "▁one", "▁two", "▁three", "▁", "<0xC3>", "<0xA9>"]


class FakeGenerator:
    """Stands for the engine: says the given bursts and keeps what it was asked."""

    bursts: Sequence[Any] = ()
    calls: list[dict[str, Any]] = []

    def __init__(self, model: Any, **options: Any):
        self.model = model
        self.options = options
        self.kv_cache_dtype = options["kv_cache_dtype"]
        self.k_scales_per_token = options["k_scales_per_token"]
        self.stats = GenerationStats()

    def stream(self, prompts: list[list[int]], **options: Any) -> Iterator[Burst]:
        type(self).calls.append({"prompts": prompts, **options, **self.options})
        return self._run(prompts)

    def _run(self, prompts: list[list[int]]) -> Iterator[Burst]:
        batch = len(prompts)
        self.stats = GenerationStats(batch, sum(map(len, prompts)), compile_seconds=1.5)
        for tokens in self.bursts:
            yield Burst(np.array(tokens, np.int32).reshape(-1, batch), np.zeros(batch, bool))
        self.stats.new_tokens, self.stats.decode_steps = 8, 4
        self.stats.ttft_seconds, self.stats.decode_seconds = 0.02, 0.03
        self.stats.kv_tokens_read = 40 * batch


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeGenerator]:
    fake = type("Fake", (FakeGenerator,), {"bursts": [], "calls": []})
    monkeypatch.setattr(cli_generate, "Generator", fake)
    monkeypatch.setattr(cli_generate.jax, "default_backend", lambda: "cpu")
    return fake


@pytest.fixture
def model(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of the tiny model, with a tokenizer of a few words."""
    monkeypatch.setitem(registry.MODELS, "TinyForCausalLM", tiny.TinyModel)
    tiny.write(tmp_path, tiny.hf_config(), tiny.tensors(rng))
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="▁")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<pad>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    settings = {"chat_template": template, "eos_token": "<end>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def state_sampling(directory: Path, **settings: Any) -> None:
    (directory / "generation_config.json").write_text(json.dumps(settings))


def generate(model: Path, *options: str) -> int:
    return cli.main(["generate", "--model", str(model), *options])


# info


def test_info_prints_versions_devices_and_operators(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    facts = jax_hpc.info()
    assert f"version    {facts['version']}\n" in out and facts["jaxlib"] in out
    assert all(f"  {name} " in out for name in facts["operators"])


def test_info_as_json_is_what_the_library_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == jax_hpc.info()


def test_info_names_a_gpu_and_a_missing_extension(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = {"id": 0, "kind": "NVIDIA H200", "compute_capability": "9.0"}
    facts = jax_hpc.info() | {"devices": [gpu, gpu | {"id": 1}], "extension": "none: no nvcc"}
    monkeypatch.setattr(jax_hpc, "info", lambda: facts)
    cli.main(["info"])
    out = capsys.readouterr().out
    assert "devices    id 0, kind NVIDIA H200, compute_capability 9.0\n           id 1," in out
    assert "extension  none: no nvcc\n" in out


# generate


def test_single_prompt_streams_and_ends_with_figures(
    model: Path, engine: type[FakeGenerator], capsys: pytest.CaptureFixture[str]
) -> None:
    engine.bursts = [[2], [3, 6], [7, 4, END, -1]]
    assert generate(model, "--prompt", "one two") == 0
    captured = capsys.readouterr()
    text, figures = captured.out.split("\n\n")
    assert text == " one twoé three"
    assert figures == (
        "2 prompt tokens, 8 new tokens, TTFT 20.0 ms, TPOT 7.50 ms, 160.0 tokens/s "
        "(compiled in 1.5 s before)\n"
    )
    assert "loading weights: 100% of" in captured.err and "compiling: " in captured.err


def test_text_arrives_burst_by_burst(
    model: Path, engine: type[FakeGenerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def bursts() -> Iterator[list[int]]:
        for token in (2, 3):
            events.append(f"burst {token}")
            yield [token]

    engine.bursts = bursts()  # type: ignore[assignment]
    monkeypatch.setattr("builtins.print", lambda *a, **_: events.extend(map(str, a)))
    assert generate(model, "--prompt", "one") == 0
    kept = [event for event in events if event.startswith(("burst", " "))]
    assert kept == ["burst 2", " one", "burst 3", " two"]


def test_several_prompts_are_a_labelled_batch(
    model: Path, engine: type[FakeGenerator], capsys: pytest.CaptureFixture[str]
) -> None:
    engine.bursts = [[[2, 3]], [[END, 4], [-1, 2]]]
    assert generate(model, "--prompt", "one", "--prompt", "two one", "--seed", "5") == 0
    out = capsys.readouterr().out
    assert out.startswith("[1] one\n one\n\n[2] two one\n two three one\n\n")
    assert engine.calls[0]["prompts"] == [[2], [3, 2]]
    assert engine.calls[0]["seeds"] == [5, 6]


def test_json_holds_text_tokens_and_figures(
    model: Path, engine: type[FakeGenerator], capsys: pytest.CaptureFixture[str]
) -> None:
    engine.bursts = [[[2, 3]], [[END, 4], [-1, 2]]]
    assert generate(model, "--prompt", "one", "--prompt", "two", "--json") == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    first, second = result["outputs"]
    assert (first["text"], first["tokens"], first["finish_reason"]) == (" one", [2, 1], "stop")
    assert (second["tokens"], second["finish_reason"]) == ([3, 4, 2], "length")
    assert result["stats"]["tpot_ms"] == pytest.approx(7.5)
    assert "gigabytes_per_second" not in result["stats"] and captured.err == ""


def test_a_fallback_is_one_line(
    model: Path,
    engine: type[FakeGenerator],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not Python's report of a warning, with the path and the source of a library's file."""

    class Falling(engine):
        def __init__(self, *arguments: Any, **options: Any):
            warnings.warn("moe runs on its XLA form", jax_hpc.FallbackWarning, stacklevel=1)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(cli_generate, "Generator", Falling)
    assert generate(model, "--prompt", "one") == 0
    assert "jax-hpc: note: moe runs on its XLA form\n" in capsys.readouterr().err


def test_bandwidth_is_stated_on_a_gpu(
    model: Path,
    engine: type[FakeGenerator],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def bytes_per_step(_: Any, *arguments: int) -> int:
        asked.append(arguments)
        return 30_000_000_000

    monkeypatch.setattr(tiny.TinyModel, "bytes_per_step", bytes_per_step, raising=False)
    monkeypatch.setattr(cli_generate.jax, "default_backend", lambda: "gpu")
    for dtype in ("fp8", "fp8-dynamic"):
        assert generate(model, "--prompt", "one", "--kv-cache-dtype", dtype) == 0
        assert "160.0 tokens/s, 4000 GB/s (" in capsys.readouterr().out
    # batch, tokens in the cache, bytes of one value, scales beside K
    assert asked == [(1, 10, 1, False), (1, 10, 1, True)]


def test_chat_goes_through_the_template(model: Path, engine: type[FakeGenerator]) -> None:
    assert generate(model, "--chat", "one", "--system", "two") == 0
    words = [WORDS[i] for i in engine.calls[0]["prompts"][0]]
    assert [word for word in words if word != "▁"] == [
        "▁two",
        "▁one",
    ]  # the roles are unknown words


def test_options_reach_the_engine(model: Path, engine: type[FakeGenerator]) -> None:
    options = "--max-new-tokens 7 --page-size 32 --kv-cache-dtype fp8 --burst 4 --early-exit"
    options += " --prefill-chunk 64"
    assert generate(model, "--prompt", "one", *options.split()) == 0
    call = engine.calls[0]
    assert call["prefill_chunk"] == 64
    assert (call["max_new_tokens"], call["page_size"], call["burst"]) == (7, 32, 4)
    assert np.dtype(call["kv_cache_dtype"]).name == "float8_e4m3fn" and call["early_exit"] is True
    assert call["eos_ids"] == (END,)
    assert generate(model, "--prompt", "one", "--ignore-eos") == 0
    call = engine.calls[1]
    assert (call["max_new_tokens"], call["kv_cache_dtype"], call["eos_ids"]) == (256, None, ())


def test_format_and_the_note_on_scales_of_an_fp8_cache(
    model: Path,
    engine: type[FakeGenerator],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = []

    def load_model(*arguments: Any, quantize: Any, **options: Any) -> Any:
        asked.append(quantize)
        return load(*arguments, **options)

    load = cli_generate.load_model
    monkeypatch.setattr(cli_generate, "load_model", load_model)
    for option in ("", "--quantize fp8", "--quantize fp8-tensor", "--quantize none"):
        assert generate(model, "--prompt", "one", *option.split()) == 0
    assert asked == [None, "fp8_block", "fp8_tensor", "none"]
    assert "note" not in capsys.readouterr().err
    assert generate(model, "--prompt", "one", "--kv-cache-dtype", "fp8") == 0
    note = "jax-hpc: note: the checkpoint has no scales for an fp8 KV cache: K and V are stored"
    assert note in capsys.readouterr().err
    assert generate(model, "--prompt", "one", "--kv-cache-dtype", "fp8-dynamic") == 0
    assert "note" not in capsys.readouterr().err


def test_implementations_reach_the_model(
    model: Path, engine: type[FakeGenerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Recording(tiny.TinyModel):
        def __init__(self, *arguments: Any, implementations: Any, **options: Any):
            seen.append(implementations)
            super().__init__(*arguments, **options)

    monkeypatch.setitem(registry.MODELS, "TinyForCausalLM", Recording)
    monkeypatch.setattr(cli_generate._registry, "gpus", lambda: ("a GPU",))
    monkeypatch.setattr(cli_generate._registry, "unusable_reason", lambda: None)
    monkeypatch.setattr(jax_hpc._registry.OPERATORS["fused_moe"], "kernel", "a kernel")
    generate(model, "--prompt", "one", "--attention", "xla", "--moe", "cuda", "--norm", "xla")
    assert dataclasses.astuple(seen[0]) == ("xla", "cuda", "auto", "xla")


@pytest.mark.parametrize(
    ("stated", "options", "want"),
    [
        ({}, "", {"temperature": 0.0}),
        ({"temperature": 0.6}, "", {"temperature": 0.0}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 2}, "",
         {"temperature": 0.6, "top_k": 2}),
        ({"do_sample": True, "temperature": 0.6}, "--greedy", {"temperature": 0.0}),
        ({"do_sample": True, "temperature": 0.6}, "--temperature 0", {"temperature": 0.0}),
        ({}, "--top-p 0.5", {"temperature": 1.0, "top_p": 0.5}),
        ({"temperature": 0.6}, "--min-p 0.1", {"temperature": 0.6, "min_p": 0.1}),
        ({"repetition_penalty": 1.5}, "", {"temperature": 0.0, "repetition_penalty": 1.5}),
        ({"do_sample": True}, "--repetition-penalty 2 --frequency-penalty 3 --presence-penalty 1",
         {"repetition_penalty": 2.0, "frequency_penalty": 3.0, "presence_penalty": 1.0}),
    ],
)  # fmt: skip
def test_sampling_is_the_checkpoints_under_the_options(
    stated: dict[str, Any],
    options: str,
    want: dict[str, float],
    model: Path,
    engine: type[FakeGenerator],
) -> None:
    state_sampling(model, **stated)
    assert generate(model, "--prompt", "one", *options.split()) == 0
    defaults = dict.fromkeys(("top_k", "min_p", "frequency_penalty", "presence_penalty"), 0.0)
    defaults |= dict.fromkeys(("temperature", "top_p", "repetition_penalty"), 1.0)
    got = engine.calls[0]["sampling"]
    for name, value in (defaults | want).items():
        assert np.asarray(getattr(got, name)) == pytest.approx([value]), name


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--prompt one --greedy --top-k 3", "--greedy excludes --top-k"),
        ("--prompt one --system two", "--system needs --chat"),
        ("--prompt one --top-p 2", "top_p"),
        ("--prompt one --max-new-tokens 0", "'max_new_tokens' must be >= 1, got 0"),
        ("--prompt one --burst 0", "'burst' must be >= 1, got 0"),
        ("--prompt one --prefill-chunk 8", "'prefill_chunk' must be >= 16, got 8"),
        ("--prompt \udcff", r"must be UTF-8 text, got '\udcff'"),
    ],
)
def test_bad_options_are_one_line_and_code_2(
    options: str,
    message: str,
    model: Path,
    engine: type[FakeGenerator],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert generate(model, *options.split()) == 2
    err = capsys.readouterr().err
    assert_one_error(err, message)
    assert "loading" not in err  # that may take minutes


def assert_one_error(err: str, message: str) -> None:
    errors = [line for line in err.splitlines() if not line.startswith("loading weights: ")]
    assert len(errors) == 1 and errors[0].startswith("jax-hpc: error: ") and message in errors[0]


def test_broken_checkpoints_are_one_line_and_code_2(
    model: Path, engine: type[FakeGenerator], capsys: pytest.CaptureFixture[str]
) -> None:
    for broken, message in [
        (
            lambda: (model / "tokenizer.json").unlink(),
            "no tokenizer.json there; generate needs one",
        ),
        (lambda: (model / "model.safetensors").write_bytes(b"x"), "not a safetensors file"),
        (lambda: (model / "config.json").write_text('{"architectures": ["X"]}'), "(X) not known"),
        (lambda: (model / "config.json").unlink(), "no config.json there"),
    ]:
        broken()
        assert generate(model, "--prompt", "one") == 2
        assert_one_error(capsys.readouterr().err, message)
    assert generate(model / "nowhere", "--prompt", "one") == 2
    assert_one_error(capsys.readouterr().err, "no such directory")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no config.json"):
        generate(tmp_path, "--prompt", "one", "--debug")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            NotImplementedError("fused_moe: no kernel\n"),
            2,
            "jax-hpc: error: fused_moe: no kernel\n",
        ),
        (RuntimeError("out of memory\nlong report"), 2, "jax-hpc: error: out of memory\n"),
        (TypeError("x must be\n bf16"), 2, "jax-hpc: error: TypeError: x must be bf16\n"),
        (OSError(), 2, "jax-hpc: error: OSError\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_every_way_to_fail_has_its_code(
    error: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(jax_hpc, "info", fail)
    assert cli.main(["info"]) == code
    assert capsys.readouterr().err == line


def test_faults_of_the_program_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_hpc, "info", lambda: {})
    with pytest.raises(KeyError):
        cli.main(["info"])


def test_module_runs_as_a_command_and_minds_a_closed_pipe() -> None:
    command = f"{sys.executable} -m jax_hpc info | head -c 0; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 141) and done.stderr == ""
    done = subprocess.run(
        [sys.executable, "-m", "jax_hpc", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{jax_hpc.__version__}\n"
