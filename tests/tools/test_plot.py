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
    assert capsys.readouterr().out == f"drew {output}\n"
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


def test_png_and_the_smoothing_that_is_stated(tmp_path, monkeypatch, capsys):
    one = make_run(tmp_path, "one", 0.1, [1.0] * 300)
    output = tmp_path / "curves.png"
    panels = drawn(tmp_path, monkeypatch, capsys, one, "--output", output)
    average = ", averaged over 3 steps"
    titles = [f"loss{average}", f"loss{average}", f"throughput{average}"]
    assert [title for title, _, _ in panels] == titles, "no validation losses, no panel"
    assert output.read_bytes().startswith(b"\x89PNG")


def test_short_runs_are_not_averaged(tmp_path, monkeypatch, capsys):
    one = make_run(tmp_path, "one", 0.1, [2.0, 1.0])
    panels = drawn(tmp_path, monkeypatch, capsys, one, "--output", tmp_path / "curves.png")
    assert panels[0][0] == "loss" and panels[0][2][1][1].tolist() == [2, 1]


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


MISTAKES = {
    "no folder": "{folder}/x has no readable metrics: [Errno 2] No such file",
    "no steps": "{folder}/x has no readable metrics: there are no rows",
    "damaged": "{folder}/x has no readable metrics: there are no rows",
    "no picture": "Format 'txt' is not supported",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_message(mistake, tmp_path, monkeypatch):
    name = "curves.txt" if mistake == "no picture" else "curves.svg"
    if mistake != "no folder":
        run = make_run(tmp_path, "x", 0.1, [1.0] if mistake == "no picture" else [])
        if mistake == "damaged":
            (run / "metrics.jsonl").write_text("{")
    monkeypatch.setattr("sys.argv", ["plot", f"{tmp_path}/x", "--output", f"{tmp_path}/{name}"])
    with pytest.raises(SystemExit) as stopped:
        plot.main()
    message = str(stopped.value)
    assert message.startswith("error: " + MISTAKES[mistake].format(folder=tmp_path))
    assert "\n" not in message and not (tmp_path / name).exists()


ZEROS = b"\0" * 64
DAMAGED_ROWS = {
    "a last line cut off": b'{"step": 3, "lo',
    "zeros": ZEROS + b"\n",
    "not JSON": b"[1\n",
    "not a row": b"[1]\n7\nnull\n",
    "a word for a number": b'{"step": "x", "loss": 1, "tokens_per_second": 1}\n',
    "a list for a number": b'{"step": [3], "loss": 1, "tokens_per_second": 1}\n',
    "other bytes": b"\xff\xfe\n",
}


@pytest.mark.parametrize("what", DAMAGED_ROWS)
def test_lines_that_are_not_rows_are_left_out(what, tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path, "x", 0.1, [2.0, 1.0])
    with (run / "metrics.jsonl").open("ab") as metrics:
        metrics.write(DAMAGED_ROWS[what])
    panels = drawn(tmp_path, monkeypatch, capsys, run, "--output", tmp_path / "curves.svg")
    assert panels[0][2][1][1].tolist() == [2, 1]
    count = DAMAGED_ROWS[what].count(b"\n")
    warning = f"warning: left out {count} damaged lines of {run}\n" if count else ""
    assert capsys.readouterr().err == warning


DAMAGED_RUNS = {
    "metrics.jsonl": [b"", None],
    "config.yaml": [b"", ZEROS, None, b"training: [", b"training: {tokens: {batch: x, len: []}}"],
}


@pytest.mark.parametrize(
    ("file", "content"),
    [(file, content) for file, contents in DAMAGED_RUNS.items() for content in contents],
)
def test_a_run_that_can_not_be_read_is_left_out(file, content, tmp_path, monkeypatch, capsys):
    one, two = (make_run(tmp_path, name, 0.1, [2.0, 1.0]) for name in ("one", "two"))
    (one / file).unlink() if content is None else (one / file).write_bytes(content)
    output = tmp_path / "curves.svg"
    panels = drawn(tmp_path, monkeypatch, capsys, one, two, "--output", output)
    assert len(panels[0][2]) == 2, "a faint line and an average, of one run"
    printed = capsys.readouterr()
    assert printed.out == f"drew {output}\n"
    assert re.fullmatch(f"warning: {one} has no readable metrics: .+\n", printed.err)
