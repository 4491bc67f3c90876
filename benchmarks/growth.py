"""Measures what grows with a model, a mesh, a dataset and a checkpoint.

    python -m benchmarks.growth [step | plan | data | checkpoint ...]

- step: seconds to trace the training step, check its types, audit it, and for its first run, with
  compilation, on 8 simulated devices; against layers, devices and experts. The model is small:
  these times depend on its number of operations.
- plan: seconds that `tools.plan` takes for Llama 3 8B, and the meshes that it tries.
- data: seconds to open a dataset, to read a host's rows of the first batch and, as when a run
  resumes, of one in the middle of an epoch, and the tokens that the host reads for 1,000 batches
  more. No file is that large: reads are replaced by arrays of ones.
- checkpoint: the files and bytes of a checkpoint of Llama 3 8B.

Measures each row once, in a process of its own. Its peak memory includes the imports.
"""

import collections
import contextlib
import functools
import io
import math
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import jax
import numpy as np
from hydra import compose, initialize_config_dir
from jax.sharding import NamedSharding
from omegaconf import OmegaConf

import train
from checks import preflight
from configs.sizes import dimensions
from data.flat_tokens import FlatTokens, Writer
from data.loader import random_batch
from data.sources import open_batches
from runtime import checkpoint, chips
from runtime.config import ROOT, load
from runtime.devices import make_mesh, simulate_cpu_devices
from runtime.schedule import hyper_at
from shardlib.mesh import abstract_mesh, show_axes
from shardlib.types import computing_in, make_partition_specs, make_shardings, named
from tools import arguments, plan
from tools.audit.step import audit_step
from tools.tables import show, table

SMALL, LLAMA = ("local_test_synthetic", "training.tokens.batch=8"), ("pretrain", "model=llama3_8b")
Row = dict[str, str]


def config_of(name: str, *overrides: str, schema: Any = train.Config) -> Any:
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        given = [f"++{x}" if "." in x.partition("=")[0] else x for x in overrides]
        composed = compose(name, ["paths.model_name=growth", *given])
    return load(schema, OmegaConf.to_container(composed, resolve=True))


def timed(work: Callable[[], Any]) -> str:
    begin = time.perf_counter()
    work()
    return show(time.perf_counter() - begin, "s")


def step(*overrides: str) -> Row:
    config = config_of(*SMALL, *overrides)
    axes = config.mesh.axes
    row = {
        "step": " ".join(overrides),
        "trace": timed(lambda: preflight.trace_step(train, config, abstract_mesh(axes))),
        "types": timed(lambda: preflight.check_types(train, config)),
        "audit": timed(lambda: audit_step(config, None, chips.CHIPS["h100"])),
    }

    def first_step() -> None:
        with jax.set_mesh(make_mesh(axes)), computing_in(config.dtype):
            batch = random_batch(dimensions(config), config.model.start_token, config.mesh.c)
            batch = jax.device_put(batch, make_shardings(type(batch)))
            given = train.init_state(config), batch, hyper_at(0, config.training)
            jax.block_until_ready(train.training_step(*given, config))

    simulate_cpu_devices(8)
    return row | {"first step": timed(first_step) if math.prod(axes.values()) == 8 else "-"}


def planned(count: str) -> Row:
    config = config_of(*LLAMA, "training.tokens.batch=4096", schema=plan.PlanConfig)
    chip, found = chips.CHIPS["h100"], list[Any]()
    with contextlib.redirect_stderr(io.StringIO()):
        took = timed(lambda: found.extend(plan.plans(config, chip, int(count))))
    tried = [*plan.meshes(chip, int(count))]
    return {"chips": count, "meshes": str(len(tried)), "fit": str(len(found[0])), "plan": took}


def data(tokens: str, hosts: str, streams: str) -> Row:
    read = 0

    def ones(_: Any, start: int, stop: int) -> np.ndarray:
        nonlocal read
        read += stop - start
        return np.full(stop - start, 2, np.uint32)

    one_device = make_mesh({"r": 1, "s": 1, "c": 1, "t": 1})
    with tempfile.TemporaryDirectory() as folder, jax.set_mesh(one_device):
        path, count = f"{folder}/tokens.zarr", int(float(tokens))
        with Writer(path, "train") as writer:
            writer.append([1])
        writer.tokens.resize((count,))
        writer.starts.resize((count // 1000 + 1,))
        writer.starts[-1] = count
        given = f"flat_tokens.filespec={path}", f"flat_tokens.streams={streams}"
        config = config_of(*LLAMA, *given, "mesh={d: 1, t: 1}", "training.validation_interval=0")
        opened: Any = []
        row = {"tokens": tokens, "hosts": hosts, "streams": streams}
        row["opening"] = timed(lambda: opened.append(open_batches(config, dimensions(config))[0]))
        (batches,) = opened
        batches.local_rows = batches.local_rows[: len(batches.local_rows) // int(hosts)]
        middle = batches.count // config.training.tokens.batch // 2
        with mock.patch.object(FlatTokens, "read_encoded", ones):
            for name, number in ("first batch", 0), ("resume", middle):
                row[name] = timed(functools.partial(next, batches._rows(iter([number]))))
            read = 0
            collections.deque(batches._rows(iter(range(1000))), maxlen=0)
        return row | {"read for 1,000 batches": show(read, "tokens")}


def saved(hosts: str) -> Row:
    devices = 8 * int(hosts)
    given = f"mesh={{d: {devices}, r: {hosts}}}", f"training.tokens.batch={8 * devices}"
    config = config_of(*LLAMA, *given)
    files, total = 0, 0
    with jax.sharding.use_abstract_mesh(mesh := abstract_mesh(config.mesh.axes)):
        kinds, sizes = train.state_type(config), dimensions(config)
        where = named(make_partition_specs(kinds))
        for name, array in checkpoint.describe(kinds, sizes).items():
            shape = tuple(array["shape"])
            part = NamedSharding(mesh, where[name]).shard_shape(shape)
            grid = checkpoint.in_chunks(array, part)["chunk_grid"]["configuration"]
            counts = (-(-n // k) for n, k in zip(shape, grid["chunk_shape"], strict=True))
            files += 1 + math.prod(counts)
            total += math.prod(shape) * np.dtype(array["data_type"]).itemsize
    axes = show_axes(config.mesh.axes)
    each = show(total / files)
    return {"hosts": hosts, "mesh": axes, "files": str(files), "bytes": show(total), "each": each}


EXPERTS = "model.d_ff=0 model.experts.d_ff=64 model.experts.per_token=2"
STEPS = [
    *(f"model.layers={n}" for n in (8, 32, 128)),
    *(f"model.d_model=8192 mesh.d={n} training.tokens.batch={n}" for n in (512, 4096)),
    *(f"{EXPERTS} model.experts.count={n}" for n in (8, 64, 256)),
]
ROWS: dict[str, tuple[Callable[..., Row], list[str]]] = {
    "step": (step, STEPS),
    "plan": (planned, ["8", "512", "4096"]),
    "data": (data, ["1e7 1 1", "1e10 1 1", "1e12 1 1", "1e12 64 1", "1e12 64 64"]),
    "checkpoint": (saved, ["1", "8", "64", "512"]),
}


def row(function: Callable[..., Row], given: str) -> Row:
    made = function(*given.split())
    return made | {"memory": show(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)}


def rows(names: list[str]) -> Iterator[str]:
    """Yields a table for each name."""
    spawn = multiprocessing.get_context("spawn")
    for name in names or ROWS:
        function, inputs = ROWS[name]
        with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as one:
            made = [*one.map(row, [function] * len(inputs), inputs)]
        yield table(tuple(made[0]), (tuple(each.values()) for each in made))


if __name__ == "__main__":
    parser = arguments.parser("benchmarks.growth", __doc__)
    parser.add_argument("table", nargs="*", choices=[*ROWS, []])
    for each in rows(parser.parse_args().table):
        print(f"\n{each}", flush=True)
