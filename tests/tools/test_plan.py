import itertools
import re

import pytest

from runtime import chips
from tests import golden
from tests.helpers import SMALL, compose_config
from tools import plan
from tools.audit import roofline
from tools.audit import step as audited

CONFIG = "local_test_synthetic", "paths.model_name=x", "model.layers=1", "training.loss_chunks=1"


@pytest.mark.slow
def test_it_finds_what_trying_everything_finds(capsys):
    """Tries all meshes that the tool's rules allow, with several numbers of parts each, and takes
    for each mesh the fastest that fits."""
    count, memory = 4, 27e6
    config = compose_config(*CONFIG, schema=plan.PlanConfig)
    chip = chips.Chip("small", 1e9, memory / 0.75, 1e9, {"near": 1e6, "far": 1e5}, near=count // 2)
    expected, tried = {}, 0
    for d, t, r, c in itertools.product([1, 2, 4], repeat=4):
        if d * t * c != count or t > chip.near or r not in (1, 2) or d % r:
            continue
        for parts in itertools.product([1, 2, 4], [1, 2]):
            values = {"mesh.d": d, "mesh.t": t, "mesh.r": r, "mesh.c": c}
            values |= dict(zip((plan.MICROBATCHES, plan.CHUNKS), parts, strict=True))
            changed = config.changed(values)
            result = audited.audit_step(changed, None, chip)
            bound = roofline.bound(result, chip)
            tried += 1
            if bound.peak <= 0.9 * memory:
                least = max(bound.seconds.values())
                expected[d, t, r, c] = min(least, expected.get((d, t, r, c), least))
    plans, larger = plan.plans(config, chip, count)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(plans) + len(larger) == tried // 6
    meshes = [each.config.mesh for each in plans]
    times = [max(each.bound.seconds.values()) for each in plans]
    found = {(m.d, m.t, m.r, m.c): time for m, time in zip(meshes, times, strict=True)}
    assert tried > 6 and found == pytest.approx(expected)
    assert all(a <= b * 1.01 for a, b in itertools.pairwise(times))
    assert any(each.config.training.microbatches > 1 for each in plans), "memory is too large"


def test_no_more_microbatches_than_needed_divide_the_mask_of_documents():
    rows = "training.tokens={batch: 4, len: 65536}", "training.loss_chunks=64"
    given = "pretrain", "paths.model_name=x", "flat_tokens.filespec=x", "model=84m", *rows
    config = compose_config(*given, "mesh.d=1", schema=plan.PlanConfig)
    found = plan.lightest(config, {"training.microbatches": 1}, chips.CHIPS["h100"])
    assert found.config.training.microbatches == 2


@pytest.mark.slow
def test_a_cost_that_allows_no_microbatches_leaves_other_layouts():
    experts = "model.experts={count: 4, per_token: 2, d_ff: 8192}", "model.d_ff=0"
    options = *experts, "training.routing.balance_cost=1", "training.loss_chunks=64"
    config = compose_config(*CONFIG[:3], *options, schema=plan.PlanConfig)
    chip = chips.Chip("small", 1e9, 480e6, 1e9, {"near": 1e6, "far": 1e5}, near=2)
    (one,), larger = plan.plans(config, chip, 2)
    assert one.config.mesh.t == 2 and one.config.training.microbatches == 1
    excess = [each.bound.peak - 0.9 * 0.75 * 480e6 for each in larger]
    assert [each.excess for each in larger] == excess == sorted(excess) and excess[0] > 0


@pytest.mark.parametrize(
    "chips", ["", "h100", "b300:8", "v5p:4x", "h100:0", "h100:7", "h100:8 rates.ici=1e9"]
)
def test_chips_that_it_cannot_plan_for(chips, train_here):
    arguments = ["--config-name=c4_h100x8_1b", *f"chips={chips}".split()]
    out, message = train_here(*arguments, program=plan.main)
    assert not out
    golden.check("wrong_inputs.txt", f"plan: chips={chips}", message)


def test_the_head_and_the_configs_own_layout_which_does_not_matter(train_here, monkeypatch):
    """Nor does it matter whether it is one: 3 microbatches don't divide 8 rows."""
    start = "--config-name=local_test_synthetic", *SMALL, "dtype=bf16", "chips=v5e:1"

    def planned(*own):
        return train_here(*start, *own, program=plan.main)

    _, message = planned("training.tokens.batch=${mesh.d}")
    problem = "follows what this program chooses: give it a value"
    assert message == f"error: training.tokens.batch {problem}"
    out, message = planned("training.steps=100000000", "mesh={d: 1, t: 1}")
    assert not message and "\nmesh" not in out
    said = []
    monkeypatch.setattr(plan, "tell", lambda text, _: said.append(text))
    for own in "mesh={d: 4, r: 3, t: 7, c: 5}", "training.microbatches=3":
        said.clear()
        assert planned("training.steps=100000000", own) == (out, "")
        assert said[0].startswith("note: ignored, as ") and said[0].endswith(own)
    head, rates, bound, *_, row = out.splitlines()
    weights = 2 * 128 * 32 + 32 + 2 * (2 * 32 + 2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 40)
    assert head == f"1 x TPU v5 lite, {weights:,} parameters, 8 rows of 12 tokens a step."
    assert row.endswith(" mesh.d=1 mesh.t=1 mesh.r=1 mesh.c=1 training.microbatches=1")
    longest = max(float(n) for n in re.findall(r"([\d.]+) us", row)) / 1e6
    assert rates.endswith("peak rates, 197 TFLOP/s, memory 819 GB/s, ici 100 GB/s,")
    pattern = "it trains at most (.*) tokens/s: 100,000,000 steps in (.*) days."
    speed, days = re.fullmatch(pattern, bound).groups()
    assert float(speed.replace(",", "")) == pytest.approx(96 / longest, rel=0.01)
    assert float(days) == pytest.approx(1e8 * longest / 86400, rel=0.01)


def test_what_does_not_fit_and_other_loss_chunks_are_said(train_here, monkeypatch):
    chip = chips.CHIPS["v5e"]._replace(memory=3.5e6 / plan.ROOM)
    monkeypatch.setitem(chips.CHIPS, "v5e", chip)
    start = "--config-name=local_test_synthetic", *SMALL, "dtype=bf16", "model.vocab=4096"
    asked = "training.tokens={batch: 8, len: 48}", "chips=v5e:2"
    out, message = train_here(*start, *asked, program=plan.main)
    assert not message
    table, chunks, larger, misfits = out.split("\n\n")[2:]
    (row,) = table.splitlines()[1:]
    more = re.search(r" mesh.t=2 .* training.loss_chunks=(\d+)$", row)
    assert int(more[1]) > 1 and "set training.loss_chunks don't fit with the config's 1" in chunks
    assert larger.startswith("These need more than 3.5 MB, 90% of ")
    for line, mesh in zip(misfits.splitlines(), ("d=1 mesh.t=1 .*c=2", "d=2 .*c=1"), strict=True):
        least, excess = re.fullmatch(rf"mesh.{mesh} .*: (.*) MB, (.*) kB too much", line).groups()
        assert float(least) - float(excess) / 1000 == pytest.approx(3.5, abs=0.02)
