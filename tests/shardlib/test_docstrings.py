"""Traces the examples in the ops' docstrings, at sizes that tell all dimensions apart."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from checks.layout import probe_mesh
from shardlib import ops, types
from shardlib.types import f32, i32, typed_shard_map

DOCS = [ops.__doc__, *(str(each.__doc__) for each in vars(ops).values())]
EXAMPLES = re.findall(
    r'^ {4,8}(?:\w+ = )?(ops\.(\w+)\("(.*?)", (.*?)\))(?:  .*)?$',
    "\n".join(DOCS),
    re.MULTILINE,
)
DIMENSIONS = ["B", "L", "M", "F", "V", "Q", "K", "D", "N", "P", "Z"]


def test_there_are_examples_of_each_op():
    named = {op for _, op, _, _ in EXAMPLES}
    assert named >= {"all_gather", "psum_scatter", "psum", "reduce_sum", "reduce_max"}
    assert named >= {"einsum_unreduced", "index_unreduced"}


@pytest.mark.parametrize("call, op, text, rest", EXAMPLES)
def test_an_example(call, op, text, rest):
    operands, _ = types.parse_signature(text)
    names = [name for name in re.findall(r"\w+", rest) if name not in ("lax", "stop_gradient")]
    given, body = [], []
    for name, spec in zip(names, operands, strict=False):
        kind = "i32" if name in ("ids", "targets", "document") else "f32"
        dims = " ".join(str(dim) for dim in spec.dims).replace("[", "").replace("]", "")
        if spec.unreduced:  # a sum over a split dimension owes it
            (axis,) = spec.unreduced
            given.append((name, kind, f"Z/{axis} {dims}"))
            body.append(f'{name} = ops.reduce_sum("Z/{axis} {dims} -> {spec}", {name})')
        else:
            given.append((name, kind, dims))
    taken = ", ".join(f'{name}: {kind}["{dims}"]' for name, kind, dims in given)
    # The op checks its own result.
    lines = [f'def example({taken}) -> f32[""]:', *body, call, "return jnp.float32(0)"]
    source = "\n    ".join(lines)
    scope = {"ops": ops, "lax": lax, "f32": f32, "i32": i32, "jnp": jnp}
    exec(source, scope)
    mesh, sizes = probe_mesh(["d", "t"], DIMENSIONS)
    structs = []
    for _, kind, dims in given:
        shape = [sizes[dim.name] for dim in types.parse_spec(dims).dims]
        structs.append(jax.ShapeDtypeStruct(shape, scope[kind].dtype))
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(jax.jit(typed_shard_map(scope["example"])), *structs)
