"""The model and its loss, unsharded, written from the papers. Attention masks are made token by
token, and RoPE is a complex multiplication. Shares no code with the project."""

import jax
import jax.numpy as jnp
import numpy as np


def layout(targets, is_start, preceding=0):
    """Returns, for targets[B, L], the token before each one, or 0 for the first of a document, and
    `preceding`[B] for the first of a row that isn't; its position in the document; and whether it
    attends to each token of its row."""
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


def mean_loss(weights, targets, is_start, max_timescale, preceding=0, window=None):
    """The mean loss in nats over all targets[B, L] except 0; is_start is a numpy array. With a
    window, a token sees that many tokens, itself included."""
    before, position, sees = layout(np.asarray(targets), np.asarray(is_start), preceding)
    if window:
        sees &= ~np.tri(targets.shape[1], k=-window, dtype=bool)
    return laid_out_loss(weights, targets, before, position, sees, max_timescale)


@jax.jit
def laid_out_loss(weights, targets, before, position, sees, max_timescale):
    likelihood = jax.nn.softmax(laid_out_logits(weights, before, position, sees, max_timescale))
    likelihood = jnp.take_along_axis(likelihood, targets[..., None].astype(int), -1)[..., 0]
    return -jnp.sum(jnp.where(targets != 0, jnp.log(likelihood), 0)) / jnp.sum(targets != 0)


@jax.jit
def laid_out_logits(weights, before, position, sees, max_timescale):
    x = weights["embed"][before]
    for i in range(len(weights["layers"]["w_up"])):
        layer = {name: value[i] for name, value in weights["layers"].items()}

        def norm(x, name, gains=layer):  # which a layer may lack
            return normalize(x, gains[name]) if name in gains else x

        h = norm(x, "attention_norm")
        y = attend(h, layer, position, sees, max_timescale)
        x = x + norm(y, "attention_post_norm")
        h = norm(x, "mlp_norm")
        gate, up = h @ layer["w_gate"], h @ layer["w_up"]
        y = (gate / (1 + jnp.exp(-gate)) * up) @ layer["w_down"].T
        x = x + norm(y, "mlp_post_norm")
    return normalize(x, weights["final_norm"]) @ weights.get("unembed", weights["embed"]).T
