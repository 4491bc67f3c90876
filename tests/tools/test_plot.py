import json
import pathlib
import re

import numpy as np
import pandas
import pytest
from matplotlib.figure import Figure

from tests import files
from tools import plot

CONFIG = """
training: {{tokens: {{batch: 4, len: 8}}, learning_rate: {rate}}}
paths: {{model_name: {name}}}
mesh: {{d: 8, t: 1}}
"""


def make_run(folder, name, rate, losses, **more):
    (folder / name).mkdir()
    (folder / name / "config.yaml").write_text(CONFIG.format(rate=rate, name=name))
    with (folder / name / "metrics.jsonl").open("w") as metrics:
        for step, loss in enumerate(losses):
            others = {key: values[step] for key, values in more.items() if step in values}
            row = {"step": step, "loss": loss, "tokens_per_second": 64.0} | others
            print(json.dumps(row), file=metrics)
    return folder / name


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """A function that runs the program, and returns the panels of its picture, curves.svg."""
    figures, save = [], Figure.savefig

    def save_and_keep(figure, *args, **kwargs):
        figures.append(figure)
        save(figure, *args, **kwargs)

    def draw(*arguments, output="curves.svg"):
        arguments = map(str, [*arguments, "--output", tmp_path / output])
        monkeypatch.setattr("sys.argv", ["plot", *arguments])
        plot.main()
        return figures.pop().axes

    monkeypatch.setattr(Figure, "savefig", save_and_keep)
    return draw


def lines_of(panel):
    """The x and the y of each line; those of the losses come in pairs, each step's and averages."""
    return [tuple(x.tolist() for x in line.get_data()) for line in panel.get_lines()]


def table_in(tmp_path):
    return (tmp_path / "curves.svg").read_text().replace("\N{NO-BREAK SPACE}", " ")


def test_the_picture_of_two_runs(tmp_path, drawn, capsys):
    one = make_run(tmp_path, "one", 0.1, [4.0, 3.0, 2.0], validation_loss={1: 3.5, 2: 2.5})
    two = make_run(tmp_path, "two", 0.2, [4.0, None, 1.0, 0.5])
    panels = drawn(one, two, "--smoothing", 0)
    assert capsys.readouterr() == (f"drew {tmp_path}/curves.svg\n", "")
    titles = ["loss by tokens", "loss by time", "validation loss", "throughput"]
    assert [panel.get_title() for panel in panels] == titles
    labels = [panel.get_xlabel() for panel in panels[:2]]
    assert labels == ["tokens", "seconds of training steps"]
    by_tokens, by_time, validation, speed = map(lines_of, panels)
    assert by_tokens[1] == ([32, 64, 96], [4, 3, 2])
    np.testing.assert_array_equal(by_tokens[3][1], [4, np.nan, 1, 0.5])
    assert by_time[3][0] == pytest.approx([0.5, 1, 1.5, 2])
    assert [x for x, _ in validation] == [[64, 96]]
    assert [y for _, y in speed] == [[64] * 3, [64] * 4]
    assert re.findall("monospace.*>(.*)</text>", table_in(tmp_path)) == [
        "                           one     two",
        "loss                    2.0000  0.5000",
        "validation_loss         2.5000       -",
        "training.learning_rate     0.1     0.2",
    ]
    drawn(one, make_run(tmp_path, "diverged", 0.3, [4.0, 3.0, None]), "--smoothing", 0)
    assert re.search("loss +2.0000 +nan<", table_in(tmp_path)), "not the last finite one"


def test_each_validation_set_has_its_line(tmp_path, drawn):
    """Both sets of a run have its color, and each a style, which the panel's legend explains."""
    sets = {"validation_loss/wiki": {0: 3.0, 1: 2.0}, "validation_loss/code": {1: 1.5}}
    one = make_run(tmp_path, "one", 0.1, [4.0, 3.0], **sets)
    two = make_run(tmp_path, "two", 0.2, [4.0, 2.0], validation_loss={1: 2.5})
    panel = drawn(one, two)[2]
    assert lines_of(panel)[:3] == [([32, 64], [3, 2]), ([64], [1.5]), ([64], [2.5])]
    a, b, c, *_ = panel.get_lines()
    assert a.get_color() == b.get_color() != c.get_color()
    assert len({line.get_linestyle() for line in (a, b, c)}) == 3
    names = [text.get_text() for text in panel.get_legend().get_texts()]
    assert names == ["wiki", "code", "without a name"]
    for row in "validation_loss/wiki +2.0000 +-", "validation_loss/code +1.5000 +-":
        assert re.search(row, table_in(tmp_path))


def name_tokenizer(run, section, text):
    with (run / "config.yaml").open("a") as config:
        config.write(f"{section}:\n  {text}\n")


def test_validation_is_in_bits_per_byte_if_tokenizers_differ(tmp_path, drawn):
    """Compares in bits only if all runs know their bytes as well."""
    bits, runs = {"validation_bits_per_byte": {1: 0.9}}, []
    for name, known in ("a", bits), ("b", bits), ("c", {}):
        runs.append(make_run(tmp_path, name, 0.1, [4.0, 3.0], validation_loss={1: 3.5}, **known))
        name_tokenizer(runs[-1], "hf_dataset", f"tokenizer: {name}")
    labels = [drawn(*chosen)[2].get_ylabel() for chosen in (runs[:2], runs[:1], runs)]
    others = "nats per token", "nats per token; the tokenizers differ"
    assert labels == ["bits per byte", *others]


def test_tokens_count_by_the_batch_of_their_start(tmp_path, drawn):
    """The run began as a clone at step 0, went on at step 2 with half the batch, then at step 1."""
    run = make_run(tmp_path, "run", 0.1, [4.0, 3.0, 2.0, 1.0])
    with (run / "starts.jsonl").open("w") as starts:
        for step, batch in (0, 8), (2, 2), (1, 4):
            config = f"training: {{tokens: {{batch: {batch}, len: 8}}}}"
            print(json.dumps({"first_step": step, "config": config}), file=starts)
    by_tokens, by_time, *_ = map(lines_of, drawn(run))
    assert by_tokens[1][0] == [64, 96, 128, 160]
    assert by_time[1][0] == pytest.approx([1, 1.5, 2, 2.5])


def test_a_start_before_a_clone_that_left_no_metrics_does_not_count(tmp_path, drawn, capsys):
    """It was another attempt, killed before its first checkpoint, with other batches."""
    run = make_run(tmp_path, "run", 0.1, [4.0, 3.0, 2.0, 1.0])
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(rows[2:]))
    with (run / "starts.jsonl").open("w") as starts:
        for step, batch in (0, 256), (2, 4), (3, 2):
            config = f"training: {{tokens: {{batch: {batch}, len: 8}}}}"
            print(json.dumps({"first_step": step, "config": config}), file=starts)
    assert lines_of(drawn(run)[0])[1][0] == [96, 112]
    assert "counts the tokens before step 2 in batches of its own size" in capsys.readouterr().err


def test_a_setting_that_changed_at_a_resume_is_shown_with_all_its_values(tmp_path, drawn):
    """No step of the start with 0.5 is left, and the last start has taken none yet."""
    resumed, other = (make_run(tmp_path, name, 0.3, [4.0, 3.0]) for name in ("resumed", "other"))
    starts = [
        {"first_step": step, "config": CONFIG.format(rate=rate, name="resumed")}
        for step, rate in [(0, 0.1), (1, 0.5), (1, 0.2), (2, 0.3)]
    ]
    (resumed / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    drawn(resumed, other)
    rates = re.findall("(?:resumed|other) .*  (0.*)</text>", table_in(tmp_path))
    assert [*map(str.strip, rates)] == ["0.1, then 0.2", "0.3"]


def test_each_of_many_runs_can_be_seen(tmp_path, drawn):
    runs = [make_run(tmp_path, f"run{i}", i, [1.0]) for i in range(60)]
    panel, *_ = drawn(*runs)
    lines = panel.get_lines()[1::2]
    assert lines[0].get_marker() == "." and len({line.get_color() for line in lines}) == 60
    # Ten names of 5 letters stand in a line of the legend; the table has 60 lines, and a head.
    assert panel.figure.get_figheight() == 8.5 + 6 / 5 + 60 / 8


def test_png_and_the_smoothing_that_is_stated(tmp_path, drawn):
    panels = drawn(make_run(tmp_path, "one", 0.1, [1.0] * 300), output="curves.png")
    average = ", averaged over 3 steps"
    titles = [f"{x}{average}" for x in ("loss by tokens", "loss by time", "throughput")]
    assert [panel.get_title() for panel in panels] == titles, "no validation losses, no panel"
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


NO_MATTER = ["paths.model_name", "mesh.t", "checkpoints.keep_last", "hlo_svg", "profile"]
NO_MATTER += ["hang_timeout_seconds", "training.loss_chunks", "training.validation_interval"]


@pytest.mark.parametrize(
    "both, setting, shown",
    [
        ({"training.optimizer": "adamw"}, "training.muon_momentum", False),
        ({"training.optimizer": "muon"}, "training.muon_momentum", True),
        ({"training.schedule": "cosine"}, "training.cooldown_steps", False),
        ({"training.schedule": "wsd"}, "training.cooldown_steps", True),
        ({"training.schedule": "constant"}, "training.steps_for_lr", False),
        ({"training.schedule": "constant"}, "training.cosine_learning_rate_final_fraction", False),
        ({"training.schedule": "linear"}, "training.cosine_learning_rate_final_fraction", True),
        ({"model.experts": None}, "training.routing.z_cost", False),
        ({"model.experts.count": 8}, "training.routing.z_cost", True),
        ({"paths.clone_from": ""}, "paths.clone_weights_only", False),
        ({}, "paths.clone_from", True),
        ({}, "training.learning_rate", True),
        ({}, "training.optimizer", True),
        *(({}, setting, False) for setting in NO_MATTER),
    ],
)
def test_the_table_has_what_affects_learning_and_is_used(both, setting, shown):
    table = plot.differences(["a", "b"], [both | {setting: 1}, both | {setting: 2}])
    assert table.to_dict("list") == ({setting: ["1", "2"]} if shown else {})


def test_a_section_that_a_run_lacks():
    configs = {"model.experts": None}, {"model.experts.count": 8}
    table = plot.differences(["dense", "experts"], configs)
    assert table.to_dict("list") == {"model.experts.count": ["-", "8"]}


def test_a_value_that_follows_another_is_not_repeated():
    """One that is equal by chance, as the seed's, is."""
    configs = [
        {"training.steps": steps, "training.steps_for_lr": steps, "training.warmup_steps": warmup,
         "training.seed": steps}
        for steps, warmup in [(100, 10), (200, 10), (200, 20)]
    ]  # fmt: skip
    table = plot.differences(["a", "b", "c"], configs)
    assert {*table} == {"training.steps", "training.warmup_steps", "training.seed"}


def test_any_name_is_in_the_legend(tmp_path, drawn):
    """Matplotlib leaves out labels that begin with `_`, and reads two $ as mathematics."""
    panel, *_ = drawn(*(make_run(tmp_path, name, 0.1, [4.0, 3.0]) for name in ("_a", "b$_$")))
    (legend,) = panel.figure.legends
    assert [text.get_text().strip() for text in legend.get_texts()] == ["_a", "b$_$"]


DIFFER = ["bytes_utf8", "gpt2"], ["llama", "gpt2"]
UNITS = [(["bytes_utf8"] * 2, "nats per byte"), (["gpt2", "gpt2"], "nats per token")]
UNITS += [(tokenizers, "nats per token; the tokenizers differ") for tokenizers in DIFFER]
UNITS += [(["gpt2", None], "nats per token; the tokenizers may differ")]


@pytest.mark.parametrize("tokenizers, unit", UNITS)
def test_losses_of_different_tokenizers(tokenizers, unit, tmp_path, drawn):
    """The first run has a dataset; the second one streams, or its dataset is gone."""
    first, second = runs = [make_run(tmp_path, name, 0.1, [4.0, 3.0]) for name in "ab"]
    files.name_tokenizer(tmp_path / "data.zarr", tokenizers[0])
    name_tokenizer(first, "flat_tokens", f"filespec: {tmp_path}/data.zarr")
    if tokenizers[1]:
        name_tokenizer(second, "hf_dataset", f"tokenizer: {tokenizers[1]}")
    assert drawn(*runs)[0].get_ylabel() == unit


def test_logarithmic_axes_begin_at_a_tenth_of_the_shortest_run(tmp_path, drawn):
    long, short = make_run(tmp_path, "a", 1, [4.0] * 90), make_run(tmp_path, "b", 2, [3.0] * 60)
    by_tokens, by_time, _ = map(lines_of, drawn(long, short, "--log"))
    assert [min(x) for x, _ in by_tokens] == [32 * 6] * 4
    assert [max(x) for x, _ in by_time] == pytest.approx([45, 45, 30, 30])


def test_runs_of_the_same_name_are_told_apart(tmp_path, drawn):
    for parent in "xy":
        (tmp_path / parent).mkdir()
    runs = [make_run(tmp_path / parent, "run", 1, [4.0]) for parent in "xy"]
    assert [line.get_label() for line in drawn(*runs)[0].get_lines()[1::2]] == [*map(str, runs)]


def test_smoothing_is_a_mean_of_falling_weights():
    values = np.random.default_rng(0).normal(size=50)
    values[[0, 20, 21]] = np.nan
    averages = plot.smooth(pandas.Series(values), 5)
    wanted = np.full(50, np.nan)
    for i in np.flatnonzero(np.isfinite(values)):
        weights = np.exp(-(i - np.arange(i + 1)) / 5) * np.isfinite(values[: i + 1])
        wanted[i] = np.sum(weights * np.nan_to_num(values[: i + 1])) / np.sum(weights)
    np.testing.assert_allclose(averages, wanted)
    np.testing.assert_array_equal(plot.smooth(pandas.Series(values), 0), values)


@pytest.mark.parametrize(
    "run, output, problem",
    [
        ("none", "curves.svg", "none has no readable metrics: [Errno 2] No such file"),
        ("run", "curves.txt", "Format 'txt' is not supported"),
        ("run", ".", "--output=. is a folder: name a file in it"),
        ("run", "curves", "--output=curves: end it with .svg or .png"),
        ("lossless", "curves.svg", "lossless has no readable metrics: no row has loss"),
    ],
)
def test_a_mistake_gets_one_message(run, output, problem, here, train_here):
    make_run(here, "run", 0.1, [1.0])
    (make_run(here, "lossless", 0.1, []) / "metrics.jsonl").write_text('{"step": 0}\n' * 2)
    _, message = train_here(run, "--output", output, program=plot.main)
    assert message.startswith(f"error: {problem}") and "\n" not in message
    assert not pathlib.Path(output).is_file()


ZEROS = b"\0" * 64
DAMAGED_LINES = [ZEROS, b"[1", b"[1]\n7\nnull", b"\xff\xfe"]
DAMAGED_LINES += [b'{"step": %s, "loss": 1, "tokens_per_second": 1}' % x for x in (b'"x"', b"[3]")]


def test_lines_that_are_not_rows_are_left_out(tmp_path, drawn, capsys):
    """The last line, which a run may still be writing, is not called damaged."""
    run = make_run(tmp_path, "x", 0.1, [2.0, 1.0])
    with (run / "metrics.jsonl").open("ab") as metrics:
        metrics.write(b"\n".join([*DAMAGED_LINES, b'{"step": 3, "lo']))
    (run / "starts.jsonl").write_text('{"first_step": 0, "conf')
    panel, *_ = drawn(run)
    assert panel.get_title() == "loss by tokens", "a short run is not averaged"
    assert lines_of(panel)[1][1] == [2, 1]
    assert capsys.readouterr().err == f"warning: left out 8 damaged lines of {run}\n"


DAMAGED_FILES = [
    *(("metrics.jsonl", content) for content in (b"", None)),
    *(("config.yaml", content) for content in (b"", ZEROS, None, b"training: [")),
    ("config.yaml", b"training: {tokens: {batch: x, len: []}}"),
]


def test_a_run_that_can_not_be_read_is_left_out(tmp_path, drawn, capsys):
    whole = make_run(tmp_path, "whole", 0.1, [2.0, 1.0])
    runs = [make_run(tmp_path, f"run{i}", 0.1, [2.0, 1.0]) for i in range(len(DAMAGED_FILES))]
    for run, (file, content) in zip(runs, DAMAGED_FILES, strict=True):
        (run / file).unlink() if content is None else (run / file).write_bytes(content)
    panel, *_ = drawn(*runs, whole)
    assert len(panel.get_lines()) == 2, "a faint line and an average, of one run"
    warnings = "".join(f"warning: {run} has no readable metrics: .+\n" for run in runs)
    assert re.fullmatch(warnings, capsys.readouterr().err)
