"""Names of mesh axes, and meshes with devices or without."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardlib.errors import UserError

groups: dict[str, tuple[str, ...]] = {}


def axis_group(name: str, *axes: str) -> None:
    """Makes `name` stand for these axes, outermost first, on meshes that have no axis of that name.

    axis_group("d", "r", "s")       "B/d" is "B/s/r" from now on, and "{U:d}" is "{U:r,s}"
    """
    groups[name] = axes


def show_axes(mesh: Mapping[str, int], names: Collection[str] = ()) -> str:
    """Formats the axes of a mesh, or only `names`, with their sizes: `d=4, t=2`. Leaves out axes of
    size 1, unless all have size 1. If only one axis of a group is larger, it gets the group's name,
    as in a config: `d=4` for s=4."""
    larger = {axis: size for axis, size in mesh.items() if size > 1} or mesh
    shown = {axis: axis for axis in larger}
    for name, axes in groups.items():
        if len(alone := [axis for axis in axes if axis in larger]) == 1:
            shown |= {alone[0]: name}
    wanted = [axis for axis in larger if not names or axis in names]
    return ", ".join(f"{shown[axis]}={larger[axis]}" for axis in wanted)


def platform() -> str:
    """The platform of the mesh in context. A mesh without devices, to trace on, has none."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else ""


def mesh_over(axes: dict[str, int], devices: Sequence[Any]) -> Mesh:
    """A mesh over these devices, whose neighbors have fast links. Slices of TPUs split the
    outermost axis. Raises UserError if they don't divide it."""
    # GPUs have a slice_index too, the number of their host, but a replica may span several hosts.
    slices = len({getattr(d, "slice_index", 0) for d in devices if "TPU" in d.device_kind}) or 1
    (name, outer), *inner = axes.items()
    if outer % slices:
        raise UserError(f"mesh.{name}={outer}: it must be a multiple of the {slices} slices")
    make: Callable[..., Any] = mesh_utils.create_device_mesh
    if slices > 1:
        over = [slices, *(1 for _ in inner)]
        make = functools.partial(mesh_utils.create_hybrid_device_mesh, dcn_mesh_shape=over)
    within = [outer // slices, *(size for _, size in inner)]
    arranged = make(within, devices=devices, allow_split_physical_axes=True)
    return Mesh(arranged, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def abstract_mesh(axes: dict[str, int]) -> AbstractMesh:
    """A mesh without devices, to trace on."""
    types = (AxisType.Auto,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types)
