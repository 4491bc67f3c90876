"""Names of mesh axes, and the mesh in context."""

from collections.abc import Collection, Mapping

import jax
from jax.sharding import AbstractMesh, AxisType

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


def abstract_mesh(axes: dict[str, int]) -> AbstractMesh:
    """A mesh without devices, to trace on."""
    types = (AxisType.Auto,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types)
