"""Traces the examples in the ops' docstrings, at sizes that tell all dimensions apart."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from checks.layout import probe_mesh
from shardlib import ops, types
from shardlib.types import f32, i32

DOCS = [ops.__doc__, *(str(each.__doc__) for each in vars(ops).values())]
EXAMPLES = re.findall(
    r'^ {4,8}(?:\w+ = )?(ops\.(\w+)\("(.*?)", (.*?)\))(?:  .*)?$',
    "\n".join(DOCS),
    re.MULTILINE,
)
DIMENSIONS = "BLMFVQKDNPZ"


def test_there_are_examples_of_each_op():
    named = {op for _, op, _, _ in EXAMPLES}
    assert named >= {"all_gather", "psum_scatter", "psum", "reduce_sum", "reduce_max"}
    assert named >= {"einsum_unreduced", "index_unreduced"}


@pytest.mark.parametrize("call, op, text, rest", EXAMPLES)
def test_an_example(call, op, text, rest):
    *operands, _ = types.parse_signature(text)
    names = [name for name in re.findall(r"\w+", rest) if name not in ("lax", "stop_gradient")]
    kinds, sums = [], []
    for name, spec in zip(names, operands, strict=False):
        kind = i32 if name in ("ids", "targets", "document") else f32
        dims = " ".join(str(dim) for dim in spec.dims).replace("[", "").replace("]", "")
        if spec.unreduced:  # a sum over a split dimension owes it
            dims = f"Z/{spec.unreduced[0]} {dims}"
        sums.append(f"{dims} -> {spec}" if spec.unreduced else "")
        kinds.append(kind[dims])

    @types.typed_shard_map
    def example(arrays: tuple[*kinds]) -> f32[""]:
        pairs = zip(sums, arrays, strict=True)
        operands = [ops.reduce_sum(owed, x) if owed else x for owed, x in pairs]
        scope = dict(zip(names, operands, strict=False))
        eval(call, {"ops": ops, "lax": lax, "f32": f32} | scope)  # the op checks its own result
        return jnp.float32(0)

    mesh, sizes = probe_mesh("dt", DIMENSIONS)
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(jax.jit(example), types.make_shapes(tuple[*kinds], sizes))
