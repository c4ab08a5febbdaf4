"""``jax-hpc generate``: text from a checkpoint, streamed, with its speed."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jax_hpc import _registry, fp8
from jax_hpc._checks import check
from jax_hpc.cache import DEFAULT_PAGE_SIZE, PAGE_SIZES
from jax_hpc.decode import NO_TOKEN
from jax_hpc.generate import SMALLEST_CHUNK, Burst, Generator
from jax_hpc.loading import load_model
from jax_hpc.loading.load import Quantize
from jax_hpc.progress import status
from jax_hpc.sampling import SamplingParams
from jax_hpc.text import GenerationConfig, StreamingDetokenizer, Tokenizer
from jax_hpc.types import IMPLEMENTATIONS, Implementations

DEFAULT_NEW_TOKENS = 256
_KV_DTYPES = {
    "auto": None,
    "bfloat16": jnp.bfloat16,
    "float32": jnp.float32,
    "fp8": fp8.E4M3,
    "fp8-dynamic": fp8.E4M3,
}
_QUANTIZE: dict[str, Quantize] = {"none": "none", "fp8": "fp8_block", "fp8-tensor": "fp8_tensor"}
_OPERATORS = {
    "attention": ("qk_norm_rope_append", "prefill_attention", "decode_attention"),
    "moe": ("fused_moe",),
    "router": ("router_topk",),
    "norm": ("rms_norm",),
}
"""Which operators an option chooses the form of."""
_FILTERS = ("temperature", "top_k", "top_p", "min_p")
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


def add_command(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds ``generate`` to the subcommands; `common` holds the options that every one has."""
    parser = commands.add_parser(
        "generate", parents=[common], help="generate text from a Hugging Face checkpoint"
    )
    parser.set_defaults(run=run)
    parser.add_argument("--model", required=True, metavar="DIR", help="the checkpoint's directory")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument(
        "--prompt", action="append", metavar="TEXT", help="text to continue; several make a batch"
    )
    text.add_argument(
        "--chat", metavar="MESSAGE", help="a user's message, put into the model's chat template"
    )
    parser.add_argument("--system", metavar="MESSAGE", help="system message of --chat")
    _add_sampling(parser.add_argument_group("sampling (defaults: the checkpoint's own)"))
    _add_execution(parser.add_argument_group("execution"))


def _add_sampling(group: Any) -> None:
    group.add_argument("--max-new-tokens", type=int, metavar="N", help="tokens for each prompt")
    group.add_argument("--greedy", action="store_true", help="always take the likeliest token")
    group.add_argument("--temperature", type=float, metavar="X", help="0 is greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="0 is off")
    group.add_argument("--top-p", type=float, metavar="P", help="1 is off")
    group.add_argument("--min-p", type=float, metavar="P", help="0 is off")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="1 is off")
    group.add_argument("--frequency-penalty", type=float, metavar="X", help="0 is off")
    group.add_argument("--presence-penalty", type=float, metavar="X", help="0 is off")
    group.add_argument(
        "--seed", type=int, default=0, help="of the first prompt; the next ones count up from it"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end token")


def _add_execution(group: Any) -> None:
    group.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the weights")
    group.add_argument(
        "--quantize",
        choices=_QUANTIZE,
        help="fp8: make the experts of a wider checkpoint fp8 in blocks of 128x128; fp8-tensor: "
        "with one scale for each matrix, and static ones of activations that no data calibrated; "
        "none: dequantise an fp8 checkpoint",
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=_KV_DTYPES,
        default="auto",
        help="auto: the weights'; fp8: with the checkpoint's static scales, or 1; fp8-dynamic: K "
        "with a scale per token and head",
    )
    group.add_argument(
        "--page-size",
        type=int,
        choices=PAGE_SIZES,
        default=DEFAULT_PAGE_SIZE,
        help="tokens per page of the KV cache",
    )
    for option in _OPERATORS:
        group.add_argument(
            f"--{option}",
            choices=IMPLEMENTATIONS,
            default="auto",
            help=f"form of the {option} operators",
        )
    group.add_argument(
        "--prefill-chunk",
        type=int,
        default=512,
        metavar="N",
        help="prompt tokens of one prefill step, over all prompts",
    )
    group.add_argument(
        "--burst",
        type=int,
        default=16,
        metavar="N",
        help="decode steps between two bits of text",
    )
    group.add_argument(
        "--early-exit", action="store_true", help="end a burst when every sequence has ended"
    )


@dataclass
class Output:
    """One prompt and what has been generated for it."""

    prompt: str
    prompt_tokens: int
    detokenizer: StreamingDetokenizer
    eos_ids: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    text: str = ""

    @property
    def finish_reason(self) -> str:
        """Why it ended: "stop" at an end token, "length" at the limit."""
        return "stop" if self.tokens and self.tokens[-1] in self.eos_ids else "length"

    def push(self, tokens: Sequence[int]) -> str:
        """Takes a burst's tokens of this sequence; returns the new text."""
        new = [token for token in tokens if token != NO_TOKEN]
        self.tokens += new
        # The end token is not text, whether or not the tokenizer counts it as special.
        piece = self.detokenizer.push([token for token in new if token not in self.eos_ids])
        self.text += piece
        return piece

    def finish(self) -> str:
        """Returns the text that was held back for more tokens."""
        piece = self.detokenizer.finish()
        self.text += piece
        return piece


def run(arguments: argparse.Namespace) -> None:
    """Runs the command: load, compile, stream, and the line with the figures."""
    check_options(arguments)
    loaded = load_model(
        arguments.model,
        dtype=arguments.dtype,
        quantize=_QUANTIZE.get(arguments.quantize),
        progress=not arguments.json,
        implementations=Implementations(
            **{option: getattr(arguments, option) for option in _OPERATORS}
        ),
    )
    if loaded.tokenizer is None:
        raise FileNotFoundError(f"{arguments.model}: no tokenizer.json there; generate needs one")
    if arguments.kv_cache_dtype == "fp8" and not loaded.has_kv_scales:
        print(
            "jax-hpc: note: the checkpoint has no scales for an fp8 KV cache: K and V are stored "
            "as they are, up to 448; fp8-dynamic gives K a scale per token and head",
            file=sys.stderr,
        )
    settings = loaded.generation_config
    eos_ids = () if arguments.ignore_eos else settings.eos_token_ids
    texts, prompts = prompt_ids(arguments, loaded.tokenizer)
    generator = Generator(
        loaded.model,
        page_size=arguments.page_size,
        kv_cache_dtype=_KV_DTYPES[arguments.kv_cache_dtype],
        k_scales_per_token=arguments.kv_cache_dtype == "fp8-dynamic",
        burst=arguments.burst,
        prefill_chunk=arguments.prefill_chunk,
        early_exit=arguments.early_exit,
    )
    with status("compiling", enabled=not arguments.json):
        bursts = generator.stream(
            prompts,
            max_new_tokens=new_tokens(arguments, settings),
            eos_ids=eos_ids,
            sampling=SamplingParams.create(len(prompts), **sampling_options(arguments, settings)),
            seeds=[(arguments.seed + row) % 2**32 for row in range(len(prompts))],
        )
    outputs = [
        Output(text, len(ids), StreamingDetokenizer(loaded.tokenizer), eos_ids)
        for text, ids in zip(texts, prompts, strict=True)
    ]
    collect(bursts, outputs, streaming=len(outputs) == 1 and not arguments.json)
    figures = measured(generator)
    if arguments.json:
        print(json.dumps({"outputs": list(map(_as_json, outputs)), "stats": figures}, indent=2))
        return
    if len(outputs) > 1:
        _print_labelled(outputs)
    print(f"\n{summary(figures)}")


def check_options(arguments: argparse.Namespace) -> None:
    """Refuses contradicting options and values out of range, before anything is loaded."""
    if arguments.system is not None and arguments.chat is None:
        raise ValueError("generate: --system needs --chat")
    filters = [name for name in _FILTERS if getattr(arguments, name) is not None]
    if arguments.greedy and filters:
        raise ValueError(f"generate: --greedy excludes --{filters[0].replace('_', '-')}")
    for name, least in (("max_new_tokens", 1), ("burst", 1), ("prefill_chunk", SMALLEST_CHUNK)):
        value = getattr(arguments, name)
        check(value is None or value >= least, "generate", name, expected=f">= {least}", got=value)
    SamplingParams.create(1, **given_sampling(arguments))
    for text in arguments.prompt or [arguments.chat]:
        _check_text(text)
    for option in _OPERATORS:
        if getattr(arguments, option) == "cuda":
            _check_kernels(option)


def _check_kernels(option: str) -> None:
    """``cuda`` insists on kernels, which may be missing whatever the checkpoint."""
    missing = [name for name in _OPERATORS[option] if _registry.OPERATORS[name].kernel is None]
    reason = f"no CUDA kernel for {', '.join(missing)} in this version" if missing else None
    if reason is None:
        reason = _registry.unusable_reason() or (None if _registry.gpus() else "no CUDA device")
    if reason is not None:
        raise NotImplementedError(
            f"generate: --{option} cuda cannot run here: {reason}; use --{option} auto, which "
            "takes the kernels that there are"
        )


def _check_text(text: str) -> None:
    """Bytes of a command line that are no UTF-8 arrive as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"generate: the prompt must be UTF-8 text, got {text!r}") from None


def prompt_ids(
    arguments: argparse.Namespace, tokenizer: Tokenizer
) -> tuple[list[str], list[list[int]]]:
    """The prompts' texts and tokens."""
    if arguments.chat is not None:
        messages = [{"role": "user", "content": arguments.chat}]
        if arguments.system is not None:
            messages.insert(0, {"role": "system", "content": arguments.system})
        return [arguments.chat], [tokenizer.encode_chat(messages)]
    return arguments.prompt, [tokenizer.encode(text) for text in arguments.prompt]


def new_tokens(arguments: argparse.Namespace, settings: GenerationConfig) -> int:
    """The limit given, else the checkpoint's, else 256."""
    if arguments.max_new_tokens is not None:
        return arguments.max_new_tokens
    return settings.max_new_tokens or DEFAULT_NEW_TOKENS


def sampling_options(arguments: argparse.Namespace, settings: GenerationConfig) -> dict[str, Any]:
    """What `SamplingParams.create` takes: the checkpoint's settings under the options given.

    Greedy with --greedy, and where the checkpoint does not sample and no option asks for it.
    """
    given = given_sampling(arguments)
    options = {name: getattr(settings, name) for name in (*_FILTERS, "repetition_penalty")}
    options |= given
    sampled = settings.do_sample or any(name in given for name in _FILTERS)
    if arguments.greedy or not sampled:
        options["temperature"] = 0.0
    return options


def given_sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that were given."""
    values = {name: getattr(arguments, name) for name in (*_FILTERS, *_PENALTIES)}
    return {name: value for name, value in values.items() if value is not None}


def collect(bursts: Iterator[Burst], outputs: Sequence[Output], *, streaming: bool) -> None:
    """Gathers the tokens of all bursts, and writes the text of the first output as it comes."""
    for burst in bursts:
        for row, output in enumerate(outputs):
            piece = output.push(burst.tokens[:, row].tolist())
            if streaming:
                print(piece, end="", flush=True)
    for output in outputs:
        piece = output.finish()
        if streaming:
            print(piece, flush=True)


def measured(generator: Generator) -> dict[str, Any]:
    """The figures of the last stream; on a GPU also the bandwidth of its decode steps."""
    stats = generator.stats
    figures = {
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "ttft_ms": 1e3 * stats.ttft_seconds,
        "tpot_ms": 1e3 * stats.tpot_seconds,
        "tokens_per_second": stats.tokens_per_second,
        "compile_seconds": stats.compile_seconds,
    }
    if jax.default_backend() == "gpu" and stats.decode_steps:
        kv_dtype = jnp.dtype(generator.kv_cache_dtype or generator.model.dtype)
        read = generator.model.bytes_per_step(
            stats.batch,
            round(stats.mean_kv_len),
            kv_dtype.itemsize,
            generator.k_scales_per_token,
        )
        figures["gigabytes_per_second"] = read / stats.tpot_seconds / 1e9
    return figures


def summary(figures: dict[str, Any]) -> str:
    """The figures as one line."""
    parts = [
        f"{figures['prompt_tokens']} prompt tokens",
        f"{figures['new_tokens']} new tokens",
        f"TTFT {figures['ttft_ms']:.1f} ms",
        f"TPOT {figures['tpot_ms']:.2f} ms",
        f"{figures['tokens_per_second']:.1f} tokens/s",
    ]
    if "gigabytes_per_second" in figures:
        parts.append(f"{figures['gigabytes_per_second']:.0f} GB/s")
    return ", ".join(parts) + f" (compiled in {figures['compile_seconds']:.1f} s before)"


def _as_json(output: Output) -> dict[str, Any]:
    return {
        "prompt": output.prompt,
        "text": output.text,
        "tokens": output.tokens,
        "prompt_tokens": output.prompt_tokens,
        "finish_reason": output.finish_reason,
    }


def _print_labelled(outputs: Sequence[Output]) -> None:
    for number, output in enumerate(outputs, start=1):
        print(f"[{number}] {output.prompt}\n{output.text}\n")
