"""From a Hugging Face directory to a model whose weights lie on the device."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_hpc._checks import check_choice
from jax_hpc._json import read_object
from jax_hpc.checkpoint_plan import QuantFormat, find_kv_scales, quantization_format
from jax_hpc.loading.accounting import check_targets, check_tensors
from jax_hpc.loading.fill import Placement, bytes_of, fill, named_arrays
from jax_hpc.loading.safetensors_reader import Checkpoint, CheckpointError
from jax_hpc.progress import Progress
from jax_hpc.text import GenerationConfig, Tokenizer

DTYPES = ("bfloat16", "float32")
Quantize = Literal["none", "fp8_block", "fp8_tensor"]


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, and what its directory says about using it.

    tokenizer: None where the directory has no tokenizer.json, or when it was not asked for.
    has_kv_scales: whether the checkpoint has static scales for an fp8 KV cache; the model's are 1
        otherwise.
    """

    model: Any
    config: Any
    tokenizer: Tokenizer | None
    generation_config: GenerationConfig
    has_kv_scales: bool = False


def load_model(
    directory: str | Path,
    *,
    dtype: str | None = None,
    quantize: Quantize | None = None,
    device: Placement | None = None,
    tokenizer: bool = True,
    progress: bool = True,
    model_class: type | None = None,
    **options: Any,
) -> LoadedModel:
    """Loads a model from a directory with config.json and safetensors weights.

    dtype: "bfloat16" or "float32"; by default what config.json says. fp8 weights with a scale
        each stay fp8, and so do experts in blocks; what else is in blocks is dequantised.
    quantize: the format of the experts, where it is not to be the checkpoint's: "fp8_block" or
        "fp8_tensor" makes them of wider weights, on the device, a layer at a time; "none"
        dequantises whatever is fp8.
    device: where the weights go, a device or a sharding, or a function that gives one for an
        array's dotted path; JAX's default device if None.
    tokenizer: whether to read the tokenizer, where there is one. progress: whether to show a bar.
    model_class: the model to build, by default the one registered for config.json's
        `architectures`. It has a `Config.from_hf`, a `checkpoint_plan` and, where it leaves
        tensors of its checkpoints unused, their names' patterns in `checkpoint_ignored`. To be
        loaded with `quantize`, its Config has the fields `expert_format`, `linear_format` and
        `sparse_layers` of a `DecoderConfig`.
    options: passed on to the model, such as `implementations`, the forms of its operators.

    Raises FileNotFoundError where the directory lacks a file, CheckpointError (a ValueError) where
    the checkpoint is damaged or does not fit the model, ValueError for an unknown architecture,
    weight format or dtype, or fp8 weights to be quantised, and ImportError where the tokenizer
    needs a package of the `models` extra.
    """
    directory = Path(directory)
    hf_config = read_config(directory)
    model_type: Any = model_class or find_model_class(hf_config)
    quantization = quantization_format(hf_config)
    dtype = resolve_dtype(hf_config, dtype)
    check_quantize(quantize, quantization)
    with Checkpoint(directory) as checkpoint:
        has_tokenizer = tokenizer and (directory / "tokenizer.json").is_file()
        text = Tokenizer.from_directory(directory) if has_tokenizer else None
        generation = GenerationConfig.from_directory(directory, tokenizer=text)
        config = model_type.Config.from_hf(hf_config, checkpoint.tensors)
        config = _with_format(config, quantize)
        model = nnx.eval_shape(
            lambda: model_type(config, rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype), **options)
        )
        quantizes = quantize not in (None, "none")
        plan = model.checkpoint_plan(checkpoint.tensors, quantize=quantizes)
        targets = named_arrays(model)
        check_targets(model_type.__name__, plan, targets)
        check_tensors(
            checkpoint,
            plan,
            targets,
            quantization=quantization,
            ignored=getattr(model, "checkpoint_ignored", ()),
        )
        total = sum(bytes_of(checkpoint, item) for item in plan)
        with Progress("loading weights", total, enabled=progress) as bar:
            fill(
                model,
                checkpoint,
                plan,
                targets,
                quantization=quantization,
                device=device,
                progress=bar,
            )
        has_kv_scales = find_kv_scales(checkpoint.tensors) is not None
    return LoadedModel(model, config, text, generation, has_kv_scales)


def check_quantize(quantize: str | None, stored: QuantFormat | None) -> None:
    """Refuses a format that is not known, and to quantise what is quantised already."""
    if quantize is None:
        return
    check_choice("load_model", "quantize", quantize, get_args(Quantize))
    if stored is not None and quantize != "none":
        raise ValueError(
            f"load_model: argument 'quantize' must be 'none' or left out for a checkpoint whose "
            f"weights are {stored} already, got {quantize!r}"
        )


def _with_format(config: Any, quantize: Quantize | None) -> Any:
    """The configuration with weights of the format asked for."""
    if quantize is None:
        return config
    if quantize == "none":
        return dataclasses.replace(config, linear_format="dense", expert_format="dense")
    if not any(config.sparse_layers):
        raise ValueError(
            f"load_model: argument 'quantize' must be 'none' or left out for a model without "
            f"experts, got {quantize!r}"
        )
    return dataclasses.replace(config, linear_format="dense", expert_format=quantize)


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of the directory.

    Raises FileNotFoundError or NotADirectoryError saying what is expected there, and
    CheckpointError where it is no JSON object.
    """
    if not directory.exists():
        raise FileNotFoundError(
            f"{directory}: no such directory; give the directory of a Hugging Face checkpoint, "
            "with config.json and safetensors weights"
        )
    if not directory.is_dir():
        raise NotADirectoryError(
            f"{directory}: not a directory; give the one that holds config.json"
        )
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory}: no config.json there; is this a Hugging Face checkpoint?"
        )
    try:
        return read_object(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def find_model_class(hf_config: Mapping[str, Any]) -> Any:
    """The registered model of the first of config.json's `architectures` that is known."""
    from jax_hpc.models.registry import MODELS

    architectures = hf_config.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"config.json: architectures must be a list, got {architectures!r}")
    for name in architectures:
        if name in MODELS:
            return MODELS[name]
    stated = ", ".join(map(str, architectures)) or "none"
    raise ValueError(
        f"config.json: architectures ({stated}) not known; known: {', '.join(sorted(MODELS))}"
    )


def resolve_dtype(hf_config: Mapping[str, Any], dtype: str | None) -> str:
    """The dtype asked for, else config.json's, else bfloat16."""
    stated = hf_config.get("dtype") or hf_config.get("torch_dtype") or "bfloat16"
    if dtype is None:
        chosen = str(stated).removeprefix("torch.")
        if chosen not in DTYPES:
            raise ValueError(
                f"config.json: dtype {chosen!r} is not one that models run in; choose one by "
                f"dtype= or --dtype: {', '.join(DTYPES)}"
            )
        return chosen
    chosen = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    check_choice("load_model", "dtype", chosen, DTYPES)
    return chosen
