import json
import re

import pytest

from tests import golden
from tests.helpers import slow_but_for, train_here
from tools import audit, tables

CONFIG = ["--config-name=c4_h100x8_1b", "audit.chip=h100"]


def audited(capsys, monkeypatch, *options):
    return train_here(capsys, monkeypatch, *CONFIG, *options, program=audit.main)


@pytest.mark.slow
def test_the_changes_are_the_differences_of_two_audits(tmp_path, capsys, monkeypatch):
    files = [tmp_path / name for name in ("one.json", "two.json")]
    audited(capsys, monkeypatch, f"audit.json={files[0]}")
    second = [f"audit.against={files[0]}", f"audit.json={files[1]}", "mesh={d: 4, t: 2}"]
    out, message = audited(capsys, monkeypatch, *second)
    assert not message
    one, two = (json.loads(file.read_text()) for file in files)

    def received(result, axes):
        return sum(row["total"] for row in result["transfers"] if row["axes"] == axes)

    shown = {tuple(re.split("  +", line.strip())) for line in out.splitlines()}
    for axes in ["s"], ["t"]:
        before, after = (received(result, axes) for result in (one, two))
        sign = "+" if after > before else ""
        change = sign + tables.show(after - before)
        assert (axes[0], tables.show(before), tables.show(after), change) in shown
    for name in "gathered weights", "batch":
        before, after = (result["held"][name] for result in (one, two))
        sign = "+" if after > before else ""
        row = name, tables.show(before), tables.show(after), sign + tables.show(after - before)
        assert row in shown
    peaks = [result["peak"] for result in (one, two)]
    sign = "+" if peaks[1] > peaks[0] else ""
    change = sign + tables.show(peaks[1] - peaks[0])
    assert ("at the peak", *map(tables.show, peaks), change) in shown
    assert not any(line[0] in ("weights", "gradients") for line in shown), "both are split over all"
    out, _ = audited(capsys, monkeypatch, f"audit.against={files[0]}")
    assert re.fullmatch(r"MFU at most: (\d+%) before, \1 after, bound by compute\n", out)


@pytest.mark.slow
def test_a_clean_tree_does_not_differ_from_its_revision(capsys, monkeypatch):
    """The chip decides what runs a kernel, and how memory is tiled."""
    head = "audit.against=HEAD", "mesh={d: 2, c: 2, t: 2}"
    out, message = audited(capsys, monkeypatch, *head)
    assert not message and out.startswith("MFU at most")


@pytest.mark.parametrize(
    "against", slow_but_for(["text"], ["nowhere", "text", "list", "older", "another_chip"])
)
def test_what_cannot_be_compared(against, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("weights: 1")
    (tmp_path / "list").write_text("[1, 2]")
    (tmp_path / "older").write_text('{"mesh": {}, "held": {}}')
    if "chip" in against:
        audited(capsys, monkeypatch, "audit.chip=v5e", f"audit.json={against}")
    out, message = audited(capsys, monkeypatch, f'audit.against="{against}"')
    assert not out
    message = re.sub(r" \(.*\)$", " (...)", message)  # git's own words
    golden.check("wrong_inputs.txt", f"audit: against={against}", message)
