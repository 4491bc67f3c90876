"""Computes the least time that a chip needs for a training step from its audit."""

import math
from typing import Any, NamedTuple

from runtime import chips
from tools.tables import show


class Bound(NamedTuple):
    """A step's peak memory, and the least time that it needs on a chip."""

    peak: int  # bytes
    seconds: dict[str, float]  # by resource
    mfu: float  # at most

    @property
    def longest(self) -> str:
        """The resource that bounds the step."""
        return max(self.seconds, key=self.seconds.__getitem__)

    def cells(self) -> tuple[str, ...]:
        times = (show(spent, "s") for spent in self.seconds.values())
        return (show(self.peak), *times, self.longest, f"{self.mfu:.0%}")


def peak_rates(chip: chips.Chip) -> str:
    """Formats the peak rates that bounds assume."""
    links = (f", {link} {show(rate, 'B/s')}" for link, rate in chip.links.items())
    memory = show(chip.bandwidth, "B/s")
    return f"{show(chip.flops, 'FLOP/s')}, memory {memory}{''.join(links)}"


def bound_head(chip: chips.Chip) -> tuple[str, ...]:
    """The headings of `Bound.cells`."""
    return ("peak", "compute", "memory", *chip.links, "longest", "MFU at most")


def seconds(rows: dict[str, Any], chip: chips.Chip, mesh: dict[str, int]) -> dict[str, float]:
    """Returns the least time that rows of an audit's tables need on each resource. A collective
    over several axes takes their slowest link, for what comes from another host."""
    products, links, fast = rows.get("products", ()), chip.links_of(mesh), next(iter(chip.links))
    flops = sum(row["at_least"] * row["flops"] * row["flops_share"] for row in products)
    moved = sum(row["at_least"] * row["bytes"] * row["bytes_share"] for row in products)
    spent = {"compute": flops / chip.flops, "memory": moved / chip.bandwidth}
    spent |= dict.fromkeys(chip.links, 0.0)
    for row in rows.get("transfers", ()):
        link = min((links[x] for x in row["axes"]), key=chip.links.__getitem__)
        far = 1 if link == fast else chip.share_from_afar(row["kind"], tuple(row["axes"]), mesh)
        rings = chip.rings if {x for x in mesh if mesh[x] > 1} <= {*row["axes"]} else 1
        for each, share in (link, far), (fast, 1 - far):
            spent[each] += row["at_least"] * row["bytes"] * share / chip.links[each] / rings
    return spent


def bound(result: dict[str, Any], chip: chips.Chip) -> Bound:
    """Returns the least time that a step needs on each resource, from the lower bounds of counts.
    Memory traffic is what matmuls, ops with a kernel, and the optimizer read and write."""
    spent = seconds(result, chip, result["mesh"])
    # Weights and moments are read and written, and gradients read.
    moved = 3 * result["held"]["weights"] + 2 * result["held"]["moments"]
    spent["memory"] += (result["kernel_bytes"] + moved) / chip.bandwidth
    needed = result["model_flops"] / math.prod(result["mesh"].values()) / chip.flops
    return Bound(result["peak"], spent, needed / max(spent.values()))
