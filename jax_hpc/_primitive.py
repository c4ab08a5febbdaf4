"""Operators as JAX primitives: the only file that touches jax.extend and jax.interpreters.

An operator is one :class:`Operator`: a shape rule, its jax.numpy truth, optionally XLA's best
form and a CUDA kernel. From these this file builds a primitive that works in eager code, jit,
scan, while_loop, cond, shard_map and export, folds vmap where the meaning allows it, and
refuses differentiation with advice.

Which form runs is decided when the program is lowered for a platform, not when it is traced, so
that a CPU host can lower a program for a GPU.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jax_hpc import _registry
from jax_hpc._checks import check_choice
from jax_hpc._version import __version__
from jax_hpc.types import IMPLEMENTATIONS, FallbackWarning

Form = Callable[[Any, Any], Any]
"""(operands, params) -> results; operands and results are NamedTuples of arrays or None."""


@dataclasses.dataclass(frozen=True)
class Fold:
    """How vmap folds its axis: into the leading axis of these operands and results.

    Every other operand must be unmapped; every other result is returned unmapped.
    """

    operands: frozenset[str]
    results: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A CUDA kernel behind an XLA FFI target.

    target: registered name, ``jax_hpc.<operator>.v<n>``.
    unsupported: (operands, params) -> why the kernel cannot take this case, or None.
    attributes: (operands, params) -> the handler's attributes, as numpy scalars or str.
    inputs: operands -> the arrays that the handler takes, in order; all leaves by default.
    workspaces: (operands, params) -> trailing results that only the kernel uses.
    aliases: operand field -> result field, written in place.
    preferred: (operands, params) -> whether "auto" takes the kernel where it could; False where
        XLA's form is measured to be faster.
    """

    target: str
    unsupported: Callable[[Any, Any], str | None]
    attributes: Callable[[Any, Any], Mapping[str, Any]]
    inputs: Callable[[Any], Sequence[Any]] = jax.tree.leaves
    workspaces: Callable[[Any, Any], Sequence[jax.ShapeDtypeStruct]] = lambda *_: ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    preferred: Callable[[Any, Any], bool] = lambda *_: True


class Operator:
    """An operator and its primitive; call it with (operands, params, implementation=...)."""

    def __init__(
        self,
        name: str,
        *,
        shape_rule: Form,
        reference: Form,
        gradient: str,
        xla: Form | None = None,
        kernel: Kernel | None = None,
        fold: Fold | None = None,
    ) -> None:
        self.name = name
        self.shape_rule = shape_rule
        self.reference = reference
        self.xla = xla if xla is not None else reference
        self.kernel = kernel
        self.fold = fold
        self._gradient = gradient
        self._primitive = self._make_primitive()
        _registry.OPERATORS[name] = self

    def __call__(self, operands: Any, params: Any, *, implementation: str) -> Any:
        check_choice(self.name, "implementation", implementation, IMPLEMENTATIONS)
        operands = _plain_arrays(operands)
        if implementation == "cuda":
            reason = self.why_no_kernel(operands, params)
            if reason is not None:
                raise NotImplementedError(f"{self.name}: no CUDA kernel for this call: {reason}")
        results_tree = jax.tree.structure(self.shape_rule(operands, params))
        leaves, tree = jax.tree.flatten(operands)
        flat = self._primitive.bind(
            *vary_alike(leaves), tree=tree, params=params, implementation=implementation
        )
        return jax.tree.unflatten(results_tree, flat)

    def why_no_kernel(self, operands: Any, params: Any) -> str | None:
        """Why no kernel takes this call on the machine at hand; None when one does."""
        if self.kernel is None:
            return f"jax_hpc {__version__} has none for this operator"
        return _registry.unusable_reason() or self.kernel.unsupported(operands, params)

    # The primitive and its rules.

    def _make_primitive(self) -> Primitive:
        primitive = Primitive(self.name)
        primitive.multiple_results = True
        primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
        primitive.def_abstract_eval(self._abstract)
        mlir.register_lowering(primitive, self._lower_default)
        mlir.register_lowering(primitive, self._lower_cuda, platform="cuda")
        batching.primitive_batchers[primitive] = self._batch
        ad.primitive_jvps[primitive] = self._refuse_gradient
        return primitive

    def _abstract(self, *avals: Any, tree: Any, params: Any, implementation: str) -> list[Any]:
        del implementation
        results = jax.tree.leaves(self.shape_rule(jax.tree.unflatten(tree, avals), params))
        return [_like(avals, result) for result in results]

    @functools.cached_property
    def _run(self) -> Callable[..., list[jax.Array]]:
        # Jitted, so that layers of equal shapes share a trace and a HLO function.
        def run(*leaves: jax.Array, tree: Any, params: Any) -> list[jax.Array]:
            return jax.tree.leaves(self.xla(jax.tree.unflatten(tree, leaves), params))

        run.__name__ = self.name
        return jax.jit(run, static_argnames=("tree", "params"))

    def _lower_xla(self, ctx: Any, *values: Any, tree: Any, params: Any) -> Any:
        run = functools.partial(self._run, tree=tree, params=params)
        # A form is arithmetic of one device: inside shard_map it need not know over which axes
        # its values vary, and its loops may start from constants. Nor does it choose shardings
        # on a mesh of explicit axes: XLA's partitioner does, as on one of automatic axes.
        mesh = _automatic_mesh(ctx.avals_in)
        ctx = ctx.replace(avals_in=[_unplaced(aval, mesh) for aval in ctx.avals_in])
        with jax.sharding.use_abstract_mesh(mesh):
            return mlir.lower_fun(run, multiple_results=True)(ctx, *values)

    def _lower_default(
        self, ctx: Any, *values: Any, tree: Any, params: Any, implementation: str
    ) -> Any:
        if implementation == "cuda":
            platforms = "/".join(ctx.module_context.platforms)
            raise NotImplementedError(
                f"{self.name}: implementation='cuda' needs an NVIDIA Hopper GPU, but the program "
                f"is compiled for {platforms}; use implementation='auto' or 'xla'"
            )
        return self._lower_xla(ctx, *values, tree=tree, params=params)

    def _lower_cuda(
        self, ctx: Any, *values: Any, tree: Any, params: Any, implementation: str
    ) -> Any:
        operands = jax.tree.unflatten(tree, ctx.avals_in)
        # A launch of nothing is an error to CUDA; XLA drops it.
        is_empty = any(aval.size == 0 for aval in [*ctx.avals_in, *ctx.avals_out])
        if implementation == "xla" or is_empty:
            return self._lower_xla(ctx, *values, tree=tree, params=params)
        reason = self.why_no_kernel(operands, params)
        if reason is not None:
            self._warn_once(reason)
            return self._lower_xla(ctx, *values, tree=tree, params=params)
        kernel = cast(Kernel, self.kernel)
        if implementation == "auto" and not kernel.preferred(operands, params):
            return self._lower_xla(ctx, *values, tree=tree, params=params)
        _refuse_automatic_sharding(self.name, ctx.module_context.axis_context)
        values_tree = jax.tree.unflatten(tree, values)
        return self._lower_kernel(ctx, kernel, values_tree, operands, params)

    def _lower_kernel(
        self, ctx: Any, kernel: Kernel, values: Any, operands: Any, params: Any
    ) -> Any:
        results = self.shape_rule(operands, params)
        workspaces = [
            jax.core.ShapedArray(w.shape, jnp.dtype(w.dtype))
            for w in kernel.workspaces(operands, params)
        ]
        # By place, not by value: operands of equal type may share one type object.
        places = list(kernel.inputs(_places(operands)))
        lowering = jax.ffi.ffi_lowering(
            kernel.target,
            operand_output_aliases={
                places.index(getattr(_places(operands), source)): getattr(_places(results), target)
                for source, target in kernel.aliases.items()
                if getattr(operands, source) is not None
            },
        )
        num_results = len(ctx.avals_out)
        ctx = ctx.replace(
            avals_in=list(kernel.inputs(operands)), avals_out=[*ctx.avals_out, *workspaces]
        )
        outputs = lowering(ctx, *kernel.inputs(values), **kernel.attributes(operands, params))
        return list(outputs)[:num_results]

    def _warn_once(self, reason: str) -> None:
        if (self.name, reason) not in _WARNED:
            _WARNED.add((self.name, reason))
            warnings.warn(
                f"{self.name} runs on its XLA form, which is slower than a kernel: {reason}. "
                "implementation='xla' chooses it without this warning.",
                FallbackWarning,
                stacklevel=2,
            )

    def _batch(
        self,
        leaves: Sequence[Any],
        dims: Sequence[int | None],
        *,
        tree: Any,
        params: Any,
        implementation: str,
    ) -> tuple[list[Any], list[int | None]]:
        operands = jax.tree.unflatten(tree, leaves)
        axes = jax.tree.unflatten(tree, [_Axis(d) for d in dims])
        size = next(x.shape[d] for x, d in zip(leaves, dims, strict=True) if d is not None)
        folded = {}
        for field, value in operands._asdict().items():
            axis = getattr(axes, field)
            if self.fold is not None and field in self.fold.operands:
                folded[field] = jax.tree.map(functools.partial(_fold, size), value, axis)
            elif any(a.index is not None for a in jax.tree.leaves(axis)):
                raise NotImplementedError(self._vmap_advice(field))
            else:
                folded[field] = value
        results = self(type(operands)(**folded), params, implementation=implementation)
        outs, out_dims = [], []
        for field, value in results._asdict().items():
            unfold = self.fold is not None and field in self.fold.results
            for leaf in jax.tree.leaves(value):
                outs.append(_unfold(size, leaf) if unfold else leaf)
                out_dims.append(0 if unfold else None)
        return outs, out_dims

    def _vmap_advice(self, field: str) -> str:
        if self.fold is None:
            return (
                f"{self.name}: vmap is not supported (mapped argument '{field}'); the operator is "
                "already batched over sequences, or use jax.lax.map"
            )
        allowed = ", ".join(sorted(self.fold.operands))
        return (
            f"{self.name}: vmap over argument '{field}' is not supported; only {allowed} may be "
            "mapped. Use jax.lax.map for the others"
        )

    def _refuse_gradient(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self.name} cannot be differentiated: {self._gradient}")


_WARNED: set[tuple[str, str]] = set()


@dataclasses.dataclass(frozen=True)
class _Axis:
    """A mapped axis as a pytree leaf (None would vanish from the tree)."""

    index: int | None


def _fold(size: int, value: jax.Array, axis: _Axis) -> jax.Array:
    if axis.index is None:
        value = jnp.broadcast_to(value, (size, *value.shape))
    else:
        value = jnp.moveaxis(value, axis.index, 0)
    return value.reshape(size * value.shape[1], *value.shape[2:])


def _unfold(size: int, value: jax.Array) -> jax.Array:
    return value.reshape(size, value.shape[0] // size, *value.shape[1:])


def _plain_arrays(operands: Any) -> Any:
    """Operands with wrappers such as ``nnx.Param``, which are arrays to jax.numpy, taken off."""

    def is_wrapper(x: Any) -> bool:
        return getattr(x, "__jax_array__", None) is not None

    return jax.tree.map(
        lambda x: x.__jax_array__() if is_wrapper(x) else x, operands, is_leaf=is_wrapper
    )


def vary_alike(leaves: Sequence[Any]) -> list[Any]:
    """Inside shard_map, mark every operand as varying over the axes that any of them varies on."""
    varying = [_varying_axes(leaf) for leaf in leaves]
    union = frozenset[Any]().union(*varying)
    return [
        leaf if axes == union else jax.lax.pcast(leaf, tuple(union - axes), to="varying")
        for leaf, axes in zip(leaves, varying, strict=True)
    ]


def _varying_axes(leaf: Any) -> frozenset[Any]:
    return frozenset(jax.typeof(leaf).manual_axis_type.varying)


def _like(avals: Sequence[Any], result: jax.ShapeDtypeStruct) -> Any:
    """The type of a result, carrying the manual axes of an enclosing shard_map."""
    if not avals:
        return jax.core.ShapedArray(result.shape, jnp.dtype(result.dtype))
    return avals[0].update(
        shape=result.shape,
        dtype=jnp.dtype(result.dtype),
        weak_type=False,
        sharding=_replicated(avals[0].sharding.mesh, len(result.shape)),
    )


def _unplaced(aval: Any, mesh: Any) -> Any:
    return aval.update(
        manual_axis_type=jax.core.ShapedArray((), aval.dtype).manual_axis_type,
        sharding=_replicated(mesh, aval.ndim),
    )


def _automatic_mesh(avals: Sequence[Any]) -> Any:
    """The operands' mesh, its explicit axes made automatic."""
    meshes = [aval.sharding.mesh for aval in avals]
    mesh = next((m for m in meshes if not m.empty), meshes[0])
    automatic = jax.sharding.AxisType.Auto
    return mesh.update_axis_types({axis: automatic for axis in mesh.explicit_axes})


def _replicated(mesh: Any, rank: int) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * rank))


def _places(tree: Any) -> Any:
    """The tree with the index of each leaf in its place."""
    structure = jax.tree.structure(tree)
    return jax.tree.unflatten(structure, range(structure.num_leaves))


def _refuse_automatic_sharding(name: str, axis_context: Any) -> None:
    """XLA would gather the operands of a custom call it has to partition by itself."""
    mesh = getattr(axis_context, "mesh", None)
    if mesh is None:
        devices = getattr(axis_context, "num_devices", 1) or 1
    else:
        automatic = set(mesh.axis_names) - set(axis_context.manual_axes)
        devices = 1
        for axis in automatic:
            devices *= mesh.shape[axis]
    if devices > 1:
        raise ValueError(
            f"{name}: the kernel is compiled for one device, but the program is partitioned over "
            f"{devices} devices; call it inside jax.shard_map with every mesh axis manual (else "
            "XLA would gather all operands on every device)"
        )
