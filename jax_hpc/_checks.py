"""Argument checks. Every message names the operator, the argument, what was expected and got."""

import math
import numbers
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
import numpy as np


def check(condition: bool, operator: str, argument: str, *, expected: str, got: Any) -> None:
    """Raise ``ValueError`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(f"{operator}: argument '{argument}' must be {expected}, got {got}")


def check_choice(operator: str, argument: str, value: Any, choices: Collection[Any]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``choices``."""
    listed = ", ".join(repr(choice) for choice in choices)
    check(value in choices, operator, argument, expected=f"one of {listed}", got=repr(value))


def check_dtype(operator: str, argument: str, value: Any, allowed: Collection[Any]) -> None:
    """Raise ``TypeError`` unless ``value.dtype`` is one of ``allowed``."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        raise TypeError(
            f"{operator}: argument '{argument}' must be an array, got {type(value).__name__}"
        )
    if not any(dtype == jnp.dtype(candidate) for candidate in allowed):
        listed = " or ".join(jnp.dtype(candidate).name for candidate in allowed)
        raise TypeError(f"{operator}: argument '{argument}' must be {listed}, got {dtype.name}")


def static_int(operator: str, argument: str, value: Any, *, expected: str = "a Python int") -> int:
    """The value as an int; ``TypeError`` for anything else, floats, arrays and bools included."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(_not_static(operator, argument, expected, value))
    return int(value)


def static_number(operator: str, argument: str, value: Any) -> float:
    """The value as a float; ``TypeError`` unless it is a Python or NumPy number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | np.number):
        raise TypeError(_not_static(operator, argument, "a Python number", value))
    return float(value)


def _not_static(operator: str, argument: str, expected: str, value: Any) -> str:
    return (
        f"{operator}: argument '{argument}' must be {expected} (it is static), got "
        f"{describe(value)}"
    )


def check_scale(operator: str, argument: str, scale: float) -> None:
    """Raise ``ValueError`` unless a scale of fp8 that is known by its value is finite and > 0."""
    is_scale = math.isfinite(scale) and scale > 0
    check(is_scale, operator, argument, expected="finite and > 0", got=scale)


def describe(value: Any) -> str:
    """A value as error messages show it: arrays by type and shape only."""
    if value is None or isinstance(value, numbers.Number | str):
        return repr(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array {value.dtype.name}{list(value.shape)}"
    return type(value).__name__


class Dims:
    """Binds axis letters over the arguments of one call and compares them.

    ``match("x", x, "T H")`` checks the rank, binds T and H where they are new, and compares
    them where an earlier argument bound them. A number in the pattern is a fixed size.
    """

    def __init__(self, operator: str) -> None:
        self._operator = operator
        self._sizes: dict[str, int] = {}
        self._origins: dict[str, str] = {}

    def __getitem__(self, letter: str) -> int:
        return self._sizes[letter]

    def bind(self, letter: str, size: int, origin: str) -> None:
        """Bind a letter to a size that no array's axis states by itself."""
        self._sizes[letter] = size
        self._origins[letter] = origin

    def match(self, argument: str, value: Any, pattern: str) -> None:
        letters = pattern.split()
        shape = getattr(value, "shape", None)
        if shape is None:
            raise TypeError(
                f"{self._operator}: argument '{argument}' must be an array of shape "
                f"[{', '.join(letters)}], got {type(value).__name__}"
            )
        if len(shape) != len(letters):
            self._fail(argument, letters, shape)
        for letter, size in zip(letters, shape, strict=True):
            if letter.isdecimal():
                if size != int(letter):
                    self._fail(argument, letters, shape)
            elif letter not in self._sizes:
                self.bind(letter, size, argument)
            elif self._sizes[letter] != size:
                self._fail(argument, letters, shape)

    def _fail(self, argument: str, letters: list[str], shape: tuple[int, ...]) -> None:
        known = [
            f"{letter} = {self._sizes[letter]} from '{self._origins[letter]}'"
            for letter in dict.fromkeys(letters)
            if letter in self._sizes and self._origins[letter] != argument
        ]
        where = f" with {', '.join(known)}" if known else ""
        raise ValueError(
            f"{self._operator}: argument '{argument}' must have shape "
            f"[{', '.join(letters)}]{where}, got {tuple(shape)}"
        )
