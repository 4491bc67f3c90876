"""Tests of README.md and the pages of docs/: their commands, outputs, figures and examples."""

import contextlib
import functools
import io
import os
import re
import shlex
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import train
from runtime import chips
from runtime.checkpoint import Checkpoints
from runtime.devices import make_mesh
from shardlib.types import make_shapes
from tests import pages
from tests.helpers import ROOMS, ROOT, compose_config, edited, slow_but_for
from tests.processes import python
from tools.audit import __main__ as audit
from tools.audit import text as audit_text
from tools.audit.step import audit_step, probe

PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]


def source_of(program):
    """The file that `python -m` runs."""
    path = ROOT / program.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page):
    """A page has no line numbers, which each edit of the source changes."""
    text = (ROOT / page).read_text()
    for module, config in re.findall(r"python -m (\S+) --config-name=(\w+)", text):
        assert source_of(module).exists()
        folder = "configs/convert" if module.startswith("tools.huggingface_to") else "configs"
        assert (ROOT / folder / f"{config}.yaml").exists()
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([\w-]+)$", text, re.MULTILINE)) <= targets
    for link, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        path = (ROOT / page).parent.joinpath(link) if link else ROOT / page
        assert path.exists(), link
        assert not anchor or pages.section(path.read_text(), anchor)
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
        assert f"\ndef {name}(" in (ROOT / file).read_text(), f"{file}::{name}"
    assert not re.findall(r"\w+\.py:\d+", text)


PROGRAMS = sorted(p for folder in ("tools", "benchmarks") for p in (ROOT / folder).rglob("*.py"))
SHOWN = [*PAGES, *(str(p.relative_to(ROOT)) for p in PROGRAMS)]
HYDRAS = {"config-dir", "config-name", "multirun"}


@pytest.mark.parametrize("page", SHOWN)
def test_commands_have_the_options_that_are_shown(page):
    command = r"python -m ((?:train|(?:tools|benchmarks|tests)\.[a-z_]+)\b)([^`\n]*)"
    for module, arguments in re.findall(command, (ROOT / page).read_text()):
        source = source_of(module).read_text()
        if "cli_evaluate" in source:  # its options are lm-eval's
            continue
        known = set(re.findall(r'"--([\w-]+)"', source)) | HYDRAS
        assert set(re.findall(r" --([\w-]+)", arguments)) <= known, module


def test_the_sizes_in_the_readme():
    """Compares with `make size`, to 3%."""
    sizes = re.findall(r"^ *(\d+) ([\w.]+)$", python(".ci/size.py").stdout, re.MULTILINE)
    counts = {name: int(n) for n, name in sizes}
    text = " ".join((ROOT / "README.md").read_text().split())
    sentence = "train.py has # lines of code and shardlib/ #; .* it is #, and # more are tests"
    stated = re.search(sentence.replace("#", r"([\d,]+)"), text)
    product = ["train.py", *ROOMS, "benchmarks"]
    total = sum(counts[name] for name in product)
    exact = counts["train.py"], counts["shardlib"], total, counts["tests"]
    for number, count in zip(stated.groups(), exact, strict=True):
        assert pages.value(number) == pytest.approx(count, rel=0.03)


def without_numbers(text):
    """The set of lines of the text, with each number replaced."""
    return {re.sub(r"[\d.,:]+", "#", line).strip() for line in text.splitlines()}


STEPS = [pytest.param(10, marks=pytest.mark.slow), pytest.param(400, marks=pytest.mark.long)]


@pytest.mark.parametrize("steps", STEPS)
def test_the_first_hour(steps, tmp_path):
    """Runs the README's commands in a copy of the repository; some six minutes, or two with fewer
    steps. None prints a warning."""
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    text = (ROOT / "README.md").read_text().split("## The first hour\n")[1].split("\n## ")[0]
    text += (ROOT / "docs/runs.md").read_text().split("## Choosing a config\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    train_it = "python -m train --config-name=local_test_synthetic paths.model_name=synthetic\n"
    assert f"\t$(BIN)/{train_it}" in (ROOT / "Makefile").read_text()
    blocks[0] = train_it
    printed, shown = "", ""
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    for block in blocks:
        if not block.startswith("python -m "):
            # Without the text that the model generated, which ends where the evaluation begins.
            shown += block[max(block.find("stdlib.zarr/validation, "), 0) :]
            continue
        for line in block.splitlines():
            if "tools.compile" in line:  # make test-tpu runs it
                printed += TAKES_LONG[line]
                continue
            options = {"shell": True, "env": env, "capture_output": True, "text": True}
            command = line.replace("python", sys.executable, 1)
            if "-m train" in line and "training.steps" not in line:
                command += f" training.steps={min(steps, 50 if 'synthetic' in line else steps)}"
                command += " training.warmup_steps=1" * (steps < 50)
            done = subprocess.run(command, cwd=tmp_path, **options)
            assert not done.returncode, (line, done.stderr)
            printed += done.stdout
    lines = without_numbers(shown) - {"#"}
    assert len(lines) > 12
    missing = lines - without_numbers(printed)
    assert not missing
    assert not re.findall(r"^(?:note|warning): .*", printed, re.MULTILINE)
    loss = float(re.findall(r"validation loss ([\d.]+)", printed)[-1])
    assert loss < (1.4 if steps == 400 else 5)


def test_the_excerpt_in_the_readme_is_from_train():
    excerpt = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    source = [line.strip() for line in (ROOT / "train.py").read_text().splitlines()]
    assert all(line in [*source, "..."] for line in excerpt.splitlines())


def test_the_example_of_the_format_runs(here):
    page = (ROOT / "docs/flat_tokens.md").read_text()
    scope = {}
    exec(page.split("```python\n")[1].split("```")[0], scope)
    assert (scope["ids"].tolist(), scope["is_start"].tolist()) == ([3, 8, 1], [False, False, True])
    arrays = dict(re.findall(r"(encoded_tokens|seq_starts) +(\[.*\])", page))
    assert arrays == {name: str(scope["dataset"].group[name][:].tolist()) for name in arrays}


def test_the_example_of_a_checkpoint_runs(here, capsys):
    page = (ROOT / "docs/checkpoints.md").read_text()
    config = compose_config("local_test_synthetic", "paths.model_name=x")
    settings = train.state_type(config), train.dimensions(config), "", 4
    with jax.set_mesh(make_mesh(config.mesh.axes)):
        state = train.init_state(config)
        checkpoints = Checkpoints("checkpoints", *settings)
        checkpoints.save(50, state)
        checkpoints.close()  # which marks it
    capsys.readouterr()
    example = page.split("## With a zarr library\n")[1]
    scope, (code, printed) = {}, example.split("```")[1:4:2]
    code = code.removeprefix("python\n").replace("runs/synthetic/", "")
    exec(code.replace("data/synthetic", f"{ROOT}/data/synthetic"), scope)
    np.testing.assert_array_equal(scope["embed"], state.weights.embed)
    assert capsys.readouterr().out.split() == printed.split()


# --- Outputs --------------------------------------------------------------------------------------

Edits = tuple[tuple[str, str], ...]


@functools.cache
def audited(command: str, *more: str, edits: Edits = ()) -> str:
    """The output of `python -m tools.audit`, with more arguments and with edits of train.py."""
    files = "audit.html=", "audit.json="
    arguments = [word for word in shlex.split(command)[3:] if not word.startswith(files)]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr("sys.argv", ["audit", *arguments, *more])
        if edits:
            module = edited("train.py", *edits)
            patch.setattr("tools.audit.step.train", module)
        audit.main()
    return out.getvalue().replace("train_edited.py", "train.py")


def unsaved(excerpt: str) -> Edits:
    """Returns the edits that delete the lines of the excerpt from `swiglu`."""
    return tuple((f"{' ' * 4}{line}\n", "") for line in excerpt.splitlines())


def as_shown(program: str) -> dict[str, str]:
    """Outputs of a program that takes long, by command, as docs/audit.md shows them."""
    page = pages.outputs((ROOT / "docs/audit.md").read_text())
    every = {command: output.text for output in page for command in output.commands}
    return {command: text for command, text in every.items() if f"-m tools.{program}" in command}


TAKES_LONG = as_shown("compile") | as_shown("plan")


def printed_by(output: pages.Output, alone: bool = False) -> list[str]:
    """The lines that its commands print; with an edit, the lines without it come first, or, with
    `alone`, are left out."""
    lines: list[str] = []
    for edits in [(), unsaved(output.edit)] if output.edit else [()]:
        before = lines
        for command in output.commands:
            is_audit = "-m tools.audit" in command
            lines = lines + (audited(command, edits=edits).splitlines() if is_audit else [])
    return [line for line in lines if line not in before] if alone else lines


OTHERS = [page for page in PAGES if page != "docs/experiments.md"]


@pytest.mark.parametrize("page", slow_but_for(["README.md"], OTHERS))
def test_what_a_page_shows_is_what_audits_and_compiles_print(page):
    """UPDATE_GOLDEN=1 updates the page. tests/test_experiments.py has docs/experiments.md."""
    path, stale = ROOT / page, []
    text = path.read_text()
    for output in reversed(list(pages.outputs(text))):
        if not TAKES_LONG.keys().isdisjoint(output.commands):
            continue
        shown, printed = output.text, printed_by(output)
        *head, last = shown.splitlines(keepends=True)
        # What is shown below an edit ends with a line that is printed with the edit alone.
        alone = printed_by(output, alone=True)
        if printed and pages.UPDATE:
            head, last = [pages.updated("".join(head), printed)], pages.updated(last, alone)
            shown = "".join([*head, last])
            text = text[: output.start] + shown + text[output.start + len(output.text) :]
        stale += pages.missing(shown, printed) + pages.missing(last, alone) if printed else []
    if pages.UPDATE:
        path.write_text(text)
    assert not stale, "\n".join([f"no command prints these lines of {page}:", *stale])


@pytest.mark.tpu
@pytest.mark.parametrize("command", as_shown("compile"))
def test_the_compiler_says_what_the_page_shows(command):
    """Compares to 3%, since compiler versions differ. UPDATE_GOLDEN=1 updates the page instead."""
    shown, done = TAKES_LONG[command], python(*shlex.split(command)[1:])
    assert not done.returncode, done.stderr
    print(done.stdout)
    if pages.UPDATE:
        path = ROOT / "docs/audit.md"
        path.write_text(path.read_text().replace(shown, done.stdout))
        shown = done.stdout
    for line, now in zip(shown.splitlines(), done.stdout.splitlines(), strict=True):
        assert re.sub(r"[\d.+-]+", "#", pages.key(line)) == re.sub(r"[\d.+-]+", "#", pages.key(now))
        figures = zip(*(pages.FIGURE.findall(text) for text in (line, now)), strict=True)
        for (x, unit), (y, _) in figures if "compiled in" not in line else ():
            within = {"abs": 2} if unit == "%" else {"rel": 0.03}
            assert float(x) == pytest.approx(float(y), **within), (line, now)


@pytest.mark.slow
@pytest.mark.parametrize("command", as_shown("plan"))
def test_the_plan_is_the_one_that_the_page_shows(command):
    """UPDATE_GOLDEN=1 updates the page."""
    path, count = ROOT / "docs/audit.md", TAKES_LONG[command].count("\n") - 1  # and then "..."
    printed = python(*shlex.split(command)[1:]).stdout.splitlines()[:count]
    if pages.UPDATE:
        now = "\n".join([*printed, "...", ""])
        path.write_text(path.read_text().replace(TAKES_LONG[command], now))
    shown = as_shown("plan")[command].splitlines()
    assert [*map(pages.key, [*printed, "..."])] == [*map(pages.key, shown)]


# --- Figures --------------------------------------------------------------------------------------

PLACES = "performance", "audit", "gpus"
MEASURED = "\n".join((ROOT / f"docs/{page}.md").read_text() for page in PLACES)


def test_the_figures_of_the_readme_are_those_of_the_sections_that_it_links():
    rows = (ROOT / "README.md").read_text().split("\n## Figures\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.*) \|$", rows, re.MULTILINE)[2:]
    assert len(rows) == 5
    for row in rows:
        links = re.findall(r"\]\((docs/\w+\.md)#([\w-]+)\)", row)
        source = "".join(pages.section((ROOT / page).read_text(), at) for page, at in links)
        stated = re.sub(r"\]\([^)]*\)", "", row)
        assert links and not pages.unknown(stated, source, pages.BARE), row


@pytest.mark.parametrize("page", ["README.md", "docs/flat_tokens.md", "docs/checkpoints.md"])
def test_figures_with_units_are_recorded_where_they_were_measured(page):
    text = pages.prose((ROOT / page).read_text())
    assert not pages.unknown(text, MEASURED)
    assert not {words for words in pages.SPELLED.findall(text) if words not in MEASURED}


def test_the_figures_that_a_run_prints_in_the_readme_are_recorded():
    """Looks at numbers with a decimal point, which are times and losses."""
    for output in pages.outputs((ROOT / "README.md").read_text()):
        if not printed_by(output):
            numbers = " ".join(re.findall(r"(?<![\w./])\d+\.\d+(?![\w.]| epochs)", output.text))
            assert not pages.unknown(numbers, MEASURED, pages.BARE), output.commands


@pytest.mark.slow
def test_the_figures_in_the_page_of_the_audit_are_the_audits():
    """Looks at the question that the page answers. Its figures are printed by the page's command:
    without change, with the edits that the page describes, or with overrides in the paragraph."""
    text = (ROOT / "docs/audit.md").read_text().split("\n## Asking")[0]
    edits = next(unsaved(output.edit) for output in pages.outputs(text) if output.edit)
    command = next(output.commands[0] for output in pages.outputs(text))
    offloaded = tuple((old, f"{old[:-2]}, offload=True)\n") for old, _ in edits)
    printed = audited(command, edits=()) + audited(command, edits=edits)
    for variant in offloaded, *((edit,) for edit in edits):
        printed += audited(command, "audit.chip=", edits=variant)
    held = map(pages.value, re.findall(r"(?:weights|moments)  +([\d.]+) GB", printed)[:2])
    printed += f"{sum(held)} GB"
    paragraphs = re.split(r"\n\n|\n(?=- )", pages.prose(text))
    for paragraph in paragraphs:
        if not paragraph.startswith("#") and pages.unknown(paragraph, printed):
            overrides = re.findall(r"`((?:[a-z_.]+=\w+ ?)+)`", paragraph)
            more = [audited(command, "audit.chip=", *words.split()) for words in overrides]
            assert not pages.unknown(paragraph, "".join([printed, *more])), paragraph


RATE = 790e12  # FLOP/s of a large product on an H200, from docs/performance.md
H200_ROW = r"^\| (\w+) \| ([\d,]+) \| (\d) \| ([\d,]+) \| ([\d.]+) \| (\d+)% \| (\d+) \|"
H200_ROWS = re.findall(H200_ROW, (ROOT / "docs/performance.md").read_text(), re.MULTILINE)
assert H200_ROWS


@pytest.mark.parametrize("row", slow_but_for(H200_ROWS[:1], H200_ROWS))
def test_what_is_expected_of_an_h200_is_what_the_audit_says(row):
    model, length, microbatches, *stated = row  # TFLOP, seconds, MFU and GB
    length = int(pages.value(length))
    config = compose_config(
        *("pretrain", f"model={model}", "hardware=a100x1", "paths.model_name=x"),
        *("flat_tokens.filespec=x", f"training.microbatches={microbatches}"),
        f"training.tokens={{batch: {2**18 // length}, len: {length}}}",
    )
    chip = chips.CHIPS["h200"]
    result = audit_step(config, probe(config), chip)
    flops = audit_text.total_of(result["products"])
    seconds = flops / RATE
    mfu = 100 * result["model_flops"] / chip.flops / seconds
    exact = flops / 1e12, seconds, mfu, result["peak"] / 1e9
    assert all(map(pages.rounds_to, exact, stated)), exact


@pytest.mark.parametrize("page", PAGES)
def test_training_commands_ask_for_what_fits(page):
    """The overrides compose, and every dimension splits over the mesh. Nothing is trained."""
    text = (ROOT / page).read_text()
    for line in re.findall(r"^(?:XLA_FLAGS=\S+ )?python -m train (.*)$", text, re.MULTILINE):
        name, *overrides = shlex.split(line.removeprefix("--config-name="))
        if "--multirun" in overrides:
            continue
        config = compose_config(name, *overrides)
        with jax.set_mesh(make_mesh(config.mesh.axes)):
            make_shapes(train.step_arguments(config), train.dimensions(config))
