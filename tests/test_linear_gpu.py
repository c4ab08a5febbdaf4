"""Per-tensor fp8 linears on a GPU: cuBLASLt multiplies the fp8 operands, with its accuracy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_hpc import fp8, nn
from tests.support.numerics import cosine

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [1, 7, 64, 500])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 1280), (1024, 4096), (192, 4096)])
def test_product_is_one_of_fp8(tokens: int, inputs: int, outputs: int) -> None:
    layer = nn.Linear(inputs, outputs, rngs=nnx.Rngs(0), format="fp8_tensor")
    layer.input_scale[...] = jnp.float32(0.02)
    scale = jnp.linspace(0.01, 0.2, outputs, dtype=jnp.float32)
    layer.weight_scale[...] = scale
    x = jax.random.normal(jax.random.key(1), (tokens, inputs), jnp.bfloat16)
    graph, params = nnx.split(layer)
    lowered = jax.jit(lambda params, x: nnx.merge(graph, params)(x)).lower(params, x)
    # Where Triton may not take the product, it must be in the form that XLA gives to cuBLASLt. Of
    # one token XLA makes a reduction that reads the weight as it is.
    plain = lowered.compile({"xla_gpu_enable_triton_gemm": False}).as_text()
    assert ("__cublas$lt$matmul$f8" in plain) == (tokens > 1)
    compiled = lowered.compile()
    wide = rf"= (?:bf16|f16|f32)\[(?:{outputs},{inputs}|{inputs},{outputs})\]"
    written = re.findall(wide, compiled.as_text().partition("ENTRY")[2])
    assert not written, "the weight was widened"
    values = np.asarray(fp8.quantize(x, jnp.float32(0.02))).astype(np.float64)
    weight = np.asarray(layer.weight[...]).astype(np.float64)
    want = values @ weight.T * np.asarray(scale, np.float64) * 0.02
    got = compiled(params, x)
    assert got.dtype == jnp.bfloat16
    # fp8 sums of tensor cores keep about 14 bits; the result is rounded to bf16.
    assert cosine(got, want) >= 0.99999
    error = np.abs(np.asarray(got).astype(np.float64) - want)
    assert error.max() <= 0.01 * np.abs(want).max()
