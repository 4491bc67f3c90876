"""Compares train.py's step, sharded over simulated devices, with plain jnp on one device.

    python -m tests.twin

The twin is local_test_synthetic's model and loss for one device, in bf16 with f32 weights, and
optax's AdamW. It shares no code with train.py. The steps run in turns. Prints the median time of
each, and its ratio to the twin's.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import optax

import train
from data.loader import TokenBatch
from data.sources import open_batches
from runtime.devices import make_mesh, simulate_cpu_devices
from runtime.run import compile_step
from runtime.schedule import hyper_at
from shardlib.types import make_shardings
from tests.helpers import compose_config, starts_of

NAMES = "local_test_synthetic", "paths.model_name=none"
CONFIG = compose_config(*NAMES)
ROUNDS = 15


def normalize(x, gain):
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    return (wide * gain).astype(x.dtype)


def rotate(x):
    half = x.shape[-1] // 2
    turns = CONFIG.model.rope_max_timescale ** -(jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None] * turns
    sin, cos = (f(angle).reshape(-1, *[1] * (x.ndim - 3), half) for f in (jnp.sin, jnp.cos))
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def loss(weights, inputs, targets, is_start):
    w = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights)
    document = jnp.cumsum(is_start, 1)
    sees = (document[:, :, None] == document[:, None]) & jnp.tri(targets.shape[1], dtype=bool)

    def layer(x, w):
        h = normalize(x, w.attention_norm)
        q = rotate(jnp.einsum("blm,mqkd->blqkd", h, w.w_q))
        k, v = rotate(jnp.einsum("blm,mkd->blkd", h, w.w_k)), jnp.einsum("blm,mkd->blkd", h, w.w_v)
        scores = jnp.einsum("blqkd,bskd->bqkls", q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(sees[:, None, None], scores * q.shape[-1] ** -0.5, -1e30)
        mixed = jnp.einsum("bqkls,bskd->blqkd", jax.nn.softmax(scores).astype(q.dtype), v)
        x = x + jnp.einsum("blqkd,mqkd->blm", mixed, w.w_o)
        h = normalize(x, w.mlp_norm)
        return x + (jax.nn.silu(h @ w.w_gate) * (h @ w.w_up)) @ w.w_down.T, None

    x, _ = jax.lax.scan(layer, w.embed[inputs], w.layers)
    h = normalize(x, w.final_norm)
    logits = jnp.einsum("blm,vm->blv", h, w.unembed, preferred_element_type=jnp.float32)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets.astype(jnp.int32))
    return jnp.sum(nats * (targets != 0)) / jnp.sum(targets != 0)


def twin(weights, batch):
    """Returns a function that takes no arguments, runs a step and returns its loss."""
    hyper, is_start = CONFIG.training, starts_of(batch)
    rates = hyper.learning_rate, hyper.adam_b1, hyper.adam_b2, hyper.adam_eps
    adamw = optax.adamw(*rates, weight_decay=hyper.weight_decay)
    optimizer = optax.chain(optax.clip_by_global_norm(hyper.grad_clip), adamw)

    @jax.jit
    def step(weights, moments):
        value, grads = jax.value_and_grad(loss)(weights, batch.inputs, batch.targets, is_start)
        updates, moments = optimizer.update(grads, moments, weights)
        return optax.apply_updates(weights, updates), moments, value

    state = [weights, optimizer.init(weights)]

    def once():
        *state[:], value = step(*state)
        return value

    return once


def train_step(mesh, host_batch):
    """Returns a function like `twin`'s for train.py's step on a mesh, and its initial weights and
    batch on the host."""
    config = compose_config(*NAMES, f"mesh={mesh}")
    with jax.set_mesh(make_mesh(config.mesh.axes)):
        if host_batch is None:
            loader, _ = open_batches(config, train.dimensions(config))
            ((_, batch),) = loader.from_step(0, 1)
            host_batch = jax.device_get(batch)
        batch = jax.device_put(host_batch, make_shardings(TokenBatch))
        state = [train.init_state(config)]
        weights = jax.device_get(state[0].weights)
        step = compile_step(config, train.lower_step(config))

    def once():
        state[0], metrics = step(state[0], batch, hyper_at(0, config.training))
        return metrics["loss"]

    return once, weights, host_batch


def main():
    simulate_cpu_devices(8)
    sharded, weights, batch = train_step("{d: 4, t: 2}", None)
    alone, _, _ = train_step("{d: 1, t: 1}", batch)
    steps = {"twin": twin(jax.device_put(weights), jax.device_put(batch)), "1 x 1": alone,
             "4 x 2": sharded}  # fmt: skip
    seconds = {name: [] for name in steps}
    first = {name: float(step()) for name, step in steps.items()}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            start = time.perf_counter()
            step().block_until_ready()
            seconds[name].append(time.perf_counter() - start)
    tokens = CONFIG.training.tokens.batch * CONFIG.training.tokens.len
    base = statistics.median(seconds["twin"])
    for name, times in seconds.items():
        median = statistics.median(times)
        print(
            f"{name:6} first loss {first[name]:.4f}  {median:.4f} s per step  "
            f"{tokens / median:6,.0f} tokens/s  {median / base:.2f} x the twin's time"
        )


if __name__ == "__main__":
    main()
