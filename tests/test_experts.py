"""Tests the mixture of experts against an oracle that goes token by token, on every mesh."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import train
from checks import preflight
from shardlib.types import make_shardings
from tests import helpers, oracle
from tests.helpers import mesh, plain, slow_but_for, small_config, token_batch
from tests.test_train import assert_agree, expected, loss_and_grads, random_rows
from variants import experts

ONLY = "model.d_ff=0"  # no expert that all tokens take


def settings(costs=True, **options):
    options = {"count": 8, "per_token": 2, "d_ff": 24} | options
    values = ", ".join(f"{key}: {value}" for key, value in options.items())
    costs = ["training.routing.balance_cost=0.5", "training.routing.z_cost=0.1"] * costs
    return [f"model.experts={{{values}}}", *costs]


VARIANTS = {
    "softmax": [ONLY, *settings()],
    "shared expert": settings(bias="false"),
    "not renormalized": [ONLY, *settings(costs=False, renormalize="false")],
    "sigmoid": [ONLY, *settings(score="sigmoid")],
}


@pytest.mark.parametrize("name", ["shared expert", "not renormalized"])
def test_types_hold(name):
    settings = [*VARIANTS[name], "mesh={d: 4, t: 2, r: 2, c: 2}", "training.tokens.len=24"]
    preflight.check_types(train, small_config(*settings))


NOTED = [({}, False), ({"costs": False}, False), ({"bias": "false"}, False)]
NOTED += [({"bias": "false", "costs": False}, True)]


@pytest.mark.parametrize("options, noted", NOTED)
def test_loads_that_nothing_evens_are_noted(options, noted):
    assert bool(experts.note(small_config(*settings(**options)))) == noted


def step(in_f32, targets, is_start, *options):
    """The config, weights before a step and after it, and its metrics. Starts from biases that have
    moved."""
    config = small_config(*settings(costs=False), "training.routing.bias_rate=0.01", *options)
    with jax.set_mesh(mesh(2, 4)):
        state = in_f32.init_state(config)
        state = dataclasses.replace(state, weights=helpers.random_weights(in_f32, config))
        before = plain(jax.device_get(state.weights))
        batch = token_batch(in_f32.TokenBatch, targets, is_start)
        batch = jax.device_put(batch, make_shardings(in_f32.TokenBatch))
        state, metrics = jax.device_get(helpers.take_step(in_f32, state, batch, config))
        return config, before, plain(state.weights), metrics


@pytest.mark.slow
def test_a_step_moves_the_bias(in_f32):
    """Microbatches change no metric."""
    targets, is_start = random_rows()
    config, before, after, metrics = step(in_f32, targets, is_start)
    *_, parts = step(in_f32, targets, is_start, "training.microbatches=2")
    assert metrics["balance_cost"] > 1
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5), parts, metrics)
    chosen = config.model.experts, config.training.routing
    _, (_, loads, _) = oracle.objective(before, targets, is_start, 100, experts=chosen)
    even = loads.sum(-1, keepdims=True) / 8
    np.testing.assert_allclose(metrics["load"], loads / even, rtol=1e-6)
    moved = after["layers"]["b_router"] - before["layers"]["b_router"]
    assert len({*np.sign(even - loads).ravel().tolist()}) >= 2
    np.testing.assert_allclose(moved, 0.01 * np.sign(even - loads), atol=1e-7)


def test_scores_that_round_to_zero_leave_all_finite(in_f32):
    def extreme(weights):
        old = weights.layers.experts
        bias = 1e3 * jax.random.normal(jax.random.key(3), old.b_router.shape)
        new = dataclasses.replace(old, w_router=1e4 * old.w_router, b_router=bias)
        return dataclasses.replace(weights, layers=dataclasses.replace(weights.layers, experts=new))

    config = small_config(*VARIANTS["sigmoid"])
    made = loss_and_grads(in_f32, config, *random_rows(), mesh(1, 1), extreme)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(made))


LAYOUTS = [("softmax", (2, 4)), ("softmax", (4, 2, 2)), ("not renormalized", (2, 2, 1, 2))]
LAYOUTS += [("shared expert", (4, 2)), ("sigmoid", (8, 1))]  # d, t, r, c


@pytest.mark.parametrize("layout", slow_but_for([("softmax", (2, 4))], LAYOUTS), ids=str)
def test_loss_and_gradients_agree_with_the_oracle_on_every_mesh(in_f32, layout):
    name, axes = layout
    config = small_config(*VARIANTS[name])
    actual = loss_and_grads(in_f32, config, *random_rows(), mesh(*axes))
    assert_agree(actual, expected(12, *VARIANTS[name]), tolerance=2e-5)
