import re

import jax
import pytest

from benchmarks import checkpoint
from benchmarks.checkpoint import Ours, make_state, measure, sizes
from tests.helpers import mesh

SECONDS = {"Plain": [0, 1, 2, 3, 4], "Orbax": [0.5, 4, 4, 4, 4], "Ours": [0.25, 2, 2.5, 6, 3]}


@pytest.mark.slow
def test_the_table(tmp_path, capsys, monkeypatch):
    """Runs the benchmark with its times replaced."""
    pytest.importorskip("orbax.checkpoint")

    def measure_and_replace(kind, *args):
        measured = measure(kind, *args)
        assert len(measured) == 5 and min(measured) >= 0
        return SECONDS[kind.__name__]

    monkeypatch.setattr(checkpoint, "measure", measure_and_replace)
    checkpoint.benchmark(tmp_path, 4 * 10**6, 1)
    what, heads, *rows, orbax, ours, memory = capsys.readouterr().out.splitlines()
    assert re.match(r"3,694,564 bytes in 289 parts; ", what)
    assert [row[:20].strip() for row in rows] == list(checkpoint.TIMES)
    numbers = [[float(n) for n in re.findall(r"([\d.]+)%? \(", row)] for row in rows]
    assert numbers == [
        [1, 4, 2, 50, 200],
        [2, 4, 2.5, 80, 160],
        [3, 4, 6, 50, 67],
        [4, 4, 3, 133, 133],
    ]
    assert re.findall("plain|orbax|ours", heads) == ["plain", "orbax", "ours", "plain", "orbax"]
    assert "Orbax 0.500 " in orbax and "Ours 0.250 " in ours
    assert float(memory.split(": ")[1].split()[0]) > 0.5, "steps go on in memory of their own"
    assert not list(tmp_path.iterdir())


def test_what_is_restored_is_looked_at(tmp_path, monkeypatch):
    with jax.set_mesh(mesh(4, 2)):
        size = sizes(10**6)
        state = make_state(size)
        other = jax.tree.map(lambda x: -x, state)
        monkeypatch.setattr(Ours, "restore", lambda self: other)
        with pytest.raises(AssertionError, match="differs from the saved one"):
            measure(Ours, tmp_path / "x", state, size)
