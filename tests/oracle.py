"""The model and its loss, unsharded, written from the papers. Attention masks are made token by
token, and RoPE is a complex multiplication. Shares no code with the project."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np


def layout(targets, is_start, preceding=0):
    """Returns for targets[B, L]: the token before each, which is 0 at the start of a document, and
    `preceding`[B] where a row begins within one; its position in the document's part of the row;
    and whether it attends to each token of the row."""
    preceding = np.broadcast_to(preceding, len(targets))
    before, position = np.zeros_like(targets), np.zeros(targets.shape, np.int32)
    sees = np.zeros((*targets.shape, targets.shape[1]), bool)
    for row, starts in enumerate(is_start):
        begin = 0
        for i, start in enumerate(starts):
            begin = i if start else begin
            before[row, i] = 0 if start else targets[row, i - 1] if i else preceding[row]
            position[row, i] = i - begin
            sees[row, i, begin : i + 1] = True
    return before, position, sees


def normalize(x, gain):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * gain


def rotate(x, position, max_timescale):
    """Rotates x[B, L, N, D] with (i, i + D/2) as real and imaginary part of a complex number."""
    half = x.shape[-1] // 2
    pairs = jax.lax.complex(x[..., :half], x[..., half:])
    angles = position[:, :, None] * max_timescale ** -(jnp.arange(half) / half)
    turned = pairs * jnp.exp(1j * angles)[:, :, None]
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def attend(x, layer, position, sees, max_timescale):
    """Attention of x[B, L, M], one query head per key-value head at a time. A layer may have biases
    and norms of queries and keys, over each head or over all."""
    _, n_q, _, d_head = layer["w_q"].shape
    keys = jnp.einsum("blm,mkd->blkd", x, layer["w_k"]) + layer.get("b_k", 0)
    values = jnp.einsum("blm,mkd->blkd", x, layer["w_v"]) + layer.get("b_v", 0)
    all_queries = jnp.einsum("blm,mqkd->blqkd", x, layer["w_q"]) + layer.get("b_q", 0)
    if "q_norm" in layer:
        keys = normalize(keys, layer["k_norm"])
        all_queries = normalize(all_queries, layer["q_norm"])
    if "all_q_norm" in layer:
        shapes, (b, length) = (keys.shape, all_queries.shape), x.shape[:2]
        keys = normalize(keys.reshape(b, length, -1), layer["all_k_norm"].ravel())
        all_queries = normalize(all_queries.reshape(b, length, -1), layer["all_q_norm"].ravel())
        keys, all_queries = keys.reshape(shapes[0]), all_queries.reshape(shapes[1])
    keys = rotate(keys, position, max_timescale)
    out = 0
    for q in range(n_q):
        queries = rotate(all_queries[:, :, q], position, max_timescale)
        scores = jnp.einsum("bikd,bjkd->kbij", queries, keys) / np.sqrt(d_head)
        scores = jnp.where(sees, scores, -1e30)
        probabilities = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
        probabilities = probabilities / probabilities.sum(axis=-1, keepdims=True)
        mixed = jnp.einsum("kbij,bjkd->bikd", probabilities, values)
        out += jnp.einsum("bikd,mkd->bim", mixed, layer["w_o"][:, q])
    return out


def swiglu(x, gate, up, down):
    gate, up = x @ gate, x @ up
    return (gate / (1 + jnp.exp(-gate)) * up) @ down.T


def mix(x, layer, experts):
    """Applies each expert to all tokens of x[B, L, M], and weights its outputs by their choices.
    Returns the sum, and (each expert's number of tokens, its summed probabilities, the sum of the
    squared logarithms of the softmax's denominators, the number of choices without a place). If
    training.routing limits places, an expert takes the first `capacity_factor` times an even share
    of a row's tokens, or of each `group` of them. Choices beyond that add nothing."""
    experts, routing = experts
    (_, length, _), count = x.shape, experts.per_token
    places = size = getattr(routing, "group", None) or length
    if factor := getattr(routing, "capacity_factor", None):
        places = math.ceil(factor * count * size / experts.count)
    powers = jnp.exp(x @ layer["w_router"])
    likely = scores = powers / powers.sum(-1, keepdims=True)
    if experts.score == "sigmoid":
        scores = powers / (1 + powers)
        likely = scores / scores.sum(-1, keepdims=True)
    chosen = jnp.argsort(-scores - layer.get("b_router", 0), axis=-1)[..., :count]
    hits = chosen[..., None] == jnp.arange(experts.count)  # [B, L, k, E]
    kept = []
    for i in range(length):
        if i % size == 0:
            taken = jnp.zeros_like(hits[:, 0, 0], int)
        for j in range(count):
            kept.append(jnp.sum(taken * hits[:, i, j], -1) < places)
            taken = taken + hits[:, i, j]
    kept = jnp.stack(kept, 1).reshape(chosen.shape)
    weights = scores[:, :, None] * hits
    if experts.renormalize:
        weights = weights / weights.sum((-2, -1), keepdims=True)
    added = 0
    for e in range(experts.count):
        done = swiglu(x, *(layer[name][e] for name in ("e_gate", "e_up", "e_down")))
        added += done * jnp.sum(weights[..., e] * kept, -1, keepdims=True)
    z = jnp.sum(jnp.log(powers.sum(-1)) ** 2)
    return added, (hits.sum((0, 1, 2)), likely.sum((0, 1)), z, jnp.sum(~kept))


def mean_loss(weights, *args, **options):
    """The mean loss in nats over all targets[B, L] except 0; is_start is a numpy array. With a
    window, a token sees that many tokens, itself included."""
    return objective(weights, *args, **options)[0]


def objective(weights, targets, is_start, max_timescale, preceding=0, window=None, experts=None):
    """Returns the mean loss plus the experts' costs, and (the mean loss, the number of tokens of
    each layer's experts, the fraction of choices without a place), or None without experts."""
    before, position, sees = layout(np.asarray(targets), np.asarray(is_start), preceding)
    if window:
        sees &= ~np.tri(targets.shape[1], k=-window, dtype=bool)
    return laid_out_objective(weights, targets, before, position, sees, max_timescale, experts)


@functools.partial(jax.jit, static_argnames="experts")
def laid_out_objective(weights, targets, before, position, sees, max_timescale, experts=None):
    logits, routed = decode(weights, before, position, sees, max_timescale, experts)
    likelihood = jnp.take_along_axis(jax.nn.softmax(logits), targets[..., None].astype(int), -1)
    count = jnp.sum(targets != 0)
    loss = -jnp.sum(jnp.where(targets != 0, jnp.log(likelihood[..., 0]), 0)) / count
    if not experts:
        return loss, None
    cost, (_, routing) = 0, experts
    for load, likely, z, _ in routed:  # of each layer
        parts = load / load.sum(), likely / targets.size
        cost += routing.balance_cost * load.size * jnp.dot(*parts)
        cost += routing.z_cost * z / targets.size
    loads, _, _, dropped = zip(*routed, strict=True)
    loads = jnp.stack(loads)
    return loss + cost, (loss, loads, sum(dropped) / loads.sum())


def laid_out_logits(*args):
    return decode(*args)[0]


@functools.partial(jax.jit, static_argnames="experts")
def decode(weights, before, position, sees, max_timescale, experts=None):
    """Returns the logits, and each layer's second result of `mix`."""
    x, routed = weights["embed"][before], []
    for i in range(len(weights["layers"]["w_q"])):
        layer = {name: value[i] for name, value in weights["layers"].items()}

        def norm(x, name, gains=layer):  # a layer may lack it
            return normalize(x, gains[name]) if name in gains else x

        h = norm(x, "attention_norm")
        y = attend(h, layer, position, sees, max_timescale)
        x = x + norm(y, "attention_post_norm")
        h = norm(x, "mlp_norm")
        y = 0
        if "w_up" in layer:
            y = swiglu(h, layer["w_gate"], layer["w_up"], layer["w_down"])
        if experts:
            added, sums = mix(h, layer, experts)
            y, routed = y + added, [*routed, sums]
        x = x + norm(y, "mlp_post_norm")
    x = normalize(x, weights["final_norm"])
    return x @ weights.get("unembed", weights["embed"]).T, routed
