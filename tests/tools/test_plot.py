import json
import pathlib
import re

import numpy as np
import pandas
import pytest
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
    titles = ["loss", "loss", "validation loss", "throughput"]
    assert [title for title, _, _ in panels] == titles
    (_, x_tokens, by_tokens), (_, x_time, by_time), (_, _, validation), (_, _, speed) = panels
    assert (x_tokens, x_time) == ("tokens", "minutes of training steps")
    tokens, losses, _ = by_tokens[1]
    assert tokens.tolist() == [32, 64, 96] and losses.tolist() == [4, 3, 2]
    np.testing.assert_array_equal(by_tokens[3][1], [4, np.nan, 1, 0.5])
    assert by_time[3][0] * 60 == pytest.approx([0.5, 1, 1.5, 2])
    assert [line[0].tolist() for line in validation] == [[64, 96]]
    assert [line[1].tolist() for line in speed] == [[64] * 3, [64] * 4]
    text = re.sub(r"\s+", " ", output.read_text())
    assert "one, learning_rate=0.1<" in text and "two, learning_rate=0.2<" in text


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
    assert panels[1][2][1][0] * 60 == pytest.approx([1, 1.5, 2, 2.5])


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
    assert marker == "." and len(colors) == 60 and height == 8 + 30 / 5


def test_png_and_the_smoothing_that_is_stated(tmp_path, monkeypatch, capsys):
    one = make_run(tmp_path, "one", 0.1, [1.0] * 300)
    output = tmp_path / "curves.png"
    panels = drawn(tmp_path, monkeypatch, capsys, one, "--output", output)
    average = ", averaged over 3 steps"
    titles = [f"loss{average}", f"loss{average}", f"throughput{average}"]
    assert [title for title, _, _ in panels] == titles, "no validation losses, no panel"
    assert output.read_bytes().startswith(b"\x89PNG")


def test_labels_say_what_affects_learning():
    configs = [
        {"training.learning_rate": rate, "mesh.d": 8, "paths.model_name": name, "profile": rate > 1}
        | {"checkpoints.keep_last": rate, "hlo_svg": rate < 2, "hang_timeout_seconds": rate}
        | {"mesh.t": rate, "training.loss_chunks": rate, "training.validation_interval": rate}
        | {"training.optimizer": "muon"}
        for name, rate in [("a", 1), ("b", 2)]
    ]
    folders = [pathlib.Path("runs/a"), pathlib.Path("runs/b")]
    assert plot.labels(folders, configs) == ["a, learning_rate=1", "b, learning_rate=2"]
    for config, optimizer in zip(configs, ("adamw", "muon"), strict=True):
        config["training.optimizer"] = optimizer
    assert plot.labels(folders, configs)[0] == "a, learning_rate=1, optimizer=adamw"
    swept = [pathlib.Path(f"runs/x/training.learning_rate={rate}") for rate in ("1", "20")]
    both = ["optimizer=adamw", "learning_rate=2, optimizer=muon"]
    expected = [f"{run.name}, {more}" for run, more in zip(swept, both, strict=True)]
    assert plot.labels(swept, configs) == expected


def test_a_value_that_follows_another_is_not_repeated():
    configs = [
        {"training.steps": steps, "training.steps_for_lr": steps, "training.warmup_steps": warmup}
        for steps, warmup in [(100, 10), (200, 10), (200, 20)]
    ]
    folders = [pathlib.Path(f"runs/{name}") for name in "abc"]
    expected = ["a, steps=100, warmup_steps=10", "b, steps=200, warmup_steps=10"]
    assert plot.labels(folders, configs) == [*expected, "c, steps=200, warmup_steps=20"]


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
    assert title == "loss" and lines[1][1].tolist() == [2, 1], "a short run is not averaged"
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
