"""Messages of the argument checks: operator, argument, expected, got."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from jax_hpc._checks import Dims, check, check_choice, check_dtype, static_int, static_number


def test_check_names_everything() -> None:
    check(True, "op", "k", expected="small", got=1)
    with pytest.raises(ValueError) as error:
        check(False, "op", "k", expected="<= 4", got=5)
    assert str(error.value) == "op: argument 'k' must be <= 4, got 5"


def test_check_choice() -> None:
    check_choice("op", "mode", "a", ("a", "b"))
    with pytest.raises(ValueError, match="op: argument 'mode' must be one of 'a', 'b', got 'c'"):
        check_choice("op", "mode", "c", ("a", "b"))


def test_check_dtype() -> None:
    check_dtype("op", "x", np.zeros(1, np.float32), (jnp.float32,))
    with pytest.raises(TypeError, match="op: argument 'x' must be bfloat16 or float32, got int32"):
        check_dtype("op", "x", np.zeros(1, np.int32), (jnp.bfloat16, jnp.float32))
    with pytest.raises(TypeError, match="op: argument 'x' must be an array, got list"):
        check_dtype("op", "x", [1.0], (jnp.float32,))


def test_static_arguments_are_python_numbers() -> None:
    assert static_int("op", "n", np.int64(3)) == 3 and static_number("op", "s", 2) == 2.0
    assert static_number("op", "s", np.float32(0.5)) == 0.5
    for value, got in ((True, "True"), (2.0, "2.0"), ("2", "'2'"), (np.ones(2, np.int32), None)):
        words = re.escape(got or "an array int32[2]")
        with pytest.raises(TypeError, match=rf"op: argument 'n' must be .*static\), got {words}"):
            static_int("op", "n", value)
    with pytest.raises(TypeError, match=r"argument 's' must be a Python number .*, got list"):
        static_number("op", "s", [1.0])


def test_dims_bind_and_compare() -> None:
    dims = Dims("op")
    dims.match("x", np.zeros((3, 8)), "T H")
    dims.match("w", np.zeros((5, 8)), "E H")
    assert (dims["T"], dims["H"], dims["E"]) == (3, 8, 5)
    with pytest.raises(ValueError) as error:
        dims.match("v", np.zeros((5, 9)), "E H")
    assert str(error.value) == (
        "op: argument 'v' must have shape [E, H] with E = 5 from 'w', H = 8 from 'x', got (5, 9)"
    )


@pytest.mark.parametrize("pattern", ["T", "T H 2", "T 7", "T T"])
def test_dims_refuse_rank_number_and_repeat(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"op: argument 'x' must have shape .*, got \(3, 8\)"):
        Dims("op").match("x", np.zeros((3, 8)), pattern)


def test_dims_refuse_what_is_no_array() -> None:
    with pytest.raises(
        TypeError, match=r"op: argument 'x' must be an array of shape \[T\], got int"
    ):
        Dims("op").match("x", 3, "T")
