"""Dense layers: weights as checkpoints store them, products at the precision of their dtype."""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from jax_hpc import fp8
from jax_hpc._checks import check, check_choice
from jax_hpc.nn.init import normal

LinearFormat = Literal["dense", "fp8_tensor"]


def project(
    x: jax.Array, weight: jax.Array, out_dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """``x @ weight.T`` for x ``[..., in]`` and weight ``[out, in]``, accumulated in float32.

    Float32 operands are multiplied at full precision; a GPU would use TF32 by default.
    """
    full = x.dtype == jnp.float32
    return jax.lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if full else None,
        preferred_element_type=jnp.dtype(out_dtype or x.dtype),
    )


class Linear(nnx.Module):
    """``y = x @ weight.T`` without bias.

    weight: ``[out_features, in_features]``, the layout of checkpoints. With format ``fp8_tensor``
    it is float8_e4m3fn, and there are

    - weight_scale: float32 ``[out_features]``. A checkpoint has one for each matrix, and several
      may be stacked (q, k and v; gate and up), each with its own;
    - input_scale: float32 ``[]``, the static scale by which x is quantised.

    Args:
      format: "dense" or "fp8_tensor". dtype: of a dense weight.
      reduce_axis: mesh axis over which in_features are split; the partial products are summed
        over it (row-parallel layers inside ``jax.shard_map``).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        format: LinearFormat = "dense",
        reduce_axis: str | None = None,
    ) -> None:
        check_choice("Linear", "format", format, get_args(LinearFormat))
        shape = (out_features, in_features)
        self.format: LinearFormat = format
        if format == "dense":
            self.weight = nnx.Param(normal(rngs, shape, in_features, dtype))
        else:
            self.weight = nnx.Param(normal(rngs, shape, 1, fp8.E4M3))
            scale = float(in_features) ** -0.5
            self.weight_scale = nnx.Param(jnp.full((out_features,), scale, jnp.float32))
            self.input_scale = nnx.Param(jnp.ones((), jnp.float32))
        self.reduce_axis = reduce_axis

    def __call__(self, x: jax.Array) -> jax.Array:
        """x ``[..., in_features]`` -> ``[..., out_features]`` of x's dtype."""
        inputs, shape = self.weight.shape[1], x.shape
        expected = f"of shape [..., in_features = {inputs}]"
        check(shape[-1:] == (inputs,), "Linear", "x", expected=expected, got=f"shape {shape}")
        y = project(x, self.weight[...]) if self.format == "dense" else self._scaled(x)
        return y if self.reduce_axis is None else jax.lax.psum(y, self.reduce_axis)

    def _scaled(self, x: jax.Array) -> jax.Array:
        # Both operands are fp8 and the scales stand outside: the form that XLA hands to cuBLASLt.
        values = fp8.quantize(x, self.input_scale[...])
        y = project(values, self.weight[...], out_dtype=jnp.float32)
        return (y * (self.weight_scale[...] * self.input_scale[...])).astype(x.dtype)


class Embedding(nnx.Module):
    """Token embedding. weight: ``[V, H]``."""

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
    ) -> None:
        self.weight = nnx.Param(normal(rngs, (num_embeddings, features), 1, dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 ``[...]`` -> ``[..., H]``; ids outside the vocabulary are clamped into it."""
        return jnp.take(self.weight[...], tokens, axis=0, mode="clip")


class GatedMLP(nnx.Module):
    """``down(silu(gate(x)) * up(x))``, gate and up as one product.

    gate_up_proj: Linear H -> 2 I, gate rows first; down_proj: Linear I -> H.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        format: LinearFormat = "dense",
        reduce_axis: str | None = None,
    ) -> None:
        options: dict[str, Any] = {"rngs": rngs, "dtype": dtype, "format": format}
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, **options)
        self.down_proj = Linear(intermediate_size, hidden_size, reduce_axis=reduce_axis, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up_proj(x).astype(jnp.float32), 2, axis=-1)
        return self.down_proj((jax.nn.silu(gate) * up).astype(x.dtype))
