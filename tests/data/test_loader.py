"""The rows of batches: each once per epoch, dependent only on the step, on any mesh and host."""

import collections
import json
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.flat_tokens import NO_TOKEN, FlatTokens, FlatTokensError, TokenizerId
from data.loader import BatchSpec, FlatTokensConfig, Mixture, WeightedDataset, permutation
from runtime import supervise
from runtime.devices import make_mesh
from shardlib.errors import UserError
from tests import golden
from tests.files import documents, name_tokenizer, write_tokens
from tests.helpers import axes, starts_of
from tests.processes import batches_on_hosts

LENGTH = 4


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A dataset of 100 packed rows whose tokens count up, in documents of 1 to 9 tokens."""
    count = 100 * LENGTH + 3
    ends = np.cumsum(np.random.default_rng(0).integers(1, 10, count))
    documents = np.split(np.arange(count) + 1, ends[ends < count])
    return write_tokens(tmp_path_factory.mktemp("loader") / "x.zarr", documents, ["train"])


def config_of(path, **changes):
    sizes = {"read_blocks_per_shuffle_buffer": 3, "sequences_per_read_block": 7, "streams": 1}
    others = {"filespec": path, "mixture": (), "seed": 0, "sequence_packing": True}
    return FlatTokensConfig(**sizes | others | changes)


def open_loader(path, batch=8, mesh=(4, 2), vocab=1000, split="train", length=LENGTH, **changes):
    with jax.set_mesh(make_mesh(axes(*mesh))):
        spec = BatchSpec(batch, length, vocab, 999, io_threads=2)
        return config_of(path, **changes).open(spec, split)


def rows_of(opened, number, indices):
    """Returns the ids and starts of rows of a batch, without the tokens before them."""
    ids, is_start = opened.rows(number, indices)
    return ids[:, 1:], is_start[:, 1:]


def first_rows(opened, count):
    """Returns the numbers of the first packed rows, after checking that tokens are consecutive."""
    batches = -(-count // opened.shape[0])
    rows = (rows_of(opened, step, range(opened.shape[0]))[0] for step in range(batches))
    ids = np.concatenate([*rows])
    assert (ids == ids[:, :1] + np.arange(LENGTH)).all()
    return ((ids[:, 0] - 1) // LENGTH).tolist()[:count]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    streams=st.sampled_from([1, 2, 4]),
    block=st.integers(1, 120),
    blocks=st.integers(1, 9),
    seed=st.integers(0, 2**31 - 1),
)
def test_an_epoch_holds_each_row_once(path, streams, block, blocks, seed):
    sizes = {"sequences_per_read_block": block, "read_blocks_per_shuffle_buffer": blocks}
    opened = open_loader(path, batch=4, mesh=(4, 1), streams=streams, seed=seed, **sizes)
    # 100 rows in streams of 100 / streams, 25 batches of 4 rows an epoch.
    rows = first_rows(opened, 300)
    for first in 0, 100, 200:
        assert sorted(rows[first : first + 100]) == list(range(100))


def test_epochs_and_seeds_are_shuffled_differently(path):
    rows = first_rows(open_loader(path), 200)
    first, second = rows[:100], rows[100:]
    other = first_rows(open_loader(path, seed=1), 100)
    for a, b in (first, second), (first, other), (first, sorted(first)):
        assert sorted(a) == sorted(b)
        assert sum(x == y for x, y in zip(a, b, strict=True)) < 20


def test_a_shuffle_buffer_mixes_distant_blocks(path):
    """The first 21 rows come from 3 blocks of 7 and are shuffled."""
    rows = first_rows(open_loader(path), 21)
    assert sorted(collections.Counter(row // 7 for row in rows).values()) == [7, 7, 7]
    assert rows != sorted(rows)


@pytest.mark.parametrize("kind", ["packed", "documents", "mixture"])
def test_a_batch_depends_on_the_step_alone(path, paths, kind):
    """The batch is the same whatever was read before, on any mesh and number of hosts."""
    packing = kind != "documents"

    def opened(mesh):
        if kind == "mixture":
            return open_mixture(paths, mesh=mesh)
        return open_loader(path, mesh=mesh, streams=2, sequence_packing=packing)

    in_turn = [jax.device_get(batch) for _, batch in opened((4, 2)).from_step(0, 9)]
    for mesh in (1, 1), (2, 4):
        fresh = opened(mesh)
        for step in 8, 3:
            ((_, batch),) = fresh.from_step(step, step + 1)
            assert batch.targets.sharding.is_equivalent_to(fresh.shardings.targets, 2)
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(batch), in_turn[step])
    # A host that holds only rows 3 to 6.
    ids, is_start = rows_of(opened((4, 2)), 5, range(3, 7))
    there = in_turn[5].loss_mask[3:7]
    np.testing.assert_array_equal(ids[there], in_turn[5].targets[3:7][there])
    assert (ids[~there] == NO_TOKEN).all() and there.all() == packing
    is_start[:, 0] = True
    np.testing.assert_array_equal(is_start, starts_of(in_turn[5])[3:7])


@pytest.mark.parametrize("streams, packing", [(1, False), (2, True)])
def test_it_tells_where_a_batch_is_from(path, streams, packing):
    opened = open_loader(path, streams=streams, sequence_packing=packing)
    dataset = opened.datasets[0].data
    for number in 0, 7, 29:  # in several epochs
        match = re.fullmatch(r"(.*/train): sequences ([\d, ]+) \((.*)\)", opened.origin(number))
        assert match[1] == dataset.name
        assert match[3].startswith("packed" if packing else "documents")
        ids, _ = rows_of(opened, number, range(8))
        for row, sequence in zip(ids, map(int, match[2].split(", ")), strict=True):
            start = sequence * LENGTH if packing else int(dataset.seq_starts[sequence])
            assert row[0] == dataset.read(start, start + 1)[0][0]


def test_batches_do_not_depend_on_the_number_of_hosts(path):
    opened = open_loader(path, streams=2)
    config = vars(config_of(path, streams=2))
    request = {"config": config, "shape": (8, LENGTH, 1000), "mesh": axes(4, 2)}
    batches, _ = batches_on_hosts(**request, steps=(11, 15))
    for batch, (_, wanted) in zip(batches, opened.from_step(11, 15), strict=True):
        np.testing.assert_array_equal(batch, wanted.targets)


def record_reads(monkeypatch):
    """Returns a list to which each read from now on appends its number of tokens."""
    lengths, read = [], FlatTokens.read_encoded

    def recorded(self, low, high):
        lengths.append(high - low)
        return read(self, low, high)

    monkeypatch.setattr(FlatTokens, "read_encoded", recorded)
    return lengths


def test_the_first_input_of_a_row_is_the_token_before_it(tmp_path):
    """Tokens count up from 0, an id like any other, in documents of 3."""
    path = write_tokens(tmp_path / "x.zarr", np.arange(96).reshape(32, 3))
    opened = open_loader(path, sequences_per_read_block=2)
    for _, batch in opened.from_step(0, 3):
        assert batch.loss_mask.all()
        targets, inputs = np.asarray(batch.targets), np.asarray(batch.inputs)
        wanted = np.where(targets % 3 == 0, opened.spec.start_token, targets - 1)
        np.testing.assert_array_equal(inputs, wanted)


def test_opening_at_any_step_reads_one_buffer_per_stream(path, monkeypatch):
    opened = open_loader(path, streams=2, batch=4)
    read = record_reads(monkeypatch)
    list(opened.from_step(10_000, 10_001))
    assert sum(read) <= 2 * 3 * (7 * LENGTH + 1) * 2, "at most two buffers, if the batch spans them"
    assert len(read) <= 2 * 2 * 3


def test_the_next_buffer_is_read_while_one_is_in_use(path, monkeypatch):
    """A buffer has 3 blocks of 7 rows: the third batch of 4 rows reaches its second half."""
    for batches, reads in (2, 3), (3, 6):
        opened, read = open_loader(path, batch=4, mesh=(4, 1)), record_reads(monkeypatch)
        for number in range(batches):
            rows_of(opened, number, range(4))
        opened.datasets[0].threads.shutdown()
        assert len(read) == reads


def test_one_document_per_row(path):
    texts = documents(path)
    wanted = {text[0]: (text + [NO_TOKEN] * LENGTH)[:LENGTH] for text in texts}
    opened = open_loader(path, batch=2, mesh=(2, 1), sequence_packing=False)
    batches = (rows_of(opened, step, range(2)) for step in range(len(texts) // 2))
    ids, is_start = map(np.concatenate, zip(*batches, strict=True))
    assert ids.tolist() == [wanted[first] for first in ids[:, 0]]
    assert is_start.tolist() == [[True] + [False] * (LENGTH - 1)] * len(ids)
    assert len({*ids[:, 0]}) >= len(texts) - 1


def test_the_permutation_is_the_same_in_any_numpy():
    assert permutation(10, 1, 2, 3).tolist() == [7, 4, 8, 9, 1, 5, 0, 2, 3, 6]
    assert sorted(permutation(1000, 5)) == list(range(1000))


def test_the_next_batch_is_prepared_while_one_is_in_use(path, monkeypatch):
    prepared, rows = [], Mixture.rows
    monkeypatch.setattr(Mixture, "rows", lambda *at: prepared.append(at[1]) or rows(*at))
    batches = open_loader(path).from_step(3, 6)
    next(batches)
    next(batches)
    assert prepared[:2] == [3, 4]
    list(batches)
    assert prepared == [3, 4, 5], "no batch after the last step"


WEIGHTS = [0.6, 0.3, 0.1]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Three datasets, of 40, 17 and 9 packed rows per split, whose ids begin at 1, 1001 and 2001,
    and count up."""
    folder = tmp_path_factory.mktemp("mixture")
    return [
        write_tokens(folder / f"{i}.zarr", [1000 * i + 1 + np.arange(rows * LENGTH)])
        for i, rows in enumerate([40, 17, 9])
    ]


def test_hosts_with_other_copies_of_a_dataset(path, monkeypatch):
    def sent(own):
        other = json.loads(own)
        other["a dataset"]["tokens"] = [7]
        return [own, json.dumps(other)]

    monkeypatch.setattr(supervise, "of_all_hosts", sent)
    message = "hosts differ in a dataset: {.*403.* on host 0, {.*7.* on host 1. Each reads its own"
    with pytest.raises(UserError, match=message):
        open_loader(path)


def open_mixture(paths, weights=WEIGHTS, **changes):
    mixture = tuple(map(WeightedDataset, paths, weights))
    return open_loader(None, mixture=mixture, **({"vocab": 3000} | changes))


def rows_by_dataset(opened, steps):
    """Returns, for each dataset, the numbers of its rows in the batches of `steps`."""
    seen = collections.defaultdict(list)
    for _, batch in opened.from_step(*steps):
        for row in np.asarray(batch.targets):
            assert (row == row[0] + np.arange(LENGTH)).all()
            dataset, token = divmod(int(row[0]) - 1, 1000)
            seen[dataset].append(token // LENGTH)
    return [seen[dataset] for dataset in sorted(seen)]


@pytest.mark.parametrize("streams", [1, 2])
def test_a_mixture_has_each_dataset_in_its_own_order_and_its_share(paths, streams):
    changes = {"streams": streams, "sequences_per_read_block": 3}
    seen = rows_by_dataset(open_mixture(paths, **changes), (0, 50))
    assert [len(rows) for rows in seen] == [240, 120, 40], "of 400 rows"
    assert open_mixture(paths, **changes).epochs(50) == "6 and 7.06 and 4.44 epochs"
    for path, rows, count in zip(paths, seen, [40, 17, 9], strict=True):
        (alone,) = rows_by_dataset(open_loader(path, vocab=3000, **changes), (0, 30))
        assert rows == alone[: len(rows)]
        for epoch in range(len(rows) // count if streams == 1 else 0):
            assert sorted(rows[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_a_dataset_with_less_than_a_row_per_batch(paths):
    seen = rows_by_dataset(open_mixture(paths, [1, 0.01, 0.01]), (0, 51))
    assert [len(rows) for rows in seen] == [400, 4, 4]


def test_a_mixture_tells_where_a_batch_is_from(paths):
    opened = open_mixture(paths)
    for number in 0, 13:
        assert opened.origin(number) == "; ".join(
            f"{path}/train: sequences {', '.join(map(str, rows))} (packed {LENGTH} tokens each)"
            for path, rows in zip(paths, rows_by_dataset(opened, (number, number + 1)), strict=True)
        )
    few = open_mixture(paths, [1, 0.01, 0.01])
    assert few.origin(0).count("/train: ") == 1, "the others have no row in it"


def test_a_mixture_of_the_validation_splits(paths):
    opened = open_mixture(paths, split="validation")
    assert "0.zarr/validation" in opened.origin(0) and "/train" not in opened.origin(0)
    for other in {"seed": 1}, {"sequences_per_read_block": 2}, {"streams": 2}:
        shuffled_otherwise = open_mixture(paths, split="validation", **other)
        assert opened.origin(0) == shuffled_otherwise.origin(0), "losses are comparable"


def test_the_tokenizer_of_a_mixture(paths, tmp_path):
    copies = [shutil.copytree(path, tmp_path / pathlib.Path(path).name) for path in paths]

    def used(*paths):
        return config_of(None, mixture=tuple(WeightedDataset(p, 1) for p in paths)).tokenizer_used()

    first, second, third = map(str, copies)
    assert used(first, second) is None
    name_tokenizer(second, "bytes_utf8")
    assert used(first, second) == used(second, first) == TokenizerId("bytes_utf8")
    assert used("memory://x.zarr", second).name == "bytes_utf8", "without opening what is remote"
    open_mixture([first, second])
    name_tokenizer(third, "some/other")
    with golden.raises("datasets.txt", "mixture: different tokenizers", FlatTokensError):
        open_mixture([first, second, third])


def test_each_dataset_of_a_mixture_must_fit_the_config(paths):
    case, path = "mixture: too few rows in one dataset", (paths[2], "2.zarr")
    with golden.raises("datasets.txt", case, FlatTokensError, path):
        open_mixture(paths, batch=16)


REFUSED = {
    "a vocabulary too small": {"vocab": 403},
    "too few rows": {"batch": 128},
    "streams that do not divide the batch": {"streams": 3},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_the_config(path, case):
    with golden.raises("datasets.txt", f"loader: {case}", FlatTokensError, (path, "x.zarr")):
        open_loader(path, **REFUSED[case])
    open_loader(path, vocab=404)
