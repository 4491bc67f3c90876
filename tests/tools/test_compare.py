import functools
import json
import re
import subprocess

import pytest

from tests import golden
from tests.helpers import slow_but_for
from tools.audit import __main__ as audit
from tools.audit import compare

CONFIG = ["--config-name=c4_h100x8_1b", "audit.chip=h100"]


@pytest.fixture
def audited(train_here):
    return functools.partial(train_here, *CONFIG, program=audit.main)


@pytest.mark.slow
def test_a_clean_tree_does_not_differ_from_its_revision(audited):
    """The chip decides what runs a kernel, and how memory is tiled."""
    head = "audit.against=HEAD", "mesh={d: 2, c: 2, t: 2}"
    out, message = audited(*head)
    assert not message and out.startswith("MFU at most")


@pytest.mark.parametrize(
    "against", slow_but_for(["text"], ["nowhere", "text", "list", "older", "another_chip"])
)
def test_what_cannot_be_compared(against, tmp_path, audited, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("weights: 1")
    (tmp_path / "list").write_text("[1, 2]")
    if against in ("older", "another_chip"):
        audited("audit.chip=v5e", f"audit.json={against}")
    if against == "older":
        earlier = json.loads((tmp_path / against).read_text())
        del earlier["peak"], earlier["host"]
        (tmp_path / against).write_text(json.dumps(earlier))
    out, message = audited(f'audit.against="{against}"')
    assert not out
    message = re.sub(r" \(.*\)$", " (...)", message)  # git's own words
    golden.check("wrong_inputs.txt", f"audit: against={against}", message)


def test_a_revision_has_its_own_source_and_configs_and_todays_that_it_lacks(tmp_path, monkeypatch):
    source, out = tmp_path / "source", tmp_path / "out"
    monkeypatch.setattr(compare, "ROOT", source)
    (source / "configs/model").mkdir(parents=True)
    old, new = source / "configs/old.yaml", source / "configs/model/new.yaml"
    old.write_text("then")
    git = "git", "-C", source, "-c", "user.name=x", "-c", "user.email=x"
    for command in ["init", "-q"], ["add", "."], ["commit", "-qm", "x"]:
        subprocess.run([*git, *command], check=True)
    old.write_text("now")
    new.write_text("now")
    out.mkdir()
    compare._check_out("HEAD", str(out))
    read = [(out / file.relative_to(source)).read_text() for file in (old, new)]
    assert read == ["then", "now"]
