import json
import pathlib
import re

import numpy as np
import pandas
import pytest
import zarr
from matplotlib.figure import Figure

from tools import plot

CONFIG = """
training: {{tokens: {{batch: 4, len: 8}}, learning_rate: {rate}}}
paths: {{model_name: {name}}}
mesh: {{d: 8, t: 1}}
"""


def make_run(folder, name, rate, losses, **more):
    (folder / name).mkdir()
    (folder / name / "config.yaml").write_text(CONFIG.format(rate=rate, name=name))
    rows = [
        {"step": step, "loss": loss, "tokens_per_second": 64.0}
        | {key: values[step] for key, values in more.items() if step in values}
        for step, loss in enumerate(losses)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / name / "metrics.jsonl").write_text(lines)
    return folder / name


def drawn(folder, monkeypatch, capsys, *arguments):
    """Each panel's title, x label and lines: x, y and label."""
    panels = []
    save = Figure.savefig

    def look(figure, *args, **kwargs):
        for axes in figure.axes:
            lines = [(*line.get_data(), line.get_label()) for line in axes.get_lines()]
            panels.append((axes.get_title(), axes.get_xlabel(), lines))
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", look)
    monkeypatch.setattr("sys.argv", ["plot", *map(str, arguments)])
    plot.main()
    return panels


def test_the_picture_of_two_runs(tmp_path, monkeypatch, capsys):
    one = make_run(tmp_path, "one", 0.1, [4.0, 3.0, 2.0], validation_loss={1: 3.5, 2: 2.5})
    two = make_run(tmp_path, "two", 0.2, [4.0, None, 1.0, 0.5])
    output = tmp_path / "curves.svg"
    panels = drawn(tmp_path, monkeypatch, capsys, one, two, "--smoothing", 0, "--output", output)
    assert capsys.readouterr() == (f"drew {output}\n", "")
    titles = ["loss by tokens", "loss by time", "validation loss", "throughput"]
    assert [title for title, _, _ in panels] == titles
    (_, x_tokens, by_tokens), (_, x_time, by_time), (_, _, validation), (_, _, speed) = panels
    assert (x_tokens, x_time) == ("tokens", "seconds of training steps")
    tokens, losses, _ = by_tokens[1]
    assert tokens.tolist() == [32, 64, 96] and losses.tolist() == [4, 3, 2]
    np.testing.assert_array_equal(by_tokens[3][1], [4, np.nan, 1, 0.5])
    assert by_time[3][0] == pytest.approx([0.5, 1, 1.5, 2])
    assert [line[0].tolist() for line in validation] == [[64, 96]]
    assert [line[1].tolist() for line in speed] == [[64] * 3, [64] * 4]
    table = re.findall("monospace.*>(.*)</text>", output.read_text())
    assert [line.replace("\N{NO-BREAK SPACE}", " ") for line in table] == [
        "                           one     two",
        "loss                    2.0000  0.5000",
        "validation_loss         2.5000       -",
        "training.learning_rate     0.1     0.2",
    ]


def test_each_validation_set_has_its_line(tmp_path, monkeypatch, capsys):
    """Both sets of a run have its color, and each a style, which the panel's legend explains."""
    sets = {"validation_loss/wiki": {0: 3.0, 1: 2.0}, "validation_loss/code": {1: 1.5}}
    one = make_run(tmp_path, "one", 0.1, [4.0, 3.0], **sets)
    two = make_run(tmp_path, "two", 0.2, [4.0, 2.0], validation_loss={1: 2.5})
    styles = []
    save = Figure.savefig

    def look(figure, *args, **kwargs):
        panel = figure.axes[2]
        styles.extend((x.get_color(), x.get_linestyle()) for x in panel.get_lines())
        styles.append([text.get_text() for text in panel.get_legend().get_texts()])
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", look)
    output = tmp_path / "curves.svg"
    panels = drawn(tmp_path, monkeypatch, capsys, one, two, "--output", output)
    lines = [(x.tolist(), y.tolist()) for x, y, _ in panels[2][2][:3]]
    assert lines == [([32, 64], [3, 2]), ([64], [1.5]), ([64], [2.5])]
    (a, first), (b, second), (c, third), *_, names = styles
    assert a == b != c and len({first, second, third}) == 3
    assert names == ["wiki", "code", "without a name"]
    table = output.read_text().replace("\N{NO-BREAK SPACE}", " ")
    for row in "validation_loss/wiki +2.0000 +-", "validation_loss/code +1.5000 +-":
        assert re.search(row, table)


def test_validation_is_in_bits_per_byte_if_tokenizers_differ(tmp_path, monkeypatch, capsys):
    """Compares in bits only if all runs know their bytes as well."""
    bits = {"validation_bits_per_byte": {1: 0.9}}
    runs = [
        make_run(tmp_path, name, 0.1, [4.0, 3.0], validation_loss={1: 3.5}, **known)
        for name, known in [("a", bits), ("b", bits), ("c", {})]
    ]
    for run, tokenizer in zip(runs, "xyz", strict=True):
        with (run / "config.yaml").open("a") as config:
            config.write(f"hf_dataset:\n  tokenizer: {tokenizer}\n")
    labels = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *_, **__: labels.append(figure.axes[2].get_ylabel())
    )
    for chosen in runs[:2], runs[:1], runs:
        plot.draw(chosen, tmp_path / "x.svg", None, log=False)
    others = "nats per token", "nats per token; the tokenizers differ"
    assert labels == ["bits per byte", *others]


def test_tokens_count_by_the_batch_of_their_start(tmp_path, monkeypatch, capsys):
    """The run began as a clone at step 0, went on at step 2 with half the batch, then at step 1."""
    run = make_run(tmp_path, "run", 0.1, [4.0, 3.0, 2.0, 1.0])
    batches = (0, 8), (2, 2), (1, 4)
    starts = [
        {"first_step": step, "config": f"training: {{tokens: {{batch: {batch}, len: 8}}}}"}
        for step, batch in batches
    ]
    (run / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    panels = drawn(tmp_path, monkeypatch, capsys, run, "--output", tmp_path / "curves.svg")
    assert panels[0][2][1][0].tolist() == [64, 96, 128, 160]
    assert panels[1][2][1][0] == pytest.approx([1, 1.5, 2, 2.5])


def test_each_of_many_runs_can_be_seen(tmp_path, monkeypatch, capsys):
    looks = []
    save = Figure.savefig

    def look(figure, *args, **kwargs):
        lines = figure.axes[0].get_lines()[1::2]
        looks.append(
            (figure.get_figheight(), lines[0].get_marker(), {x.get_color() for x in lines})
        )
        save(figure, *args, **kwargs)

    runs = [make_run(tmp_path, f"run{i}", i, [1.0]) for i in range(60)]
    monkeypatch.setattr(Figure, "savefig", look)
    monkeypatch.setattr("sys.argv", ["plot", *map(str, runs), "--output", f"{tmp_path}/x.png"])
    plot.main()
    ((height, marker, colors),) = looks
    # Ten names of 5 letters stand in a line of the legend; the table has 60 lines, and a head.
    assert marker == "." and len(colors) == 60 and height == 8.5 + 6 / 5 + 60 / 8


def test_png_and_the_smoothing_that_is_stated(tmp_path, monkeypatch, capsys):
    one = make_run(tmp_path, "one", 0.1, [1.0] * 300)
    output = tmp_path / "curves.png"
    panels = drawn(tmp_path, monkeypatch, capsys, one, "--output", output)
    average = ", averaged over 3 steps"
    titles = [f"{x}{average}" for x in ("loss by tokens", "loss by time", "throughput")]
    assert [title for title, _, _ in panels] == titles, "no validation losses, no panel"
    assert output.read_bytes().startswith(b"\x89PNG")


def test_the_table_says_what_affects_learning():
    configs = [
        {"training.learning_rate": rate, "mesh.d": 8, "paths.model_name": name, "profile": rate > 1}
        | {"checkpoints.keep_last": rate, "hlo_svg": rate < 2, "hang_timeout_seconds": rate}
        | {"mesh.t": rate, "training.loss_chunks": rate, "training.validation_interval": rate}
        | {"training.optimizer": "muon"}
        for name, rate in [("a", 1), ("b", 2)]
    ]
    assert plot.differences(["a", "b"], configs).to_dict("list") == {
        "training.learning_rate": ["1", "2"]
    }
    for config, optimizer in zip(configs, ("adamw", "muon"), strict=True):
        config["training.optimizer"] = optimizer
    assert plot.differences(["a", "b"], configs).to_dict("list") == {
        "training.learning_rate": ["1", "2"], "training.optimizer": ["adamw", "muon"],
    }  # fmt: skip


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
    ],
)
def test_a_setting_that_no_run_uses_is_not_in_the_table(both, setting, shown):
    table = plot.differences(["a", "b"], [both | {setting: 1}, both | {setting: 2}])
    assert [*table] == [setting] * shown


def test_a_section_that_a_run_lacks():
    configs = {"model.experts": None}, {"model.experts.count": 8}
    table = plot.differences(["dense", "experts"], configs)
    assert table.to_dict("list") == {"model.experts.count": ["-", "8"]}


def test_a_value_that_follows_another_is_not_repeated():
    configs = [
        {"training.steps": steps, "training.steps_for_lr": steps, "training.warmup_steps": warmup}
        for steps, warmup in [(100, 10), (200, 10), (200, 20)]
    ]
    table = plot.differences(["a", "b", "c"], configs)
    assert [*table] == ["training.steps", "training.warmup_steps"]


@pytest.mark.parametrize(
    "tokenizers, unit",
    [
        (["bytes_utf8"] * 2, "nats per byte"),
        (["gpt2", "gpt2"], "nats per token"),
        (["bytes_utf8", "gpt2"], "nats per token; the tokenizers differ"),
        (["llama", "gpt2"], "nats per token; the tokenizers differ"),
        (["gpt2", None], "nats per token; the tokenizers differ"),
    ],
)
def test_losses_of_different_tokenizers(tokenizers, unit, tmp_path, monkeypatch):
    """The first run has a dataset; the second one streams, or its dataset is gone."""
    first, second = runs = [make_run(tmp_path, name, 0.1, [4.0, 3.0]) for name in "ab"]
    dataset = zarr.create_group(tmp_path / "data.zarr")
    dataset.attrs["conversion"] = {"settings": {"tokenizer": tokenizers[0]}}
    with (first / "config.yaml").open("a") as config:
        config.write(f"flat_tokens:\n  filespec: {tmp_path}/data.zarr\n")
    if tokenizers[1]:
        with (second / "config.yaml").open("a") as config:
            config.write(f"hf_dataset:\n  tokenizer: {tokenizers[1]}\n")
    labels = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *_, **__: labels.append(figure.axes[0].get_ylabel())
    )
    plot.draw(runs, tmp_path / "x.svg", None, log=False)
    assert labels == [unit]


def test_logarithmic_axes_begin_at_a_tenth_of_the_shortest_run(tmp_path, monkeypatch, capsys):
    long, short = make_run(tmp_path, "a", 1, [4.0] * 90), make_run(tmp_path, "b", 2, [3.0] * 60)
    output = tmp_path / "x.svg"
    panels = drawn(tmp_path, monkeypatch, capsys, long, short, "--log", "--output", output)
    (_, _, by_tokens), (_, _, by_time), _ = panels
    assert [line[0].min() for line in by_tokens] == [32 * 6] * 4
    assert [line[0].max() for line in by_time] == pytest.approx([45, 45, 30, 30])


def test_runs_of_the_same_name_are_told_apart(tmp_path, monkeypatch, capsys):
    for parent in "xy":
        (tmp_path / parent).mkdir()
    runs = [make_run(tmp_path / parent, "run", 1, [4.0]) for parent in "xy"]
    panels = drawn(tmp_path, monkeypatch, capsys, *runs, "--output", tmp_path / "x.svg")
    assert [line[2] for line in panels[0][2][1::2]] == [*map(str, runs)]


def test_smoothing_is_a_mean_of_falling_weights():
    values = np.random.default_rng(0).normal(size=50)
    values[[0, 20, 21]] = np.nan
    averages = plot.smooth(pandas.Series(values), 5)
    for i in range(50):
        weights = np.exp(-(i - np.arange(i + 1)) / 5) * np.isfinite(values[: i + 1])
        if np.isfinite(values[i]):
            wanted = np.sum(weights * np.nan_to_num(values[: i + 1])) / np.sum(weights)
            assert averages[i] == pytest.approx(wanted)
        else:
            assert np.isnan(averages[i])
    np.testing.assert_array_equal(plot.smooth(pandas.Series(values), 0), values)


@pytest.mark.parametrize(
    "run, output, problem",
    [
        ("none", "curves.svg", "none has no readable metrics: [Errno 2] No such file"),
        ("run", "curves.txt", "Format 'txt' is not supported"),
        ("lossless", "curves.svg", "lossless has no readable metrics: no row has loss"),
    ],
)
def test_a_mistake_gets_one_message(run, output, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, "run", 0.1, [1.0])
    (make_run(tmp_path, "lossless", 0.1, []) / "metrics.jsonl").write_text('{"step": 0}\n' * 2)
    monkeypatch.setattr("sys.argv", ["plot", run, "--output", output])
    with pytest.raises(SystemExit) as stopped:
        plot.main()
    message = str(stopped.value)
    assert message.startswith(f"error: {problem}") and "\n" not in message
    assert not pathlib.Path(output).exists()


def test_a_folder_is_no_picture(tmp_path, monkeypatch):
    run = make_run(tmp_path, "run", 0.1, [1.0])
    monkeypatch.setattr("sys.argv", ["plot", str(run), "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match=f"--output={tmp_path} is a folder: name a file in it"):
        plot.main()


ZEROS = b"\0" * 64
DAMAGED_LINES = [
    ZEROS,
    b"[1",
    b"[1]\n7\nnull",
    b'{"step": "x", "loss": 1, "tokens_per_second": 1}',
    b'{"step": [3], "loss": 1, "tokens_per_second": 1}',
    b"\xff\xfe",
]


def test_lines_that_are_not_rows_are_left_out(tmp_path, monkeypatch, capsys):
    """The last line, which a run may still be writing, is not called damaged."""
    run = make_run(tmp_path, "x", 0.1, [2.0, 1.0])
    with (run / "metrics.jsonl").open("ab") as metrics:
        metrics.write(b"\n".join([*DAMAGED_LINES, b'{"step": 3, "lo']))
    panels = drawn(tmp_path, monkeypatch, capsys, run, "--output", tmp_path / "curves.svg")
    title, _, lines = panels[0]
    assert title == "loss by tokens" and lines[1][1].tolist() == [2, 1], (
        "a short run is not averaged"
    )
    warning = f"warning: left out 8 damaged lines of {run}\n"
    assert capsys.readouterr().err == warning


DAMAGED_FILES = [
    *(("metrics.jsonl", content) for content in (b"", None)),
    *(("config.yaml", content) for content in (b"", ZEROS, None, b"training: [")),
    ("config.yaml", b"training: {tokens: {batch: x, len: []}}"),
]


def test_a_run_that_can_not_be_read_is_left_out(tmp_path, monkeypatch, capsys):
    whole = make_run(tmp_path, "whole", 0.1, [2.0, 1.0])
    runs = [make_run(tmp_path, f"run{i}", 0.1, [2.0, 1.0]) for i in range(len(DAMAGED_FILES))]
    for run, (file, content) in zip(runs, DAMAGED_FILES, strict=True):
        (run / file).unlink() if content is None else (run / file).write_bytes(content)
    output = tmp_path / "curves.svg"
    panels = drawn(tmp_path, monkeypatch, capsys, *runs, whole, "--output", output)
    assert len(panels[0][2]) == 2, "a faint line and an average, of one run"
    printed = capsys.readouterr()
    assert printed.out == f"drew {output}\n"
    warnings = "".join(f"warning: {run} has no readable metrics: .+\n" for run in runs)
    assert re.fullmatch(warnings, printed.err)
