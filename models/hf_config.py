"""Reading a Hugging Face config.json with errors that name the key."""

from collections.abc import Mapping
from typing import Any

from jax_hpc.checkpoint_plan import quantization_format
from jax_hpc.nn.linear import LinearFormat
from jax_hpc.nn.moe import ExpertFormat


class HFConfig:
    """Keys of one model's config.json."""

    def __init__(self, model: str, values: Mapping[str, Any]) -> None:
        self._model = model
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self.first_of(key)

    def first_of(self, *keys: str) -> Any:
        """The value of the first key that is there: names differ between transformers versions."""
        for key in keys:
            if key in self._values:
                return self._values[key]
        names = " or ".join(f"'{key}'" for key in keys)
        raise ValueError(f"{self._model}: config.json has no {names}")

    def get(self, key: str, default: Any) -> Any:
        return self._values.get(key, default)

    def require(self, key: str, supported: Any) -> None:
        """Refuse a setting that the model's code does not have."""
        got = self._values.get(key, supported)
        if got != supported:
            raise NotImplementedError(
                f"{self._model}: config.json key '{key}' must be {supported!r}, got {got!r}"
            )

    def rope_theta(self) -> float:
        """Base of the rotary frequencies; only the plain ("default") rotary embedding is known.

        transformers 5 writes ``rope_parameters``, older versions ``rope_theta`` and
        ``rope_scaling``.
        """
        parameters = self._values.get("rope_parameters") or self._values.get("rope_scaling") or {}
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default":
            raise NotImplementedError(
                f"{self._model}: config.json rope_type must be 'default', got {kind!r}"
            )
        theta = parameters.get("rope_theta", self._values.get("rope_theta"))
        if theta is None:
            raise ValueError(f"{self._model}: config.json has no 'rope_theta'")
        return float(theta)

    def expert_format(self) -> ExpertFormat:
        """How the checkpoint stores expert weights."""
        return quantization_format(self._values) or "dense"

    def linear_format(self) -> LinearFormat:
        """How the model holds the other weights of its products.

        Weights with one scale are multiplied as they are; blocks are dequantised at load.
        """
        return "fp8_tensor" if quantization_format(self._values) == "fp8_tensor" else "dense"
