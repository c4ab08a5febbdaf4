"""Argument checks. Every message names the operator, the argument, what was expected and got."""

from collections.abc import Collection
from typing import Any

import jax.numpy as jnp


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
