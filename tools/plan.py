"""Finds the layouts in which a config's training step is fastest on given chips, as predicted by
the audit.

    python -m tools.plan --config-name=c4_h100x8_2b chips=h100:64
    python -m tools.plan --config-name=c4_v5ex16_2b chips=v5p:4x4x8

    chips=KIND:COUNT    a key of runtime/chips.py, and how many of them: h100:64, v5p:4x4x8
    rates={LINK: RATE}  another rate of a link, in bytes/s, such as {ib: 25e9}

Tries the meshes of that many chips, and prints the fastest ones that fit, with the overrides that
choose them. The config's own mesh and microbatches are ignored; all else is kept. Reports each mesh
on standard error as it goes: one takes a second or a few.

A layout takes as long as its slowest resource: see `tools.audit`. If a step doesn't fit, the plan
adds loss chunks and microbatches, no more than needed.
"""

import contextlib
import dataclasses
import itertools
import math
import operator
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

import jax

import train
from checks import preflight
from runtime import chips
from runtime.errors import tell
from runtime.program import program
from shardlib.errors import UserError
from shardlib.mesh import abstract_mesh, show_axes
from shardlib.types import make_shapes
from tools.arguments import NOT_USED
from tools.audit.memory import ARRAYS, LOGITS, MASK, SAVED
from tools.audit.roofline import Bound, bound, bound_head, peak_rates
from tools.audit.step import audit_step, check_rates
from tools.tables import show, table

SHOWN, NEAREST = 10, 3  # numbers of listed layouts: that fit, and that don't
# Settings that the plan chooses.
CHOSEN = {"mesh": {"d": 1, "t": 1, "r": 1, "c": 1}, "training": {"microbatches": 1}}
LAYOUT = r"\+*(mesh|training\.microbatches)\b"  # how their overrides begin
MICROBATCHES, CHUNKS = "training.microbatches", "training.loss_chunks"
# Share of a chip's usable memory. For the tests' programs, compilers never reported more than 10%
# above the prediction: see docs/audit.md.
ROOM = 0.9


@dataclasses.dataclass(unsafe_hash=True)
class PlanConfig(train.Config):
    chips: str = ""  # KIND:COUNT
    rates: dict[str, float] = dataclasses.field(default_factory=dict, hash=False)


class Plan(NamedTuple):
    """A layout, and what a step needs in it."""

    layout: dict[str, int]  # the settings that choose it, by dotted key
    config: PlanConfig  # with them
    held: dict[str, int]  # bytes at the peak, by term
    bound: Bound
    excess: float  # bytes by which it doesn't fit; at most 0 if it fits

    @property
    def seconds(self) -> float:
        """The least time of a step."""
        return max(self.bound.seconds.values())

    @property
    def order(self) -> tuple[float, int, float]:
        """Sorts by the time of the slowest resource, then by t, as compilers overlap little of what
        is sent over it (docs/gpus.md), then by the sum over resources."""
        spent = sum(self.bound.seconds.values())
        return float(f"{self.seconds:.3g}"), self.config.mesh.t, spent

    @property
    def overrides(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.layout.items())

    def __str__(self) -> str:
        needs = f"{self.overrides}: {show(self.bound.peak)}"
        if self.excess > 0:
            return f"{needs}, {show(self.excess)} too much"
        return f"{needs}, at least {show(self.seconds, 's')} a step ({self.bound.longest})"


def chips_of(written: str, rates: dict[str, float]) -> tuple[chips.Chip, int]:
    """Returns the kind, with other `rates` of links, and the number of chips. Raises UserError
    unless `written` is like h100:64."""
    name, _, count = written.partition(":")
    if name not in chips.CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", count):
        cure = "write a kind and a number, such as h100:64 or v5p:4x4x8"
        raise UserError(f"chips={written!r}: {cure}; the kinds are {', '.join(chips.CHIPS)}")
    return chips.CHIPS[name].with_rates(rates), math.prod(map(int, count.split("x")))


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def meshes(chip: chips.Chip, count: int) -> Iterator[dict[str, int]]:
    """Yields the meshes of `count` chips with t within fast links, and with either no replicas or
    as many as there are groups of chips with fast links. Meshes that split no rows (c=1) come
    first, as they are usually faster."""
    replicas = {1, *({count // int(chip.near)} if count % chip.near == 0 else ())}
    for c, t, r in itertools.product(divisors(count), divisors(count), replicas):
        d, rest = divmod(count, c * t)
        if not rest and t <= chip.near and d % r == 0:
            yield {"d": d, "t": t, "r": r, "c": c}


def audited(config: PlanConfig, layout: dict[str, int], chip: chips.Chip) -> Plan:
    """Audits a layout. Raises UserError if the config doesn't split this way."""
    config = config.changed(layout)
    result = audit_step(config, None, chip)
    least = bound(result, chip)
    return Plan(layout, config, result["held"], least, least.peak - ROOM * chip.usable)


def smaller(plan: Plan, most: dict[str, int]) -> dict[str, int] | None:
    """Returns the layout with the fewest loss chunks or, if no number of them suffices, of
    microbatches, with which the plan may fit; if none may, the one with the most of both, or None
    if the plan has these. Assumes that chunks divide the logits, and that microbatches remove the
    logits and divide the other activations."""
    logits = plan.held.get(LOGITS, 0)
    saved = sum(plan.held.get(name, 0) for name in (SAVED, ARRAYS, MASK))
    shrinks = {CHUNKS: (0, logits), MICROBATCHES: (logits, saved)}  # bytes gone, and divided
    for key, (wholly, divided) in shrinks.items():
        parts = operator.attrgetter(key)(plan.config)
        for more in divisors(most[key]):
            if more > parts and wholly + divided * (1 - parts / more) >= plan.excess:
                return plan.layout | {key: more}
    return None if most.items() <= plan.layout.items() else plan.layout | most


def lightest(config: PlanConfig, layout: dict[str, int], chip: chips.Chip) -> Plan:
    """Returns the plan for the layout's mesh that fits with the fewest chunks and microbatches; if
    none fits, the one with the least memory. Raises UserError if the config doesn't split so."""
    tried = [audited(config, layout, chip)]
    tokens, mesh = tried[0].config.training.tokens, tried[0].config.mesh
    most = {CHUNKS: tokens.len // mesh.c, MICROBATCHES: tokens.batch // mesh.d}
    with contextlib.suppress(UserError):  # as with a cost that allows no microbatches
        while tried[-1].excess > 0 and (more := smaller(tried[-1], most)):
            tried.append(audited(config, more, chip))
    return min(tried, key=lambda plan: plan.excess)


def plans(config: PlanConfig, chip: chips.Chip, count: int) -> tuple[list[Plan], list[Plan]]:
    """Finds and reports a plan for each mesh. Returns the plans that fit, fastest first, and the
    others, nearest first. Raises UserError if none fits."""
    found, problems, tried = list[Plan](), list[str](), [*meshes(chip, count)]
    for number, mesh in enumerate(tried, 1):
        layout = {f"mesh.{axis}": size for axis, size in mesh.items()} | {MICROBATCHES: 1}
        try:
            found.append(plan := lightest(config, layout, chip))
            line = str(plan)
        except UserError as error:  # the config doesn't split this way
            problems.append(line := f"{show_axes(mesh)}: {error}")
        tell(f"{number}/{len(tried)}  {line}", sys.stderr)
    fitting = sorted((x for x in found if x.excess <= 0), key=lambda plan: plan.order)
    larger = sorted((x for x in found if x.excess > 0), key=lambda plan: plan.excess)
    if not fitting:
        nearest = "; ".join([*map(str, larger), *problems][:NEAREST])
        raise UserError(f"no mesh of {config.chips} holds a step of this config: {nearest}")
    return fitting, larger


@program(PlanConfig, "configs", NOT_USED, fixed=CHOSEN)
def main(config: PlanConfig) -> None:
    own = [given.lstrip("+") for given in sys.argv[1:] if re.match(LAYOUT, given)]
    if own:
        tell(f"note: ignored, as the plan chooses these: {' '.join(own)}", sys.stderr)
    check_rates(config)
    chip, count = chips_of(config.chips, config.rates)
    room = ROOM * chip.usable  # raises once here, not for each mesh
    preflight.check_types(train, config)
    fitting, larger = plans(config, chip, count)

    training, tokens = config.training, config.training.tokens
    with jax.sharding.use_abstract_mesh(abstract_mesh(config.mesh.axes)):
        weights = make_shapes(train.state_type(config).weights, train.dimensions(config))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(weights))
    rows = f"{tokens.batch} rows of {tokens.len} tokens a step"
    print(f"{count} x {chip.kind}, {parameters:,} parameters, {rows}.")
    seconds = fitting[0].seconds
    days = f"{training.steps:,} steps in {training.steps * seconds / 86400:.3g} days"
    print(f"Nothing was measured. At the chip's peak rates, {peak_rates(chip)},")
    print(f"it trains at most {tokens.batch * tokens.len / seconds:,.0f} tokens/s: {days}.")
    shown = fitting[:SHOWN]
    cells = [(*plan.bound.cells(), plan.overrides) for plan in shown]
    print(f"\nThe least that a step needs:\n\n{table((*bound_head(chip), 'overrides'), cells)}")
    if any(CHUNKS in plan.layout for plan in shown):
        print(f"\nRows that set {CHUNKS} don't fit with the config's {training.loss_chunks}.")
    if larger:
        print(f"\nThese need more than {show(room)}, {ROOM:.0%} of what JAX takes of a chip:\n")
        print(*larger[:NEAREST], sep="\n")


if __name__ == "__main__":
    main()
