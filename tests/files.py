"""Writes and reads the datasets, checkpoints and metrics of tests."""

import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import zarr

import train
from data.flat_tokens import SPLITS, FlatTokens, Writer
from runtime import storage
from runtime.checkpoint import Checkpoints
from shardlib.types import make_shardings, u32


def documents(path: pathlib.Path | str, split: str = "train") -> list[list[int]]:
    """The ids of each document of a dataset."""
    data = FlatTokens(str(path), split)
    data.validate()
    ids, _ = data.read(0, data.token_count)
    starts = data.starts(0, data.sequence_count)[1:-1].astype(int)
    return [part.tolist() for part in np.split(ids, starts)]


def write_tokens(
    path: pathlib.Path | str, documents: Iterable, splits: Iterable[str] = SPLITS, tokenizer=""
) -> str:
    """Writes the documents, each a sequence of ids, to each of the splits of a dataset. Returns the
    dataset's path."""
    documents = list(documents)
    for split in splits:
        with Writer(str(path), split) as writer:
            for document in documents:
                writer.append(document)
    if tokenizer:
        name_tokenizer(path, tokenizer)
    return str(path)


def name_tokenizer(path: pathlib.Path | str, name: str, vocabulary: str = "") -> None:
    """Records in a dataset by which tokenizer it was made."""
    made = {"settings": {"tokenizer": name}, "vocabulary": vocabulary}
    zarr.open_group(path).attrs["conversion"] = made


def save_state(folder: pathlib.Path | str, config: "train.Config", weights: Any, step: int) -> None:
    """Saves a checkpoint of a state with these weights, whose moments they are, too."""
    count = jax.device_put(np.uint32(step), make_shardings(u32[""]))
    settings = train.state_type(config), train.dimensions(config), config.to_yaml(), 4
    checkpoints = Checkpoints(str(folder), *settings, say=lambda _: None)
    checkpoints.save(step, train.State(count, weights, weights, weights))
    checkpoints.wait()


def edit_config(checkpoint: pathlib.Path | str, edit: Callable[[str], str]) -> None:
    """Changes the config that a checkpoint records."""
    group = zarr.open_group(checkpoint)
    about = group.attrs.asdict()
    about["config"] = edit(about["config"])
    group.update_attributes(about | {"checksum": storage.checksum(about)})


TIMINGS = "tokens_per_second", "data_wait_seconds"


def timed_rows(run: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rows(run: pathlib.Path) -> list[dict[str, Any]]:
    """The same, without timings."""
    return untimed(timed_rows(run))


def untimed(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in rows]


def arrays(checkpoint: pathlib.Path) -> dict[str, bytes]:
    group = zarr.open_group(checkpoint, mode="r")
    return {name: np.asarray(group[name][()]).tobytes() for name in group.attrs["arrays"]}
