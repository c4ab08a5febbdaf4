"""Meshes of host devices, also on a machine whose default device is one GPU."""

import jax
from jax.sharding import AxisType, Mesh


def host_mesh(size: int = 4, axis: str = "t", axis_type: AxisType = AxisType.Auto) -> Mesh:
    """``size`` CPU devices (conftest asks for four) along one axis."""
    devices = jax.devices("cpu")[:size]
    return jax.make_mesh((size,), (axis,), axis_types=(axis_type,), devices=devices)
