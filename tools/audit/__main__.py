"""Reports what a training step saves, sends and computes on each device, without devices, data or
weights.

    python -m tools.audit --config-name=c4_h100x8_1b
    python -m tools.audit --config-name=c4_h100x8_1b mesh.d=4 mesh.t=2 audit.json=audit.json
    python -m tools.audit --config-name=c4_h100x8_1b audit.chip=a100 audit.html=audit.html
    python -m tools.audit --config-name=c4_h100x8_1b audit.against=main

    audit.chip=KIND              adds a roofline for a key of runtime/chips.py, such as h100 or v5p
    audit.links={AXIS: LINK}     the chip's link that a mesh axis uses, such as {s: ib}
    audit.rates={LINK: RATE}     another rate of a link, in bytes/s, such as {ib: 25e9}
    audit.against=FILE|REVISION  prints what differs from an earlier audit's JSON, or from the audit
                                 of a git revision; configs missing there are today's
    audit.json=FILE              writes the ledger as JSON
    audit.html=FILE              writes a page: the figures on its first screen; below, the source
                                 with the amounts beside its lines, and the text
    audit.least=SHARE            lists rows above this share of a table's total, 0.001 by default

Traces the step that train.py runs, on the config's mesh, and prints the ledger of its jaxpr: tables
of saved activations, collectives and matmuls. Also predicts the step's peak memory. Sizes are
decimal: a GB is 10^9 bytes.
"""

import dataclasses
import json
import math
import pathlib
from typing import Annotated

from pydantic import Field

import train
from runtime import chips
from runtime.config import Section
from runtime.program import program
from shardlib.errors import UserError
from shardlib.mesh import show_axes
from tools.arguments import NOT_USED
from tools.audit import compare
from tools.audit.page import page
from tools.audit.roofline import bound, bound_head, peak_rates
from tools.audit.step import audit_step, check_rates, probe
from tools.audit.text import LEAST, report
from tools.tables import table


@dataclasses.dataclass
class AuditOptions(Section, key="audit"):
    """See the top of this file."""

    json: str = ""
    html: str = ""
    against: str = ""
    least: Annotated[float, Field(ge=0, le=1)] = LEAST
    chip: str = ""
    links: dict[str, str] = dataclasses.field(default_factory=dict)
    rates: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(unsafe_hash=True)
class AuditConfig(train.Config):
    audit: AuditOptions = dataclasses.field(default_factory=AuditOptions, hash=False)


def chip_of(config: AuditConfig) -> chips.Chip | None:
    """Returns the chip that audit.chip names, if any. Raises UserError if chips.CHIPS lacks it, or
    if audit.links has an unknown axis or link."""
    name, links, rates = config.audit.chip, config.audit.links, config.audit.rates
    if not (name or links or rates):
        return None
    if name not in chips.CHIPS:
        raise UserError(f"audit.chip={name!r}: choose one of {', '.join(chips.CHIPS)}")
    check_rates(config)
    chip, axes = chips.CHIPS[name], config.mesh.axes
    for axis, link in links.items():
        if axis not in axes or link not in chip.links:
            choices = f"the axes are {', '.join(axes)}, the links {', '.join(chip.links)}"
            raise UserError(f"audit.links.{axis}={link}: {choices}")
    return chip.with_rates(rates)._replace(chosen=links)


def roofline(config: AuditConfig, chip: chips.Chip) -> str:
    """Formats a table with a row for the config's mesh, and one for each doubling of d (and of r,
    if there are replicas), up to 4096 devices or until a dimension no longer splits."""
    rows, end, mesh = [], "", config.mesh
    while math.prod((axes := mesh.axes).values()) <= 4096:
        try:
            result = audit_step(dataclasses.replace(config, mesh=mesh), None, chip)
        except UserError as error:
            end = f"\n\nThe table ends here: {error}."
            break
        links = chip.links_of(axes)
        over = ", ".join(f"{axis} {links[axis]}" for axis, size in axes.items() if size > 1)
        rows.append((show_axes(axes), over, *bound(result, chip).cells()))
        mesh = dataclasses.replace(mesh, d=2 * mesh.d, r=2 * mesh.r if mesh.r > 1 else 1)
    times = table(("mesh", "links", *bound_head(chip)), rows)
    head = f"The least time that each resource of {chip.kind} needs for a step, at"
    if "TPU" in chip.kind and config.mesh.r > 1:
        end += "\n\nHere r counts as ici. Links between slices are slower."
    return f"{head} {peak_rates(chip)}. The longest bounds the step:\n\n{times}{end}"


@program(AuditConfig, "configs", NOT_USED)
def main(config: AuditConfig) -> None:
    chip = chip_of(config)
    result = audit_step(config, probe(config), chip)
    if config.audit.json:
        pathlib.Path(config.audit.json).write_text(json.dumps(result, indent=1))
    text = printed = report(result, chip, config.audit.least)
    if config.audit.against:
        before = compare.earlier(config.audit.against, config.audit.chip)
        printed = compare.report(before, result, chip)
        text = f"{printed}\n\n{text}"
    elif chip:
        text = printed = f"{text}\n\n{roofline(config, chip)}"
    if config.audit.html:
        pathlib.Path(config.audit.html).write_text(page(result, chip, text))
    print(printed)


if __name__ == "__main__":
    main()
