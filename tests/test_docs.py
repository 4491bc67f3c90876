"""What the README and the docs show is so."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys

import jax
import pytest

import train
from runtime.checkpoint import Checkpoints
from shardlib import devices
from shardlib.types import make_shapes
from tests.helpers import ROOT, compose_config, edited, mesh
from tools import audit

PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_commands_name_what_is_there(page):
    text = (ROOT / page).read_text()
    for module, config in re.findall(r"python -m (\S+) --config-name=(\w+)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists()
        folder = "configs/convert" if module.startswith("tools.huggingface_to") else "configs"
        assert (ROOT / folder / f"{config}.yaml").exists()
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([\w-]+)$", text, re.MULTILINE)) <= targets
    for link in re.findall(r"\]\((?!http)([^)]+)\)", text):
        assert (ROOT / page).parent.joinpath(link).exists(), link


PROGRAMS = sorted(p for folder in ("tools", "benchmarks") for p in (ROOT / folder).glob("*.py"))
SHOWN = [*PAGES, *(str(p.relative_to(ROOT)) for p in PROGRAMS)]
HYDRAS = {"config-name", "multirun"}


@pytest.mark.parametrize("page", SHOWN)
def test_commands_have_the_options_that_are_shown(page):
    command = r"python -m ((?:train|(?:tools|benchmarks|tests)\.[a-z_]+)\b)([^`\n]*)"
    for module, arguments in re.findall(command, (ROOT / page).read_text()):
        source = (ROOT / (module.replace(".", "/") + ".py")).read_text()
        known = set(re.findall(r'"--([\w-]+)"', source)) | HYDRAS
        assert set(re.findall(r" --([\w-]+)", arguments)) <= known, module


def test_the_sizes_in_the_readme():
    """As `make size` counts them, to three hundredths."""
    folders = ["shardlib", "data", "runtime", "tools", "benchmarks", "tests"]
    command = [sys.executable, ".ci/size.py", "train.py", *folders]
    printed = subprocess.check_output(command, cwd=ROOT, text=True)
    counts = {name: int(n) for n, name in re.findall(r"^ *(\d+) ([\w.]+)$", printed, re.M)}
    text = " ".join((ROOT / "README.md").read_text().split())
    says = re.search(
        r"train.py has ([\d,]+) lines of code and shardlib/ ([\d,]+); .* it is ([\d,]+), "
        r"and ([\d,]+) more are tests",
        text,
    )
    product = sum(counts.values()) - counts["tests"]
    found = counts["train.py"], counts["shardlib"], product, counts["tests"]
    for stated, count in zip(says.groups(), found, strict=True):
        assert int(stated.replace(",", "")) == pytest.approx(count, rel=0.03)


# First words of docstrings that read as the rest of a sentence.
MID_SENTENCE = re.compile(
    r"(after|against|all|along|also|alone|and|around|as|at|because|before|below|beside|between|both"
    r"|but|by|does|during|else|except|for|from|here|how|if|in|inside|into|its?|like|nor|not|of|on"
    r"|only|or|others?|our|so|some|than|that|their|them|these|they|this|those|to|until|what|whatever"
    r"|when|where|whether|which|while|who|whose|with|within|without)\b",
    re.IGNORECASE,
)


@pytest.mark.parametrize(
    "folder", [".", "shardlib", "data", "runtime", "tools", "benchmarks", "tests"]
)
def test_docstrings_begin_with_a_verb_or_a_noun(folder):
    files = ROOT.glob("*.py") if folder == "." else (ROOT / folder).rglob("*.py")
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    begun = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            text = isinstance(node, kinds) and ast.get_docstring(node)
            if text and MID_SENTENCE.match(text):
                line = node.body[0].lineno
                begun.append(f"{file.relative_to(ROOT)}:{line}: {text.splitlines()[0]}")
    assert not begun, "\n".join(begun)


def blank(text):
    """Without its numbers."""
    return {re.sub(r"[\d.,:]+", "#", line).strip() for line in text.splitlines()}


@pytest.mark.long
def test_the_first_hour(tmp_path):
    """As in the README, in a copy of what it is cloned from; some six minutes."""
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    text = (ROOT / "README.md").read_text().split("## The first hour\n")[1]
    text = text.split("**Metrics**")[0]
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    train_it = "python -m train --config-name=local_test_synthetic paths.model_name=synthetic\n"
    assert f"\t$(BIN)/{train_it}" in (ROOT / "Makefile").read_text()
    blocks[0] = train_it
    printed, shown = "", ""
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # the tests' own
    for block in blocks:
        if not block.startswith("python -m "):
            shown += block.split("self.\n")[-1]  # less the text that a model made
            continue
        for line in block.splitlines():
            if "tools.compile" not in line:  # make test-tpu has it
                command = [sys.executable, *shlex.split(line)[1:]]
                done = subprocess.run(
                    command, cwd=tmp_path, env=env, capture_output=True, text=True
                )
                assert not done.returncode, (line, done.stderr)
                printed += done.stdout
    lines = {line for line in blank(shown) if not re.match("# x TPU|It fits|A step sends|#$", line)}
    assert len(lines) > 15 and not lines - blank(printed)


def test_the_excerpt_in_the_readme_is_from_train():
    excerpt = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    source = [line.strip() for line in (ROOT / "train.py").read_text().splitlines()]
    assert all(line in source for line in excerpt.splitlines())


def test_the_example_of_the_format_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/flat_tokens.md").read_text()
    scope = {}
    exec(page.split("```python\n")[1].split("```")[0], scope)
    assert (scope["ids"].tolist(), scope["is_start"].tolist()) == ([3, 8, 1], [False, False, True])
    shown = re.findall(r"(encoded_tokens|seq_starts) +(\[.*\])", page)
    dataset = scope["dataset"]
    assert {name: str(dataset.group[name][:].tolist()) for name, _ in shown} == dict(shown)


def test_the_example_of_a_checkpoint_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/checkpoints.md").read_text()
    config = compose_config("local_test_synthetic", "paths.model_name=x")
    with jax.set_mesh(mesh(4, 2)):
        weights = train.init_state(config).weights
        checkpoints = Checkpoints("checkpoints", train.Weights, train.dimensions(config), "", 4)
        checkpoints.save(50, weights)
        checkpoints.wait()
    scope = {}
    example = page.split("```python\n")[1].split("```")[0]
    exec(example.replace("runs/synthetic/", "").replace("weights/", ""), scope)
    assert scope["embed"].shape == weights.embed.shape and scope["embed"].dtype == "float32"


def plain(text):
    """Without the columns' widths."""
    return [" ".join(line.replace("train_edited", "train").split()) for line in text.splitlines()]


def report(name, *overrides):
    config = compose_config(name, "paths.model_name=x", "flat_tokens.filespec=x", *overrides)
    chip = devices.CHIPS["a100_40gb"]
    return plain(audit.report(audit.audit_step(config, audit.probe(config), chip), chip))


def test_the_rows_of_the_audit_in_the_readme():
    shown = [
        line
        for line in (ROOT / "README.md").read_text().splitlines()
        if re.match(r" +(train\.py:|saved at|sent at)", line)
    ]
    there = report("c4_h100x8_1b", "mesh={d: 4, t: 2}")
    assert len(shown) == 4 and all(line in there for line in plain("\n".join(shown)))


def test_the_answers_of_the_audit_in_its_page(monkeypatch):
    """Before and after the edit that the page shows."""
    text = (ROOT / "docs/audit.md").read_text().split("## Asking")[0]
    example = text.split("```python\n")[1].split("```")[0]
    edits = []
    for line in example.splitlines():
        name, product = line.split(" = ")
        edits.append((f"{name} = save_for_backward({product})", line))
    found = report("c4_h100x8_2b")
    monkeypatch.setattr(audit, "train", edited("train.py", *edits))
    found += report("c4_h100x8_2b")
    lines = plain("\n".join(text.split("```")[1::2]))
    shown = [line for line in lines if re.match("8 dev|Mem|At its|made|saved|train|A dev", line)]
    assert len(shown) == 14 and not set(shown) - set(found)


@pytest.mark.parametrize("page", PAGES)
def test_training_commands_ask_for_what_fits(page):
    """Short of training: the overrides compose, and every dimension splits over the mesh."""
    for line in re.findall(
        r"^(?:XLA_FLAGS=\S+ )?python -m train (.*)$", (ROOT / page).read_text(), re.MULTILINE
    ):
        name, *overrides = line.removeprefix("--config-name=").split()
        if "--multirun" in overrides:
            continue
        config = compose_config(name, *overrides)
        with jax.set_mesh(mesh(config.mesh.d, config.mesh.t)):
            make_shapes(tuple[train.State, train.TokenBatch], train.dimensions(config))
