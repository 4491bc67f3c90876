"""Finds the layouts in which a config's training step is fastest on some chips, by the audit's
figures.

    python -m tools.plan --config-name=c4_h100x8_2b chips=h100:64
    python -m tools.plan --config-name=c4_v5ex16_2b chips=v5p:4x4x8

Tries the meshes of that many chips, and prints the fastest ones that fit, with the overrides that
choose them. The config's own mesh and microbatches don't matter; all else stays as it is.

A layout's time is that of the resource which needs longest: see `tools.audit`. If a step doesn't
fit, microbatches or loss chunks are added, one divisor at a time, until it does.
"""

import contextlib
import dataclasses
import math
import operator
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import train
from runtime import chips
from runtime.program import program
from shardlib import devices
from shardlib.errors import UserError
from tools.audit import NOT_USED, Probed, audit_step, check_rates, probe
from tools.memory import ARRAYS, LOGITS, SAVED
from tools.roofline import Bound, bound, bound_head
from tools.tables import show, table

SHOWN = 10
PARTS = "training.microbatches", "training.loss_chunks"
# Of a chip's memory. What compilers reported of the tests' programs was never more than 10% above a
# prediction: see docs/audit.md.
ROOM = 0.9


@dataclasses.dataclass(unsafe_hash=True)
class PlanConfig(train.Config):
    chips: str = ""  # a key of chips.CHIPS and how many: h100:64, v5p:4x4x8


class Plan(NamedTuple):
    """A layout, and what a step needs in it."""

    config: PlanConfig
    result: dict[str, Any]  # of `audit_step`
    bound: Bound
    room: float  # bytes that it may take

    @property
    def order(self) -> tuple[float, float]:
        """Faster ones come first; of two with the same longest time, that with less besides."""
        seconds = self.bound.seconds.values()
        return float(f"{max(seconds):.3g}"), sum(seconds)


def chips_of(written: str) -> tuple[chips.Chip, int]:
    """The kind and the number of chips. Raises UserError if they aren't written like h100:64."""
    name, _, count = written.partition(":")
    if name not in chips.CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", count):
        raise UserError(
            f"chips={written!r}: write a kind and a number, such as h100:64 or v5p:4x4x8; the "
            f"kinds are {', '.join(chips.CHIPS)}"
        )
    return chips.CHIPS[name], math.prod(map(int, count.split("x")))


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def meshes(chip: chips.Chip, count: int) -> Iterator[dict[str, int]]:
    """Yields the meshes of `count` chips with t within fast links, and with either no replicas or
    as many as there are groups of chips with fast links."""
    replicas = {1, *({count // int(chip.near)} if count % chip.near == 0 else ())}
    for t in divisors(count):
        for c in divisors(count // t) if t <= chip.near else []:
            d = count // t // c
            yield from ({"d": d, "t": t, "r": r, "c": c} for r in replicas if d % r == 0)


def smaller(plan: Plan) -> PlanConfig:
    """The config with more parts: of the loss if its logits are in memory at the peak, else of the
    rows. Raises UserError if there are none to add, or if the rest alone doesn't fit."""
    config, held = plan.config, plan.result["held"]
    tokens, mesh = config.training.tokens, config.mesh
    needs = f"{devices.show_axes(mesh.axes)} needs"
    in_parts = SAVED, ARRAYS, LOGITS
    at_least = sum(size for name, size in held.items() if name not in in_parts)
    if at_least > plan.room:
        raise UserError(f"{needs} {show(at_least)} besides activations")
    wholes = dict(zip(PARTS, (tokens.batch // mesh.d, tokens.len // mesh.c), strict=True))
    for key in reversed(PARTS) if LOGITS in held else PARTS:
        if more := [n for n in divisors(wholes[key]) if n > operator.attrgetter(key)(config)]:
            with contextlib.suppress(UserError):  # as with a cost that allows no microbatches
                return config.changed({key: more[0]})
    raise UserError(f"{needs} {show(plan.bound.peak)}, in as many parts as there can be")


def plans(config: PlanConfig, chip: chips.Chip, count: int) -> list[Plan]:
    """Finds for each mesh the plan with the fewest parts that fits, fastest first. Raises UserError
    if there is no plan."""
    found, reason = list[Plan](), ""
    probed: dict[Any, Probed] = {}  # a step in parts has other arrays
    for mesh in meshes(chip, count):
        values = {f"mesh.{axis}": size for axis, size in mesh.items()}
        try:
            tried = config.changed(values | {"training.microbatches": 1})
            while True:
                in_parts = tuple(parts > 1 for parts in operator.attrgetter(*PARTS)(tried))
                if in_parts not in probed:
                    probed[in_parts] = probe(tried)
                result = audit_step(tried, probed[in_parts], chip)
                least = bound(result, chip, chip.links_of(tried.mesh.axes))
                plan = Plan(tried, result, least, ROOM * chip.usable)
                if least.peak <= plan.room:
                    break
                tried = smaller(plan)
            found.append(plan)
        except UserError as error:  # the config doesn't split this way, or doesn't fit
            reason = str(error)
    if not found:
        raise UserError(f"no mesh of {config.chips} holds a step of this config: {reason}")
    return sorted(found, key=lambda plan: plan.order)


def overrides(config: PlanConfig, plan: PlanConfig) -> str:
    """The arguments to add to the command line: d, t, and what else isn't as in the config."""
    values = {}
    for key in ("mesh.d", "mesh.t", "mesh.r", "mesh.c", *PARTS):
        value = operator.attrgetter(key)(plan)
        if key in ("mesh.d", "mesh.t") or value != operator.attrgetter(key)(config):
            values[key] = value
    return " ".join(f"{key}={value}" for key, value in values.items())


@program(PlanConfig, "configs", NOT_USED | {"mesh": {"d": 1, "t": 1}})
def main(config: PlanConfig) -> None:
    check_rates(config)
    chip, count = chips_of(config.chips)
    found = plans(config, chip, count)[:SHOWN]
    tokens = config.training.tokens
    print(f"{count} x {chip.kind}, {tokens.batch} rows of {tokens.len} tokens a step. At least:\n")
    rows = [(*plan.bound.cells(), overrides(config, plan.config)) for plan in found]
    print(table((*bound_head(chip), "overrides"), rows))


if __name__ == "__main__":
    main()
