import functools
import html
import json
import math
import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest

import train
from runtime import chips
from tests import golden
from tests.helpers import ROOT, compose_config, slow_but_for
from tools import tables
from tools.audit import __main__ as audit
from tools.audit import compare, memory, roofline
from tools.audit import text as audit_text
from tools.audit.page import MOST, PHASES, page
from tools.audit.step import audit_step, merged, probe

CONFIG = ["--config-name=c4_h100x8_1b", "mesh={d: 4, t: 2}"]


@functools.cache
def audited(*options, chip=None):
    """The config with these options, and its audit."""
    names = "paths.model_name=x", "flat_tokens.filespec=x"
    config = compose_config("c4_h100x8_1b", *names, *options)
    return config, audit_step(config, probe(config), chip and chips.CHIPS[chip])


def test_the_sums_are_those_of_the_model():
    """Compares with formulas of the shapes alone."""
    config, result = audited(*CONFIG[1:])
    batch, length, m, heads, f, v, layers, d, t = 256, 1024, 2048, 16 * 128, 16384, 32768, 8, 4, 2

    # Attention's full matmuls, not their causal half; the backward pass recomputes the scores.
    tokens = batch * length
    attention = 4 * length * heads * tokens * layers
    projections = 2 * (4 * m * heads + 3 * m * f) * tokens * layers + 2 * m * v * tokens
    flops = {"forward": 0, "backward": 0, "recomputed": 0}
    for row in result["products"]:
        flops[row["phase"]] += row["times"] * row["flops"]
    forward = (projections + attention) // 8
    turns = 2 * 2 * 128 * heads * tokens * layers // 8  # RoPE's, of q and k
    assert flops == {
        "forward": forward + turns,
        "backward": 2 * forward + turns,
        "recomputed": attention // 16,
    }
    assert result["model_flops"] == 3 * (projections + attention // 2)
    assert result["model_flops"] == sum(train.step_flops(config))

    # Each weight is gathered over d forward, a layer's weights again backward; gradients are
    # reduce-scattered.
    received = {}
    for row in result["transfers"]:
        key = (*row["axes"], row["phase"])
        received[key] = received.get(key, 0) + row["times"] * row["bytes"]
    layer = layers * (4 * m * heads + 3 * m * f) // t * 2 * (d - 1) / d
    ends = 2 * v * m // t * 2 * (d - 1) / d
    loss = 2 * 4 * (d - 1) / d * 2  # two scalars
    assert received["s", "forward"] == pytest.approx(layer + ends + loss)
    assert received["s", "recomputed"] == layer
    assert received["s", "backward"] == layer + ends
    # Over t, the residual stream: two gathers and two scatters per layer, and one of each outside.
    stream = tokens // d * m * 2 * (t - 1) / t
    peaks = 3 * 2 * tokens // d * 4 * (t - 1) / t
    assert received["t", "forward"] == (4 * layers + 2) * stream + peaks
    assert received["t", "recomputed"] == 2 * layers * stream
    assert received["t", "backward"] == (4 * layers + 2) * stream


@pytest.mark.parametrize(
    "options",
    [
        ["mesh={d: 256, t: 1}"],  # a row on each device
        ["mesh={d: 1, t: 16}"],  # a head
        ["mesh={d: 1, t: 1}", "training.tokens.batch=1"],
        ["training.tokens.len=1", "training.loss_chunks=1", "mesh={d: 4, t: 2}"],
        ["model.layers=1", "training.microbatches=4"],
    ],
)
def test_types_where_lengths_are_one(options):
    """A type string gives the array's lengths, and few arrays have types that can't be told."""
    config, result = audited(*options)
    axes, sizes = config.mesh.axes | {"d": config.mesh.d}, train.dimensions(config)
    without_type = 0
    for row in result["saved"]:
        element, dims = re.fullmatch(r'(\w+)\["(.*)"\]', row["type"]).groups()
        length = int(re.sub(r"\D", "", element) or 8) // 8
        for dim in dims.replace("*", " ").split():
            name, *split = dim.split("/")
            size = int(name) if name.isdigit() else sizes[name]
            parts = (int(part) if part.isdigit() else axes[part] for part in split)
            length *= size // math.prod(parts)
        assert length == row["bytes"] // row["times"], row
        without_type += row["bytes"] * (dims != "" and dims[0].isdigit())
    assert without_type < 0.05 * result["held"][memory.SAVED]


# The lengths of the config above on a device.
TOKENS, M, HEADS, F, V, LAYERS = 256 * 1024 // 4, 2048, 16 * 128 // 2, 16384 // 2, 32768 // 2, 8


def memory_traffic(attention):
    """The bytes that matmuls and the optimizer read and write, given attention's in a layer. The
    gradients of a matmul have the same three arrays as the matmul."""

    def product(a, b, c, times=1, result_bytes=2):
        return 2 * (a * b + times * b * c) + result_bytes * a * c

    projections = 3 * (4 * product(TOKENS, M, HEADS) + 3 * product(TOKENS, M, F))
    turns = 4 * product(TOKENS * HEADS // 128, 128, 128)  # RoPE's of q and k, and their gradients
    chunks = 4  # of the loss, each of which reads the unembedding or writes its gradient
    logits = product(TOKENS, M, V, chunks, 4) + 2 * product(TOKENS, M, V, chunks)
    weights = (2 * V * M + LAYERS * (4 * M * HEADS + 3 * M * F)) // 4 + (2 * LAYERS + 1) * M // 8
    return LAYERS * (projections + turns + attention) + logits + 7 * 4 * weights


# The kernel reads q, k, v and writes their mix; backward it reads that mix's gradient too, and
# writes three.
ATTENTION = 11 * TOKENS * HEADS * 2


@pytest.mark.parametrize("chip", ["h100", "v5p"])
@pytest.mark.parametrize("size, fits", [(64, True), (136, False)])
def test_a_kernel_runs_where_rows_are_split_if_its_heads_fit(chip, size, fits):
    _, result = audited("mesh={d: 4, t: 1, c: 2}", f"model.d_head={size}", chip=chip)
    attention = [row for row in result["products"] if row["op"].startswith("attention")]
    assert attention and all(row["in_kernel"] == fits for row in attention)
    assert (result["kernel_bytes"] > 0) == fits


def test_the_page_shows_each_file_that_the_step_calls(tmp_path, train_here):
    file = tmp_path / "audit.html"
    model = "model.experts={count: 4, per_token: 2, d_ff: 64}", "training.optimizer=muon"
    options = "--config-name=local_test_synthetic", *model, f"audit.html={file}"
    train_here(*options, program=audit.main)
    page = file.read_text()
    files = {name.partition(":")[0] for name in rows_of(page)}
    assert files == {"train.py", "experts.py", "dropless.py", "muon.py"}
    assert "variants/muon.py" in page


def test_the_page_and_the_text_say_which_counts_are_bounds(here, train_here):
    file = here / "audit.html"
    options = [*CONFIG, "training.microbatches=2", "audit.json=x", f"audit.html={file}"]
    out, _ = train_here(*options, program=audit.main)
    rows = json.loads(pathlib.Path("x").read_text())["transfers"]
    marked = [row for row in rows if row["bound"]]
    assert [(r["bound"], r["times"], r["at_least"]) for r in marked] == [("at most", 2, 1)] * 3
    assert "A device receives at most 1" in out and "A device computes 2" in out
    gather = 'embed = ops.all_gather("V/t M/c/s -> V/t M", weights.embed)'
    cells = {row[1].strip(): row[2:] for row in rows_of(file.read_text()).values()}
    assert cells[gather][1:4] == ["at most 101 MB", "", "101 MB"]


def test_rows_in_a_while_loop_count_once_and_say_so():
    rows = [
        {"kind": "all-gather", "times": times, "at_least": at_least, "bytes": 10}
        for times, at_least in [(math.inf, 3), (2, 2), (math.inf, 0)]
    ]
    (row,) = merged(rows, "bytes")
    assert (row["times"], row["bound"], row["total"]) == (5, "at least", 50)
    assert audit_text.show_total([row], "B") == "at least 50 B"
    once = merged([rows[2] | {"times": 1}], "bytes")
    assert audit_text.show_total([row, *once], "B") == "about 60 B"
    assert merged(rows[2:], "bytes")[0]["times"] == 1
    text = audit_text.Table({"collective": "kind"}).text([row])
    assert text.splitlines()[1] == "all-gather  10 B  at least 5   50 B"


@pytest.mark.slow
def test_the_roofline_divides_the_ledger_by_the_chips_rates(train_here):
    chip = ["audit.chip=a100", "audit.links={s: ib}", "audit.rates.ib=12.5e9"]
    out, message = train_here(*CONFIG, *chip, program=audit.main)
    assert not message
    rows = [line.split("  ") for line in out[out.index("\nmesh") :].splitlines()[2:-2]]
    rows = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert [row[:2] for row in rows] == [[f"d={2**i}, t=2", "s ib, t nvlink"] for i in range(2, 9)]
    # The amounts of the test above: 206.2 TFLOP, of which 7.7 are attention's, 2.316 GB over d,
    # 11.28 GB over t.
    memory = tables.show(memory_traffic(ATTENTION) / 2.039e12, "s")
    assert rows[0][3:] == [tables.show((206.1585e12 - 7.7e12 / 2) / 312e12, "s"), memory,
                           "37.6 ms", "185 ms", "compute", "99%"]  # fmt: skip
    assert out.endswith('B=256 does not split evenly over d=512, as u32["B/d L/c"] needs; B is '
                        "training.tokens.batch.\n")  # fmt: skip
    assert rows[-1][-2:] == ["ib", "4%"], "the batch stays the same, so each device gets less"


@pytest.mark.parametrize(
    "chip, c, window", [("v5p", 1, 1024), ("v5p", 2, 100), ("h100", 1, 1024), ("h100", 2, 1024)]
)
def test_the_bound_has_the_scores_that_a_kernel_computes_at_least(chip, c, window):
    """Pallas's kernel leaves out what no query sees; cuDNN's computes all of a split row."""
    causal = (chip, c) != ("h100", 2)
    options = f"mesh={{d: 4, t: 1, c: {c}}}", f"model.sliding_window={window}"
    _, result = audited(*options, chip=chip)
    query, key = np.indices((1024, 1024))
    seen = np.where(causal, (key <= query) & (key > query - window), True).mean()
    scores = LAYERS * 2 * 256 * 1024**2 * 16 * 128 / (4 * c)  # FLOPs of each of seven matmuls
    everything = sum(row["times"] * row["flops"] for row in result["products"])
    least = roofline.bound(result, chips.CHIPS[chip]).seconds["compute"] * chips.CHIPS[chip].flops
    assert everything - least == pytest.approx(7 * scores * (1 - seen), rel=2e-3, abs=1)


@pytest.mark.parametrize("chip, even, padded", [("v5p", 0.5, 0), ("h100", 1, 1)])
def test_the_bound_has_the_choices_that_experts_compute_at_least(chip, even, padded):
    """TPUs' kernel computes a device's own choices, here half of them; the loop on GPUs is long
    enough for all, and for a block of each of the device's 8 experts that isn't full."""
    experts = "model.experts={count: 16, per_token: 4, d_ff: 512}"
    _, result = audited(CONFIG[1], experts, chip=chip)
    choices = 4 * 256 * 1024 / 4
    rows = [row for row in result["products"] if row["op"].startswith("experts(")]
    spent = roofline.seconds({"products": rows}, chips.CHIPS[chip], result["mesh"])
    least = (even * choices + padded * 8 * 512) * 11 * 2 * 2048 * 512 * LAYERS
    assert spent["compute"] * chips.CHIPS[chip].flops == pytest.approx(least)
    weights = 8 * 2048 * 512 * 2 * 11 * LAYERS
    assert spent["memory"] * chips.CHIPS[chip].bandwidth >= weights


@pytest.mark.parametrize("mesh, rings", [("{d: 8, t: 1}", 3), ("{d: 4, t: 2}", 1)])
def test_over_all_chips_of_a_torus_several_rings_run_at_once(mesh, rings):
    _, result = audited(f"mesh={mesh}", chip="v5p")
    of_one = roofline.bound(result, chips.CHIPS["v5p"]._replace(rings=1)).seconds["ici"]
    least = roofline.bound(result, chips.CHIPS["v5p"]).seconds["ici"]
    assert least == pytest.approx(of_one / rings, rel=1e-3)  # some scalars go over all


MISTAKES = "links={t: ici}", "rates={ib: 0}", "links.s=ib", "rates.ib=1e9", "json=no/such/folder"


@pytest.mark.parametrize("option", MISTAKES)
def test_a_chip_or_link_that_is_not_in_the_table(option, train_here):
    chip = ["audit.chip=a100"] if "{" in option else []
    _, message = train_here(*CONFIG, *chip, f"audit.{option}", program=audit.main)
    golden.check("wrong_inputs.txt", f"audit: audit.{option}", message)


def rows_of(page):
    """The cells of each row of the source, by its id."""
    rows = re.findall(r'<tr id="([\w.:]+)".*?>(.*?)</tr>', page, re.DOTALL)
    return {name: [text_of(cell) for cell in re.split("<td.*?>", row)[1:]] for name, row in rows}


def text_of(cell):
    return html.unescape(re.sub("<.*?>", "", cell))


def test_the_tables_and_the_page(tmp_path, train_here):
    file, data = tmp_path / "audit.html", tmp_path / "audit.json"
    files = f"audit.html={file}", f"audit.json={data}"
    out, message = train_here(*CONFIG, *files, program=audit.main)
    assert not message
    golden.check("audit.txt", "1b on 4 x 2 devices", out)
    assert audit_text.report(json.loads(data.read_text())) + "\n" == out
    page = file.read_text()
    rows = rows_of(page)
    assert not re.search(r"<(script|link|img)\b|<[^>]* src=", page), "the page needs no network"
    source = (ROOT / "train.py").read_text().splitlines()
    assert [row[:2] for row in rows.values()] == [[str(i), x] for i, x in enumerate(source, 1)]
    result = json.loads(data.read_text())
    amounts = {row[1].strip(): row[2:] for row in rows.values()}
    gather = 'w_up = ops.all_gather("M/c/s F/t -> M F/t", w.w_up)'
    assert amounts[gather] == ["", "201 MB", "201 MB", "201 MB", "", "", ""]
    product = 'up = ops.einsum_unreduced("B/d L/c M, M F/t -> B/d L/c F/t", h, w_up)'
    assert amounts[product] == ["", "", "", "", "17.6 TFLOP", "", "35.2 TFLOP"]
    folded = rows_of("".join(re.findall("<tbody class=folded>.*?</tbody>", page, re.DOTALL)))
    assert {f"train.py:{i}" for i in range(1, 1 + source.index("class Weights:"))} <= {*folded}
    assert not any("".join(row[2:]) for row in folded.values()), "no amount is folded away"
    assert f"At its peak a step holds {tables.show(result['peak'])}." in out
    assert result["peak"] == sum(result["held"].values())
    assert f"<pre>{html.escape(out.rstrip())}</pre>" in page
    for name, size in result["held"].items():
        assert re.search(f"^{name} +{tables.show(size)}$", out, re.MULTILINE)
    listed = sum(row["total"] for row in result["saved"] if row["memory"] == "device")
    assert listed == result["held"][memory.SAVED]


def figures_of(page):
    """The first screen's cells, by the label of their row."""
    figures = page.partition("<table class=source")[0]
    rows = re.findall(r"<tr[^>]*><th>(.*?)</th>(.*?)</tr>", figures)
    return {text_of(name): [text_of(x) for x in re.split("<td.*?>", row)[1:]] for name, row in rows}


def test_the_figures_of_the_page_are_those_of_the_text():
    _, result = audited(*CONFIG[1:], chip="h100")
    chip = chips.CHIPS["h100"]._replace(chosen={"s": "ib"})
    shown = figures_of(page(result, chip, ""))
    text, terms = audit_text.report(result, chip), audit_text.terms_table(result)
    held = dict(re.findall(r"^(\w[\w ]*?) {2,}([\d.]+ \w?B)$", terms, re.MULTILINE))
    assert held.keys() == result["held"].keys()
    received = re.search("receives (.*?) a step in .*?: (.*?); (.*).", text).groups()
    computed = re.search("computes (.*?) a step: (.*).", text).groups()
    over = dict(re.findall(r"(over [\w,]+) ([\d.]+ \w+)", received[1]))
    least = roofline.bound(result, chip)
    times = "compute", "memory bandwidth", "nvlink, over t", "ib, over s"
    one = held | dict(zip(times, least.cells()[1:], strict=False))
    assert {name: [amount] for name, amount in one.items()}.items() <= shown.items()
    on_page = {k: cells[-1] for k, cells in shown.items() if k.startswith("over")}
    assert {k.replace(",", ", "): x for k, x in over.items()} == on_page
    for name, total, by_phase in ("received", *received[::2]), ("computed", *computed):
        cells = dict(zip([*PHASES, ""], shown[name], strict=True))
        phases = dict(x.split(" ", 1) for x in by_phase.split(", "))
        assert {k: x for k, x in cells.items() if x[0] != "0"} == phases | {"": total}
    top = [name for name in shown if name.startswith("train.py:")]
    assert len(top) == MOST and shown[top[0]][-2:] == ["compute", "53.4 ms"]


# Which texts of the figures are in view: both ends of each line, with nothing above them.
IN_VIEW = """<script>
const texts = {true: [], false: []}, range = document.createRange()
const all = document.createTreeWalker(document.querySelector(".figures"), NodeFilter.SHOW_TEXT)
for (let node; node = all.nextNode();) {
  if (!node.data.trim()) continue
  range.selectNodeContents(node)
  const seen = [...range.getClientRects()].every(line => [line.left + 1, line.right - 1].every(x =>
    node.parentElement.contains(document.elementFromPoint(x, (line.top + line.bottom) / 2))))
  texts[seen].push(node.data.trim())
}
const sideways = document.documentElement.scrollWidth > innerWidth
document.body.innerHTML = ""
document.body.dataset.found = JSON.stringify([innerWidth, innerHeight, sideways, texts])
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
@pytest.mark.parametrize(
    "options",
    [
        ["audit.chip=h100"],
        ["audit.chip=v5e", "model.d_ff=65536"],  # it doesn't fit
        ["audit.chip=h100", "audit.against=before.json"],
        ["mesh={d: 4, t: 2, r: 2, c: 2}", "model.experts={count: 8, per_token: 2, d_ff: 512}"],
    ],
)
def test_the_figures_fit_on_the_first_screen(options, here, train_here):
    run = functools.partial(train_here, program=audit.main)
    if "audit.against=before.json" in options:
        run(CONFIG[0], "audit.json=before.json", options[0], "training.microbatches=2")
    out, message = run(*CONFIG, *options, "audit.html=page.html", "audit.json=audit.json")
    assert out and not message
    page, browser = pathlib.Path("page.html"), pathlib.Path("browser")
    page.write_text(page.read_text() + IN_VIEW)
    flags = "headless no-sandbox disable-gpu disable-background-networking window-size=1280,900"
    command = ["chromium", *(f"--{flag}" for flag in flags.split()), f"--user-data-dir={browser}"]
    command += ["--dump-dom", page.resolve().as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    found = json.loads(html.unescape(re.search('data-found="(.*?)"', dom).group(1)))
    width, height, sideways, texts = found
    assert width == 1280 and height <= 900 and not sideways and not texts["false"]
    result = json.loads(pathlib.Path("audit.json").read_text())
    shown = "\n".join(texts["true"])
    for text in (*result["held"], tables.show(result["peak"]), "over t", "train.py:"):
        assert text in shown
    assert ("MFU at most" in shown) == ("audit.chip" in options[0])


def test_flops_of_the_model_that_the_step_does_not_compute_are_said():
    """This happens after an edit that leaves out a matmul."""
    _, result = audited(*CONFIG[1:])
    assert "The model needs" in audit_text.report(result)
    text = audit_text.report(result | {"model_flops": 2 * result["model_flops"]})
    assert "\nstep_flops in configs/sizes.py says 402 TFLOP, which is more" in text


def test_the_text_can_list_every_collective():
    _, result = audited(*CONFIG[1:])
    moving = [row for row in result["transfers"] if row["total"]]
    text = audit_text.report(result, least=0)
    listed = text.partition("sent at")[2].partition("\n\n")[0]
    assert len(listed.splitlines()) == 1 + len(moving)
    assert "smaller" in audit_text.report(result) and "smaller" not in text


# --- Comparison -----------------------------------------------------------------------------------


@pytest.fixture
def compared(train_here):
    return functools.partial(train_here, CONFIG[0], "audit.chip=h100", program=audit.main)


@pytest.mark.slow
def test_a_clean_tree_does_not_differ_from_its_revision(compared):
    """The chip decides what runs a kernel, and how memory is tiled."""
    head = "audit.against=HEAD", "mesh={d: 2, c: 2, t: 2}"
    out, message = compared(*head)
    assert (out, message) == ("no difference\n", "")


@pytest.mark.parametrize(
    "against", slow_but_for(["text"], ["nowhere", "text", "list", "older", "another_chip"])
)
def test_what_cannot_be_compared(against, here, compared):
    (here / "text").write_text("weights: 1")
    (here / "list").write_text("[1, 2]")
    if against in ("older", "another_chip"):
        compared("audit.chip=v5e", f"audit.json={against}")
    if against == "older":
        earlier = json.loads((here / against).read_text())
        del earlier["peak"], earlier["host"]
        (here / against).write_text(json.dumps(earlier))
    out, message = compared(f'audit.against="{against}"')
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
