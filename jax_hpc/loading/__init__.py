"""Loads Hugging Face checkpoints: reading, strict accounting, filling."""

from jax_hpc.loading.load import LoadedModel, load_model
from jax_hpc.loading.safetensors_reader import Checkpoint, CheckpointError, TensorInfo

__all__ = ["Checkpoint", "CheckpointError", "LoadedModel", "TensorInfo", "load_model"]
