"""Predicts the peak memory of a training step as a sum of terms that can be checked by hand.

The peak is in the backward pass. Memory then holds:

    weights                     as they are stored, in f32
    moments                     of the optimizer
    batch                       and the hyperparameters of the update
    weights of the replica      gathered over r, in the compute dtype, if that makes a copy
    gradients                   of the same size; with microbatches also their sums, in f32
    saved for the backward pass as the ledger lists it, with the unembedding's gradient
    gathered weights            a layer's, whole along s and c, and their gradients before these are
                                summed over s and c
    arrays of a layer           the most of: three of the largest size in its backward pass
                                (SwiGLU's result, and its two factors' gradients); two of that size
                                and all results that matmuls and loops recompute (the result may
                                overwrite a factor); on TPUs, for each choice of an expert, two
                                inputs and SwiGLU's factors and gradients
    mask of documents           on GPUs, where attention runs a kernel: queries by keys, in bf16

If the loss needs more than a layer, these replace its arrays and gathered weights:

    gathered weights            the unembedding
    logits of a chunk           in f32, and on GPUs also their gradient in the compute dtype, which
                                matmuls of the backward pass read. On TPUs these matmuls compute
                                it from the logits. A gradient in f32 overwrites the logits

A step with few tokens for the size of its weights may have its peak in the update, which has no
terms here. Compilers may need less, as they overwrite other arrays, too, and TPUs keep small ones
elsewhere. They may need more, for copies, padding, and more arrays of a layer at once.
tests/test_tpu.py and tests/test_gpu_compile.py measure the errors.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

import train
from checks.jaxprs import equations
from kernels.attention import KERNEL
from runtime.hlo import phase
from shardlib.mesh import abstract_mesh
from shardlib.types import compute, computing_in, f32, make_shapes, type_tree
from tools.audit.ledger import PRODUCTS, Ledger, nbytes

ARGUMENTS = "weights", "moments", "batch"
SAVED, ARRAYS, LOGITS = "saved for the backward pass", "arrays of a layer", "logits of a chunk"
MASK = "mask of documents"


def held(config: train.Config, jaxpr: Any, costs: Ledger, kind: str = "") -> dict[str, int]:
    """Returns the bytes, by term, that a device of this kind holds at the peak of a training
    step with this jaxpr and ledger."""
    axes, sizes, training = config.mesh.axes, train.dimensions(config), config.training
    parts, state = training.microbatches, train.state_type(config)
    whole = axes | {"s": 1, "c": 1}  # axes of gathered weights
    kinds = train.weights_type(config.model)

    def bytes_of(hint: Any, axes: dict[str, int]) -> int:
        """Returns the bytes that each device holds of arrays typed by `hint`."""
        kinds, shapes = jax.tree.leaves(type_tree(hint)), jax.tree.leaves(make_shapes(hint, sizes))
        devices = [math.prod(axes[axis] for axis in kind.spec.axes) for kind in kinds]
        return sum(nbytes(x) // count for x, count in zip(shapes, devices, strict=True))

    with jax.sharding.use_abstract_mesh(abstract_mesh(axes)), computing_in(config.dtype):
        weights = bytes_of(state.weights, axes)
        moments = bytes_of(dataclasses.replace(state, step=None, weights=None), axes)
        gradient_sums = bytes_of(state.weights, axes | {"r": 1}) if parts > 1 else 0
        replica, layers = bytes_of(kinds, axes), bytes_of(kinds.layers, whole)
        unembedding, logits = bytes_of(kinds.embed, whole), bytes_of(f32["B/d L/c V/t"], axes)
        if "TPU" not in kind and config.dtype != "f32":
            logits += bytes_of(compute["B/d L/c V/t"], axes)  # their gradient
        mask = 0
        if "TPU" not in kind and any(row.in_kernel for row in costs.products):
            mask = bytes_of(compute["B/d L/c L"], axes) // parts
        in_groups = 0
        if "TPU" in kind and (experts := config.model.experts):
            inputs, factors = (bytes_of(compute[f"B/d L/c {dim}"], axes) for dim in "MG")
            in_groups = experts.per_token * (2 * inputs + 4 * factors) // parts

    results = list(_results(jaxpr, sizes["layers"] * parts))
    largest = max(size for _, size in results)
    recomputed = sum(size for when, size in results if when == "recomputed")
    arrays = max(3 * largest, 2 * largest + recomputed, in_groups)
    in_layer = {"gathered weights": 2 * layers // sizes["layers"], ARRAYS: arrays}
    in_loss = {"gathered weights": unembedding, LOGITS: logits // parts // training.loss_chunks}
    return {
        "weights": weights,
        "moments": moments,
        "batch": arguments(jaxpr) - weights - moments,
        "weights of the replica": replica if axes["r"] > 1 or config.dtype != "f32" else 0,
        "gradients": replica + gradient_sums,
        SAVED: sum(row.bytes for row in costs.saved if row.memory == "device"),
        **max(in_layer, in_loss, key=lambda terms: sum(terms.values())),
        **({MASK: mask} if mask else {}),
    }


def arguments(jaxpr: Any) -> int:
    """Returns the bytes per device of the arguments that a function under `typed_shard_map` uses,
    given its jaxpr by `layout.traced`."""
    (outer,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map")
    return sum(nbytes(var.aval) for var in next(jaxprs_in_params(outer.params)).invars)


def _results(jaxpr: Any, layers: int) -> Iterator[tuple[str, int]]:
    """Yields the phase and the bytes of each result of a matmul or loop in the layers' backward
    pass, whose equations run at least `layers` times."""
    for eqn, path, _, runs, _ in equations(jaxpr):
        in_layer = path.lstrip("/").startswith("transpose(") and runs.times >= layers
        written = eqn.primitive.name in (*PRODUCTS, "scan") and KERNEL not in path
        if in_layer and written:
            yield from ((phase(path), nbytes(var.aval)) for var in eqn.outvars)
