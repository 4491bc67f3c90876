"""Experts, in place of a layer's feed-forward or beside it. Each token takes a few of them.

train.py calls `mixture` in a layer, `costs` in the loss and `rebalanced` after the update.
Dimensions, beside train.py's:

    E  experts    G  an expert's F    k  experts of a token    N  a row's parts over c, of S tokens
"""

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels import dropless
from runtime.config import Section
from runtime.initial import bias, into_residual, matrix
from runtime.values import F32, PositiveInt, one_of
from shardlib import ops
from shardlib.activations import save_for_backward
from shardlib.types import Stacked, compute, f32, pytree_dataclass, typechecked


@dataclasses.dataclass(unsafe_hash=True)
class ExpertsConfig(Section, key="model.experts"):
    count: PositiveInt
    per_token: PositiveInt
    d_ff: PositiveInt
    score: Annotated[str, one_of("softmax sigmoid")] = "softmax"
    renormalize: bool = True
    bias: bool = True

    def __post_init__(self) -> None:
        problem = f"there are only {self.count} experts"
        self.require(self.per_token <= self.count, "per_token", problem)
        problem = "with per_token=1 each score would be 1, and the router would learn nothing"
        self.require(self.per_token > 1 or not self.renormalize, "renormalize", problem)


@dataclasses.dataclass(unsafe_hash=True)
class RoutingConfig(Section, key="training.routing"):
    """Settings of experts that only training needs."""

    bias_rate: F32
    balance_cost: F32
    z_cost: F32


def note(config: Any) -> str:
    """Returns a note if nothing evens the loads of a config's experts, else ""."""
    each, routing = config.model.experts, config.training.routing
    if not each or (each.bias and routing.bias_rate) or routing.balance_cost:
        return ""
    bias = "training.routing.bias_rate above 0" if each.bias else "model.experts.bias=true"
    cure = f"set {bias} or training.routing.balance_cost above 0"
    return f"note: nothing evens the loads of experts: {cure}"


# A bias that only `rebalanced` changes: it has no gradient.
balancing = dataclasses.replace(bias, learned=False)


@pytree_dataclass
class Experts:
    w_router: compute["M/t/c/s E", matrix("M")]
    b_router: f32["E", balancing] | None
    e_gate: compute["E/t M/c/s G", matrix("M")]
    e_up: compute["E/t M/c/s G", matrix("M")]
    e_down: compute["E/t M/c/s G", into_residual("G")]


@pytree_dataclass
class Routing:
    """Sums over the tokens of a device's part of each row. Sums over parts and rows come later, in
    `costs`: they are unreduced at first, and a scan can't stack unreduced values."""

    load: f32["B/d N/c E"]  # tokens that chose an expert
    likely: f32["B/d N/c E"]  # experts' scores, normalized to add up to one
    z: f32["B/d N/c"]  # squares of the logarithms of the softmax's denominators


@typechecked
def mixture(
    h: compute["B/d L/c M"],
    w: Experts,
    shared: compute["B/d L/c M {U:t}"] | None,
    config: ExpertsConfig,
) -> tuple[compute["B/d L/c M {U:t}"], Routing]:
    """Sends each token to the experts with the highest scores, and sums their outputs, weighted by
    the scores: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538. Devices along t have
    different experts, whole, and the same tokens. So each picks the tokens of its experts without
    sending any: only logits and outputs are summed over t. Adds `shared`, the output of an
    expert that all tokens take, if there is one.

    A bias affects the choice, but not the weights of the sum: Wang et al. 2024,
    https://arxiv.org/abs/2408.15664."""

    def normalized(scores: jax.Array) -> jax.Array:
        return scores / (scores.sum(-1, keepdims=True) + 1e-15)  # all may round to 0

    w_router = ops.all_gather("M/t/c/s E -> M/t E", w.w_router)
    part = ops.split("B/d L/c M -> B/d L/c M/t", h)
    logits = ops.einsum_unreduced(
        "B/d L/c M/t, M/t E -> B/d L/c E {U:t}", part, w_router, dtype=f32
    )
    # Near a tie, rounding could change the choice. So the logits are equal along t by their type,
    # and logits and choice are saved, not recomputed.
    logits = save_for_backward(ops.psum("B/d L/c E {U:t} -> B/d L/c E", logits))
    scores = jax.nn.sigmoid(logits) if config.score == "sigmoid" else jax.nn.softmax(logits)
    biased = lax.stop_gradient(scores if w.b_router is None else scores + w.b_router)
    chosen = save_for_backward(lax.top_k(biased, config.per_token)[1])
    score = jnp.take_along_axis(scores, chosen, axis=-1)
    if config.renormalize:
        score = normalized(score)
    score = ops.broadcast("B/d L/c k -> B/d L/c k", score)

    w_gate = ops.all_gather("E/t M/c/s G -> E/t M G", w.e_gate)
    w_up = ops.all_gather("E/t M/c/s G -> E/t M G", w.e_up)
    w_down = ops.all_gather("E/t M/c/s G -> E/t M G", w.e_down)
    y = dropless.experts(
        "B/d L/c M, B/d L/c k, B/d L/c k, E/t M G, E/t M G, E/t M G -> B/d L/c M {U:t}",
        h, chosen, score, w_gate, w_up, w_down,
    )  # fmt: skip
    load = jax.nn.one_hot(chosen, config.count, dtype=f32.dtype)
    z = jnp.square(jax.nn.logsumexp(logits, -1))
    return y if shared is None else shared + y, Routing(
        load=ops.reduce_sum("B/d N/c S k E -> B/d N/c E", load[:, None]),
        likely=ops.reduce_sum("B/d N/c S E -> B/d N/c E", normalized(scores)[:, None]),
        z=ops.reduce_sum("B/d N/c S -> B/d N/c", z[:, None]),
    )


@typechecked
def costs(
    routed: Stacked["layers", Routing], count: f32[""], training: Any
) -> tuple[f32[""], dict[str, f32[""] | f32["layers E"]]]:
    """Returns the weighted costs of all layers' routing, and sums over all tokens for `rebalanced`.
    Costs are means over all tokens, targets or not, times `count`, the number of targets, by which
    the caller divides."""

    def whole(kept: str, x: jax.Array) -> jax.Array:
        x = ops.reduce_sum(f"layers B/d N/c {kept} -> layers {kept} {{U:d,c}}", x)
        return ops.psum(f"layers {kept} {{U:d,c}} -> layers {kept}", x)

    # Zoph et al. 2022, https://arxiv.org/abs/2202.08906, equation 5, added up over layers.
    tokens, routing = training.tokens, training.routing
    z_cost = whole("", routed.z).sum() * count / tokens.batch / tokens.len
    load, likely = whole("E", routed.load), whole("E", routed.likely)
    balance = balance_cost(load, likely) * count
    cost = routing.balance_cost * balance + routing.z_cost * z_cost
    return cost, {"z_cost": z_cost, "load": load, "likely": likely}


@typechecked
def balance_cost(load: f32["layers E"], likely: f32["layers E"]) -> f32[""]:
    """The sum over layers of a cost that is 1 for even loads: Fedus et al. 2021,
    https://arxiv.org/abs/2101.03961, equation 4."""
    load, likely = (x / x.mean(-1, keepdims=True) for x in (load, likely))
    return jnp.sum(jnp.mean(load * likely, axis=-1))


@typechecked
def rebalanced(
    weights: Any, before: Any, sums: dict[str, f32[""] | f32["layers E"]], rate: f32[""]
) -> tuple[Any, dict[str, f32[""] | f32["layers E"]]]:
    """Moves the biases, which no gradient changes, from their values `before` the update towards
    even loads. Returns the weights with new biases, and metrics: loads as multiples of an even one,
    and the cost of uneven loads."""
    load, old = sums["load"], before.layers.experts
    if old.b_router is not None:
        # In whole numbers, so that an even load gives exactly 0.
        lacking = load.sum(-1, keepdims=True) - load.shape[-1] * load
        bias = old.b_router + rate * jnp.sign(lacking)
        new = dataclasses.replace(weights.layers.experts, b_router=bias)
        layers = dataclasses.replace(weights.layers, experts=new)
        weights = dataclasses.replace(weights, layers=layers)
    return weights, {
        "load": load / load.mean(-1, keepdims=True),
        "balance_cost": balance_cost(load, sums["likely"]),
    }
