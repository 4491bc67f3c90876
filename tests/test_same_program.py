"""Checks the audit's collectives, read off the jaxpr, against those of the compiled program."""

import functools

import jax
import pytest

import train
from checks import layout
from data.loader import TokenBatch
from runtime import devices
from shardlib import ops
from shardlib.mesh import abstract_mesh
from shardlib.types import Stacked, f32, i32, make_shapes, type_tree, typed_shard_map, u32
from tests import compiled, helpers
from tests.helpers import compose_config, placed_shapes, slow_but_for, small_config
from tools.audit import memory
from tools.audit.ledger import ledger
from tools.generate import steps
from variants.cache import Cache

pytestmark = pytest.mark.usefixtures("own_metadata")

MUON = ["training.optimizer=muon", "model.layers=3", "mesh={d: 4, r: 2, t: 1, c: 2}"]
EXPERTS = "model.experts={count: 8, per_token: 2, d_ff: 24}"
NAMES = ["paths.model_name=x", "flat_tokens.filespec=x"]


def in_parts(microbatches, chunks, **mesh):
    parts = f"training={{microbatches: {microbatches}, loss_chunks: {chunks}}}"
    axes = ", ".join(f"{axis}: {size}" for axis, size in mesh.items())
    return small_config(f"mesh={{{axes}}}", parts)


def training(config):
    return train.training_step, train.step_arguments(config), {}, config


def validation(config):
    hint = train.state_type(config).weights, type_tree(TokenBatch)
    return train.validation_step, hint, {}, config


def generation(config, rows, tokens):
    """A step that computes some tokens of each row at a time."""
    cache = type_tree(Stacked["layers", Cache])
    others = u32["B/d L/c"], i32[""], i32["B/d"], f32["B/d"]
    hint = train.weights_type(config.model), cache, *others
    how = steps.Sampling(1.0, None, 0.9, range(config.model.vocab))
    return steps.step, hint, {"B": rows, "L": tokens, "S": 24}, config, how


PROGRAMS = {
    "synthetic on 4 x 2": lambda: training(compose_config("local_test_synthetic", *NAMES)),
    "small on 8 x 1": lambda: training(small_config("mesh={d: 8, t: 1}")),
    "one layer on 4 x 2": lambda: training(small_config("model.layers=1")),
    "2 microbatches, 2 chunks on 2 x 4": lambda: training(in_parts(2, 2, d=2, t=4)),
    "4 microbatches, 2 chunks on 1 x 8": lambda: training(in_parts(4, 2, d=1, t=8)),
    "replicas, 2 microbatches": lambda: training(in_parts(2, 1, d=4, r=2, t=2)),
    "replicas and split rows": lambda: training(in_parts(1, 1, d=4, r=2, t=1, c=2)),
    "muon, replicas and split rows": lambda: training(small_config(*MUON)),
    "tied embeddings": lambda: training(small_config("model.tied_embeddings=true")),
    "experts and replicas": lambda: training(small_config(EXPERTS, "mesh={d: 4, r: 2, t: 2}")),
    "validation, 2 microbatches, 4 chunks on 4 x 2": lambda: validation(in_parts(2, 4, d=4, t=2)),
    "prefill on 2 x 4": lambda: generation(small_config("mesh={d: 2, t: 4}"), 4, 8),
    "decode on 2 x 4": lambda: generation(small_config("mesh={d: 2, t: 4}"), 4, 1),
}


@functools.cache
def program(described):
    """The ledger's transfers, the compiled program's collectives, and the arguments' bytes, as
    predicted and as compiled."""
    step, hint, sizes, config, *static = described()
    axes, sizes = config.mesh.axes, train.dimensions(config) | sizes
    with jax.set_mesh(devices.make_mesh(axes)):
        built = step.lower(*placed_shapes(hint, sizes), config, *static).compile()
    with jax.sharding.use_abstract_mesh(abstract_mesh(axes)):
        jaxpr = layout.traced(step, make_shapes(hint, sizes), config, *static)
    actual = compiled.collectives(built.as_text(), axes, "steps.py")
    sizes = memory.arguments(jaxpr), built.memory_analysis().argument_size_in_bytes
    return ledger(jaxpr, axes).transfers, actual, sizes


QUICK = ["one layer on 4 x 2", "decode on 2 x 4"]


@pytest.mark.parametrize("name", slow_but_for(QUICK, list(PROGRAMS)))
def test_each_collective_of_the_program_is_a_row_of_the_ledger_and_each_row_one(name):
    transfers, actual, (predicted, compiled_size) = program(PROGRAMS[name])
    assert predicted == compiled_size, "bytes of the arguments"
    files = *compiled.FILES, "steps.py"
    assert len(actual) > 5 and all(row.line.partition(":")[0] in files for row in actual)
    assert compiled.unexplained(transfers, actual) == ([], [])


def test_gathers_of_different_arrays_have_exact_counts():
    """Compilers merge only those of the same array."""

    @typed_shard_map
    def gathered(x: f32["N/s M"]) -> f32["N/s M"]:
        parts = [x, x[:, :1] * x, 2.0 * x, 3.0 * x, x]
        return sum(ops.all_gather("N/s M -> N M", part)[: len(x)] for part in parts)

    with jax.sharding.use_abstract_mesh(abstract_mesh(helpers.axes(4, 1))):
        jaxpr = layout.traced(gathered, [make_shapes(f32["N/s M"], {"N": 8, "M": 4})])
    rows = ledger(jaxpr, helpers.axes(4, 1)).transfers
    assert [row.at_least for row in rows] == [1, 1, 1, 1, 0]


@pytest.mark.slow
def test_only_what_is_the_same_in_each_microbatch_has_no_exact_count():
    """The three gathers outside of the layers. XLA moves each out of the loop."""
    transfers, actual, _ = program(PROGRAMS["2 microbatches, 2 chunks on 2 x 4"])
    marked = [row for row in transfers if row.at_least != row.times]
    facts = [(row.kind, row.phase, row.times, row.at_least) for row in marked]
    assert facts == [("all-gather", "forward", 2, 1)] * 3
    exact = [row._replace(at_least=row.times) for row in transfers]
    _, left = compiled.unexplained(exact, actual)
    assert {(c.line, c.times) for c in left} == {(row.line, 1) for row in marked}
