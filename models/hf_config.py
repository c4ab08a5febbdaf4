"""Reading a Hugging Face config.json with errors that name the key."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax_hpc.checkpoint_plan import quantization_format
from jax_hpc.nn.linear import LinearFormat
from jax_hpc.nn.moe import ExpertFormat


class HFConfig:
    """Keys of one model's config.json."""

    def __init__(self, model: str, values: Mapping[str, Any]) -> None:
        self._model = model
        self._values = values

    def size(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """The integer under the first key that is there: names differ between transformers
        versions."""
        key, value = self._first_of(keys, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(key, f"an integer >= {least}", value)
        return value

    def number(self, key: str) -> float:
        """The number above 0 under a key."""
        _, value = self._first_of((key,))
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self._wrong(key, "a number above 0", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """The truth value under a key."""
        _, value = self._first_of((key,), default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def items(self, key: str) -> list[Any] | None:
        """The list under a key, None where there is none."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, list):
            raise self._wrong(key, "a list", value)
        return value

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
        parameters = self._object("rope_parameters") or self._object("rope_scaling")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default":
            raise NotImplementedError(
                f"{self._model}: config.json rope_type must be 'default', got {kind!r}"
            )
        theta = parameters.get("rope_theta")
        return float(self.number("rope_theta") if theta is None else theta)

    def expert_format(self) -> ExpertFormat:
        """How the checkpoint stores expert weights."""
        return quantization_format(self._values) or "dense"

    def linear_format(self) -> LinearFormat:
        """How the model holds the other weights of its products.

        Weights with one scale are multiplied as they are; blocks are dequantised at load.
        """
        return "fp8_tensor" if quantization_format(self._values) == "fp8_tensor" else "dense"

    def _first_of(self, keys: Sequence[str], default: Any = None) -> tuple[str, Any]:
        for key in keys:
            if self._values.get(key) is not None:
                return key, self._values[key]
        if default is not None:
            return keys[0], default
        names = " or ".join(f"'{key}'" for key in keys)
        raise ValueError(f"{self._model}: config.json has no {names}")

    def _object(self, key: str) -> Mapping[str, Any]:
        value = self._values.get(key) or {}
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object", value)
        return value

    def _wrong(self, key: str, expected: str, got: Any) -> ValueError:
        return ValueError(
            f"{self._model}: config.json key '{key}' must be {expected}, got {got!r}"
        )
