"""Independent float64 numpy of a whole decoder, from a checkpoint's own tensors.

No cache and no batch: every position attends to those before it in one matrix. fp8 weights take
part with the quantisation points of their format and float64 between them, or dequantised.
"""

from dataclasses import dataclass

import numpy as np

from tests.support import golden_checkpoints as recipes
from tests.support.golden_checkpoints import BLOCK, E4M3, E4M3_MAX, ROUTER_SCALE, Recipe, Tensors

SILU_SATURATES = 700.0


@dataclass(frozen=True)
class Truth:
    """A recipe's model. quantized: activations meet fp8 weights in fp8; kv_scales: K and V are
    stored in fp8 with the checkpoint's scales."""

    recipe: Recipe
    tensors: Tensors
    quantized: bool = False
    kv_fp8: bool = False

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """float64 ``[S, V]``."""
        x = self.get("model.embed_tokens")[tokens]
        for index in range(self.recipe.layers):
            layer = f"model.layers.{index}"
            x = x + self._attention(
                f"{layer}.self_attn", self._norm(x, f"{layer}.input_layernorm")
            )
            y = self._norm(x, f"{layer}.post_attention_layernorm")
            is_sparse = f"{layer}.mlp.experts.0.down_proj.weight" in self.tensors
            x = x + (
                self._sparse(f"{layer}.mlp", y) if is_sparse else self._mlp(f"{layer}.mlp", y)
            )
        x = self._norm(x, "model.norm")
        return x @ self.get("model.embed_tokens" if self.recipe.tied else "lm_head").T

    def get(self, name: str) -> np.ndarray:
        """A weight in float64, dequantised."""
        weight = self.tensors[f"{name}.weight"].astype(np.float64)
        if f"{name}.weight_scale" in self.tensors:
            return weight * float(self.tensors[f"{name}.weight_scale"])
        if f"{name}.weight_scale_inv" in self.tensors:
            return weight * recipes.spread(self.tensors[f"{name}.weight_scale_inv"], weight.shape)
        return weight

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        eps = 1e-5 if self.recipe.family == "hy_v3" else 1e-6
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * self.get(name)

    def _static(self, x: np.ndarray, *names: str) -> np.ndarray:
        """x as a product with these weights takes it: quantised once, by the largest scale."""
        keys = [f"{name}.input_scale" for name in names]
        if not self.quantized or keys[0] not in self.tensors:
            return x
        scale = max(float(self.tensors[key].item()) for key in keys)
        return to_e4m3(x / scale) * scale

    def _dynamic(self, x: np.ndarray) -> np.ndarray:
        """x with a scale for 128 columns of each row, where the experts are block fp8."""
        if not self.quantized or self.recipe.fp8 != "block":
            return x
        out = np.empty_like(x)
        for start in range(0, x.shape[1], BLOCK):
            part = x[:, start : start + BLOCK]
            scale = np.abs(part).max(axis=1, keepdims=True) / E4M3_MAX
            scale = np.where(scale > 0, scale, 1.0)
            out[:, start : start + BLOCK] = to_e4m3(part / scale) * scale
        return out

    def _attention(self, name: str, x: np.ndarray) -> np.ndarray:
        r, count = self.recipe, len(x)
        x = self._static(x, *(f"{name}.{part}_proj" for part in "qkv"))
        heads = [
            (x @ self.get(f"{name}.{p}_proj").T).reshape(count, -1, r.head_dim) for p in "qkv"
        ]
        q, k, v = heads
        q = self._rotate(self._norm(q, f"{name}.q_norm"))
        k = self._rotate(self._norm(k, f"{name}.k_norm"))
        if self.kv_fp8:
            q = by_row(q)
            k, v = (self._cached(f"{name}.{kind}_scale", a) for kind, a in (("k", k), ("v", v)))
        group = r.q_heads // r.kv_heads
        k, v = (np.repeat(a, group, axis=1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * r.head_dim**-0.5
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", weights, v).reshape(count, -1)
        return self._static(out, f"{name}.o_proj") @ self.get(f"{name}.o_proj").T

    def _cached(self, scale_name: str, x: np.ndarray) -> np.ndarray:
        scale = float(self.tensors[scale_name].item()) if scale_name in self.tensors else 1.0
        return to_e4m3(x / scale) * scale

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        angles = np.arange(len(x))[:, None] * self.recipe.rope_theta ** (-np.arange(half) / half)
        cos, sin = (f(angles)[:, None, :] for f in (np.cos, np.sin))
        low, high = x[..., :half], x[..., half:]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    def _mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        x = self._static(x, f"{name}.gate_proj", f"{name}.up_proj")
        hidden = silu(x @ self.get(f"{name}.gate_proj").T) * (x @ self.get(f"{name}.up_proj").T)
        return self._static(hidden, f"{name}.down_proj") @ self.get(f"{name}.down_proj").T

    def _sparse(self, name: str, x: np.ndarray) -> np.ndarray:
        ids, weights = self.route(name, x)
        experts = [f"{name}.experts.{e}" for e in range(self.recipe.experts)]
        inputs = [f"{e}.{half}_proj" for e in experts for half in ("gate", "up")]
        shared = f"{name}.shared_mlp"
        out = self._mlp(shared, x) if f"{shared}.down_proj.weight" in self.tensors else 0.0 * x
        y = self._dynamic(self._static(x, *inputs))
        for e, expert in enumerate(experts):
            gate, up = (y @ self.get(f"{expert}.{half}_proj").T for half in ("gate", "up"))
            hidden = self._dynamic(self._static(silu(gate) * up, f"{expert}.down_proj"))
            share = np.where(ids == e, weights, 0.0).sum(axis=1, keepdims=True)
            out = out + share * (hidden @ self.get(f"{expert}.down_proj").T)
        return out

    def route(self, name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Expert ids and weights ``[S, K]``."""
        r = self.recipe
        if r.family == "hy_v3":
            scores = 1.0 / (1.0 + np.exp(-(x @ self.get(f"{name}.router.gate").T)))
            biased = scores + self.tensors[f"{name}.expert_bias"].astype(np.float64)
        else:
            logits = x @ self.get(f"{name}.gate").T
            scores = np.exp(logits - logits.max(axis=1, keepdims=True))
            scores /= scores.sum(axis=1, keepdims=True)
            biased = scores
        ids = np.argsort(-biased, axis=1, kind="stable")[:, : r.top_k]
        weights = np.take_along_axis(scores, ids, axis=1)
        if r.renormalize:
            weights = weights / weights.sum(axis=1, keepdims=True)
        return ids, weights * (ROUTER_SCALE if r.family == "hy_v3" else 1.0)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """float64 of the nearest e4m3 values, saturating."""
    return np.clip(x, -E4M3_MAX, E4M3_MAX).astype(np.float32).astype(E4M3).astype(np.float64)


def by_row(x: np.ndarray) -> np.ndarray:
    """e4m3 with a scale for each row of the last axis."""
    scale = np.abs(x).max(axis=-1, keepdims=True) / E4M3_MAX
    return to_e4m3(x / scale) * scale


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-np.clip(x, -SILU_SATURATES, SILU_SATURATES)))
