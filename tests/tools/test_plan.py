import itertools

import pytest

from runtime import chips
from tests import golden
from tests.helpers import compose_config, train_here
from tools import audit, plan, roofline

CONFIG = "local_test_synthetic", "paths.model_name=x", "model.layers=1", "training.loss_chunks=1"


@pytest.mark.slow
def test_it_finds_what_trying_everything_finds():
    """Tries all meshes that the tool's rules allow, with several numbers of parts each, and takes
    for each mesh the fastest that fits."""
    count, memory = 4, 24e6
    config = compose_config(*CONFIG, schema=plan.PlanConfig)
    chip = chips.Chip("small", 1e9, memory / 0.75, 1e9, {"near": 1e6, "far": 1e5}, near=count // 2)
    expected, probed, tried = {}, {}, 0
    for d, t, r, c in itertools.product([1, 2, 4], repeat=4):
        if d * t * c != count or t > chip.near or r not in (1, 2) or d % r:
            continue
        for parts in itertools.product([1, 2, 4], [1, 2]):
            values = {"mesh.d": d, "mesh.t": t, "mesh.r": r, "mesh.c": c}
            changed = config.changed(values | dict(zip(plan.PARTS, parts, strict=True)))
            several = tuple(n > 1 for n in parts)
            if several not in probed:
                probed[several] = audit.probe(changed)
            result = audit.audit_step(changed, probed[several], chip)
            bound = roofline.bound(result, chip, chip.links_of(changed.mesh.axes))
            tried += 1
            if bound.peak <= 0.9 * memory:
                least = max(bound.seconds.values())
                expected[d, t, r, c] = min(least, expected.get((d, t, r, c), least))
    plans = list(plan.plans(config, chip, count))
    meshes = [each.config.mesh for each in plans]
    times = [max(each.bound.seconds.values()) for each in plans]
    found = {(m.d, m.t, m.r, m.c): time for m, time in zip(meshes, times, strict=True)}
    assert tried > 6 and found == pytest.approx(expected)
    assert all(a <= b * 1.01 for a, b in itertools.pairwise(times))
    assert any(each.config.training.microbatches > 1 for each in plans), "memory is too large"


@pytest.mark.slow
def test_a_cost_that_allows_no_microbatches_leaves_other_layouts():
    experts = "model.experts={count: 4, per_token: 2, d_ff: 8192}", "model.d_ff=0"
    options = *experts, "training.routing.balance_cost=1", "training.loss_chunks=64"
    config = compose_config(*CONFIG[:3], *options, schema=plan.PlanConfig)
    chip = chips.Chip("small", 1e9, 480e6, 1e9, {"near": 1e6, "far": 1e5}, near=2)
    (one,) = plan.plans(config, chip, 2)
    assert one.config.mesh.t == 2 and one.config.training.microbatches == 1


@pytest.mark.parametrize("chips", ["", "h100", "b300:8", "v5p:4x", "h100:0", "h100:7"])
def test_chips_that_it_cannot_plan_for(chips, capsys, monkeypatch):
    arguments = ["--config-name=c4_h100x8_1b", f"chips={chips}"]
    out, message = train_here(capsys, monkeypatch, *arguments, program=plan.main)
    assert not out
    golden.check("wrong_inputs.txt", f"plan: chips={chips}", message)
