"""Makes batches directly from a streamed Hugging Face dataset, without converting it first.

Each host reads its own part of the dataset (see text.py) and fills its rows of every batch with the
tokens, packed end to end, so that no token is dropped. A host resumes from a *place*, which is
JSON: the position in its part, how many tokens after that position are already used, the last used
token, and how many batches were made.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Annotated, Any

import jax
import numpy as np

from data import text
from data.flat_tokens import FILL, TokenizerId, decode
from data.formats import counted
from data.loader import SAME_FILES, Batches, BatchSpec, rows_of
from data.tokenizer import open_tokenizer
from runtime.run import say
from runtime.supervise import check_hosts_agree
from runtime.values import NOT_EMPTY, Path, PositiveInt
from shardlib.errors import UserError


@dataclasses.dataclass(unsafe_hash=True, kw_only=True)
class HuggingFaceConfig(text.TextConfig, key="hf_dataset"):
    path: Annotated[Path, NOT_EMPTY]  # `path` and `name` are passed to datasets.load_dataset
    name: str | None
    num_workers: PositiveInt | None  # tokenizing threads of each host; null: one per core
    sequences_packed_per_batch: PositiveInt  # the most documents tokenized at a time

    def open(self, spec: BatchSpec, split: str) -> "StreamLoader":
        """Returns the batches of a split, train or validation, for the mesh in context."""
        return StreamLoader(self, spec, split)

    def tokenizer_used(self, remote: bool = False) -> TokenizerId:
        vocabulary = open_tokenizer(self.tokenizer).vocabulary if remote else ""
        return TokenizerId(self.tokenizer, vocabulary)


class StreamLoader(Batches):
    """The batches of a streamed split, resumed from `position`. The stream starts over at its end.

    Raises UserError or OSError if the dataset, its column or its tokenizer can't be opened.
    """

    def __init__(self, config: HuggingFaceConfig, spec: BatchSpec, split: str):
        super().__init__(spec)
        self.config = config
        if not (name := getattr(config, f"{split}_split")):
            raise UserError("to validate, a run needs hf_dataset.validation_split")
        self.name = f"{config.path}, split {name},"
        load = {"path": config.path, "name": config.name}
        self.source = text.Source(load, name, config, config.sequences_packed_per_batch)
        found, hosts = self.source.check(), jax.process_count()
        check_hosts_agree({"a dataset": found}, SAME_FILES)
        self.first = {"source": found | {"hosts": hosts}}  # the position at each epoch's start
        self.files = frozenset(self.source.names)
        largest = max(open_tokenizer(config.tokenizer).words())
        if largest >= spec.vocab:
            has = f"the tokenizer {config.tokenizer} has ids up to {largest}"
            self.source.notes.append(f"{has}; one that model.vocab={spec.vocab} lacks ends the run")
        for note in self.source.notes if split == "train" else ():
            say(f"note: {note}")
        say(f"{self.name} has {counted(found['files'], 'file')}")
        if (fewest := found["shards"] // hosts) and found["shards"] % hosts:
            uneven = f"{found['shards']} shards on {hosts} hosts, which take equally many tokens"
            say(f"note: {uneven}: documents of hosts with {fewest} shards come more often")
        if len(self.local_rows) * hosts != spec.rows:
            problem = "hf_dataset needs a mesh on which no two hosts hold the same rows"
            raise UserError(f"{problem}: choose one, or convert the dataset to flat tokens")

    def units(self, position: dict[str, Any]) -> Iterator[text.Unit]:
        """Yields the units of this host from a position on, endlessly."""
        threads = self.config.num_workers or text.cores()
        part = jax.process_index(), jax.process_count()
        for number in itertools.count():
            documents = empty = 0
            for unit in text.units(self.source, position, threads, *part):
                documents += len(unit.lengths)
                empty += int((unit.lengths == 0).sum())
                yield unit
            if documents == empty and "state" not in position:
                raise UserError(f"{self.name} has no text for host {jax.process_index()}")
            if number == 0:
                read = f"{counted(documents, 'document')}, {empty:,} without text"
                say(f"{self.name} starts over: read {read}")
            position = self.first

    def tokens(self, place: dict[str, Any], count: int) -> Iterator[tuple[np.ndarray, Any]]:
        """Yields `count` encoded tokens at a time from a place on, preceded by the token before
        them, and the place after them."""
        position, used = place["position"], place["used"]
        left = np.array([place.get("last", FILL)], np.uint32)
        known = {"vocabulary": open_tokenizer(self.config.tokenizer).vocabulary}
        for unit in self.units(position):
            position = {**position, "source": unit.position["source"]}  # `used` counts from here
            left = np.append(left, unit.tokens[used:])
            while len(left) > count:
                found, left = left[: count + 1], left[count:]
                used = len(unit.tokens) - len(left[1:])
                yield found, {"position": position, "used": used, "last": int(left[0]), **known}
            position, used = unit.position, 0

    def origin(self, number: int) -> str:
        return f"{self.name} batch {number} of the stream, counted from 0"

    def make(self, numbers: Iterator[int]) -> Iterator[tuple[np.ndarray, np.ndarray, Any]]:
        place: Any = self.position or {"position": self.first, "used": 0, "batches": 0}
        count, tokens = place["batches"], self.tokens(place, len(self.local_rows) * self.shape[1])
        for number in numbers:
            *_, (flat, place) = itertools.islice(tokens, number + 1 - count)
            count = place["batches"] = number + 1
            yield *decode(rows_of(flat, self.shape[1])), place
