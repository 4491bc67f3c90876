import re

import jax
import pytest

from tests.helpers import mesh
from tools import benchmark_checkpoint
from tools.benchmark_checkpoint import Ours, make_state, measure, sizes


def test_the_table(tmp_path, capsys):
    pytest.importorskip("orbax.checkpoint")
    benchmark_checkpoint.benchmark(tmp_path, 4 * 10**6, 1)
    what, heads, *rows, orbax, ours, memory = capsys.readouterr().out.splitlines()
    assert re.match(r"3,694,564 bytes in 289 parts; ", what)
    assert [row[:20].strip() for row in rows] == list(benchmark_checkpoint.TIMES)
    for row in rows:
        plain, orbax_, ours_, *ratios = (float(n) for n in re.findall(r"([\d.]+)%? \(", row))
        assert ratios == pytest.approx([100 * plain / ours_, 100 * orbax_ / ours_], rel=0.1)
    assert re.findall("plain|orbax|ours", heads) == ["plain", "orbax", "ours", "plain", "orbax"]
    assert "Orbax 0." in orbax and "Ours 0." in ours
    assert float(memory.split(": ")[1].split()[0]) > 0.5, "steps go on in memory of their own"
    assert not list(tmp_path.iterdir())


def test_what_is_restored_is_looked_at(tmp_path, monkeypatch):
    with jax.set_mesh(mesh(4, 2)):
        size = sizes(10**6)
        state = make_state(size)
        other = jax.tree.map(lambda x: -x, state)
        monkeypatch.setattr(Ours, "restore", lambda self: other)
        with pytest.raises(ValueError, match="isn't what was saved"):
            measure(Ours, tmp_path / "x", state, size)
