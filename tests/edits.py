"""Edits of the source as experiments make them, wrong and right ones, for testing the checks.

A wrong edit makes a number depend on the mesh or on the number of parts (microbatches, loss
chunks), or makes generation differ from training. A number is anything that a step returns: the
loss, the state, the metrics, the validation loss, the initial state, a generated text. All edits
trace, and nothing tells them apart but their numbers, for which these things matter:

- Batches with padding, unevenly spread, and documents of a few tokens.
- Weights, gains and moments unlike those of a fresh state: gains of 1 and zero moments hide much.
- Sizes that split over d and t into parts of different lengths, and into two microbatches. Model
  sizes close to each other, so that the order of two lengths turns where one of them is split.
- jax.device_count() is the size of the mesh.
- The updates themselves: compared with a weight, a wrong update is small.
- RMSNorm hides a scale. With Adam, nu tells gradients apart that differ by a factor.
"""

import textwrap
from typing import NamedTuple

from runtime.config import ROOT


class Edit(NamedTuple):
    kind: str  # the class of the mistake, or what the experiment changes
    replacements: tuple[tuple[str, str], ...]  # (old, new): each old stands once in the file
    file: str = "train.py"


def edited_source(edit: Edit) -> str:
    """The text of the edit's file with all its replacements."""
    text = (ROOT / edit.file).read_text()
    for old, new in edit.replacements:
        found = text.count(old)
        assert found == 1, f"{edit.file} contains {old!r} {found} times: update this edit"
        text = text.replace(old, new)
    return text


def indented(line: str, code: str) -> str:
    """The code, indented like the line."""
    code = textwrap.dedent(code).strip("\n")
    return textwrap.indent(code, line[: len(line) - len(line.lstrip())])


def after(line: str, code: str) -> tuple[str, str]:
    return line, f"{line}\n{indented(line, code)}"


def before(line: str, code: str) -> tuple[str, str]:
    return line, f"{indented(line, code)}\n{line}"


# Lines of train.py. In the block of the decoder:
GATHERED = "        w_q = gather"
VALUES = '        v = ops.einsum_unreduced("B/d L/c M, M K/t D -> B/d L/c K/t D", h, w_v)'
ROTATED = "        q, k = rope(q, k, sin, cos)"
ATTEND = "        mixed, new_cache = attend(q, k, v, cache)"
ATTENDED = (
    '        y = ops.einsum_unreduced("B/d L/c Q K/t D, M Q K/t D -> B/d L/c M {U:t}", mixed, w_o)'
)
WEIGHTS_OF_GATE = '            w_gate = gather("M/c/s F/t -> M F/t", w.w_gate)'
WEIGHTS_OF_UP = '            w_up = gather("M/c/s F/t -> M F/t", w.w_up)'
GATE_AND_UP = """\
            gate = ops.einsum_unreduced("B/d L/c M, M F/t -> B/d L/c F/t", h, w_gate)
            up = ops.einsum_unreduced("B/d L/c M, M F/t -> B/d L/c F/t", h, w_up)
            gate = save_for_backward(gate)
            up = save_for_backward(up)"""
HIDDEN = "            hidden = hidden.astype(compute.dtype)"
OUTPUT = (
    '            y = ops.einsum_unreduced("B/d L/c F/t, M F/t -> B/d L/c M {U:t}", hidden, w_down)'
)
RESULT = """\
        y = ops.psum_scatter("B/d L/c M {U:t} -> B/d L/c M/t", y)
        if w.mlp_post_norm is not None:
            gain = gather("M/t/c/s -> M/t", w.mlp_post_norm)
            y = rms_norm("B/d L/c M/t", save_for_backward(y), gain, config.norm_eps)
        return x + y, (new_cache, routed)"""
# Before the block:
EMBEDDED = '    x = ops.psum_scatter("B/d L/c M {U:t} -> B/d L/c M/t", x)'
LAYER = "@pytree_dataclass\nclass Layer:"
LAYER_WEIGHT = '    w_up: f32["M/c/d F/t"]'
WEIGHT = '    final_norm: f32["M/t/c/d"]'
DIMENSION = "    return {name: size for name, key in DIMENSIONS.items() if (size := value(key))}"
NORMED = "    x32 = x.astype(f32.dtype)"
DECODED = "    x, (_, routed) = decoder(weights, batch.inputs, batch.position, attend, (), config, routing)"
# In the loss:
LOGITS = "        logits = unembed(unembedding, x, config.model)"
SUM_EXP = '        sum_exp = ops.psum("B/d l/c {U:t} -> B/d l/c", sum_exp)'
NATS = "        nats = (jnp.log(sum_exp) - target_logit) * loss_mask"
TARGET = (
    "        target_logit = ops.index_unreduced(\n"
    '            "B/d l/c [V/t], B/d l/c -> B/d l/c {U:t}", logits, targets\n'
    "        )"
)
LOSS = '        total = ops.psum("{U:d,c} -> ", ops.reduce_sum("B/d l/c -> {U:d,c}", nats))'
FORWARD = "    x, routed = forward(weights, batch, config.model, config.training.routing)"
SUMMED = (
    "    objective, sums = sum_over_chunks("
    "loss, chunks, unembedding, x, batch.targets, batch.loss_mask)"
)

# In the step:
ADDED = "            return jax.tree.map(jnp.add, total, part), ()"
ROWS = "            part = jax.tree.map(lax.optimization_barrier, value_and_grads(rows))"
COUNT = "    count = target_count(batch)"
GRADS = "    (_, sums), grads = total"
TOTAL = "    return sums, count, jax.tree.map(lambda g: g / count, grads)"
CLIPPED = "    grads = tree_map(lambda g: g * clip, raw_grads)"
NU = "    nu = jax.tree.map(lambda v, g: hyper.nu.next(v, g * g), nu, grads)"
RATE = "    rate, mu_scale, nu_scale = hyper.learning_rate, hyper.mu.unbias, hyper.nu.unbias"
UPDATE = "        return w - rate * (m * mu_scale / root + decay * w)"
UPDATES = "    return jax.tree_util.tree_map_with_path(update, weights, mu, nu), mu, nu"
UPDATED = (
    "    weights, mu = tree_map("
    "lambda x, y: y if x is None else x, *parts, is_leaf=lambda x: x is None)"
)
STATE = "    return State(state.step + 1, weights, mu, nu), metrics"
STORED_NU = "    nu: SecondMoments  # of AdamW: averages of their squares"
FRESH = "    return State(jnp.uint32(0), weights, zeros, divided(zeros, config)[0])"
TYPE = '    return State(u32[""], weights, weights, divided(weights, config)[0])'
METRICS = "    metrics = Metrics("
MEANS = "    means = tree_map(lambda x: x / count, sums)"
VALIDATION = "    return sums.loss / targets"
# In the initial weights:
NORMAL = '        return normal * deviation.get(name, size["M"] ** -0.5)'

KERNELS, GENERATE = "shardlib/kernels.py", "tools/generate.py"
SCORES = '        scores = widening_einsum("bqgkd,bskd->bkgqs", jnp.float32, q_block, k)'
MASKED = (
    "        scores = jnp.where(visible[:, None, None], scores / math.sqrt(q.shape[-1]), -jnp.inf)"
)
SOFTMAX = "        probabilities = jax.nn.softmax(scores, axis=-1).astype(q.dtype)"
VISIBLE = "        visible &= key_position[:, None] <= position[:, :, None]"

ORTHOGONAL = before(
    LAYER,
    '''
    def orthogonal(x: jax.Array) -> jax.Array:
        """Five steps of Newton and Schulz's iteration on matrices [..., rows, columns]."""
        x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)
        for _ in range(5):
            gram = x @ jnp.swapaxes(x, -1, -2)
            x = 1.5 * x - 0.5 * gram @ x
        return x


    ''',
)


BY_MUON = '    muon = config.training.optimizer == "muon"', "    muon = True"
STACKED = "    x = longer(x.reshape(-1, *shape[-rank:]), missing)"
GIVEN = '    x = ops.all_to_all(f"{given} -> {whole}", x)'
BACK = '    x = ops.all_to_all(f"{whole} -> {given}", newton_schulz(x))'
LAYOUTS = """\
    given, whole = f"N{split} M/c/d{columns}", f"N/t/c/d M{columns.replace('/t', '')}\""""
SCALED = "    scale = 0.2 * max(x.shape[1], math.prod(x.shape[2:])) ** 0.5"
SQUARES = "    squares = jnp.sum(jnp.square(x.astype(f32.dtype)), axis=(1, 2), keepdims=True)"
NESTEROV = "    changes = orthogonalized(jax.tree.map(hyper.nesterov.next, mu, grads))"


def by_muon(*replacements: tuple[str, str]) -> Edit:
    """An edit of train.py's Muon, which then is the optimizer."""
    return Edit("Muon", (BY_MUON, *replacements))


def muon(body: str) -> Edit:
    """Muon for w_up alone, where `body` computes `direction` from its first moment `m`."""
    changed = f"""
    m = mu.layers.w_up
    {textwrap.indent(textwrap.dedent(body).strip(), "    ").strip()}
    w_up = state.weights.layers.w_up - hyper.learning_rate * direction
    layers = dataclasses.replace(weights.layers, w_up=w_up)
    weights = dataclasses.replace(weights, layers=layers)
    """
    return Edit("part of a whole", (ORTHOGONAL, after(UPDATED, changed)))


def block(kind: str, line: str, code: str, *others: tuple[str, str]) -> Edit:
    """Adds code after a line of train.py."""
    return Edit(kind, (after(line, code), *others))


def instead(kind: str, line: str, code: str, *others: tuple[str, str]) -> Edit:
    """Puts code in place of a line of train.py."""
    return Edit(kind, ((line, indented(line, code)), *others))


PART = "part of a whole"
SCATTER = "scatter-add over tokens"
MESH = "number from the mesh"
BRANCH = "branch on the length of a part"
ARRAY = "array made at the length of a part"
RESHAPE = "reshape of a split dimension"
STRING = "string that doesn't fit the lengths"
SCOPE = "inside an op's scope"
KERNEL = "inside attention"
UNREDUCED = "counted several times"
MERGED = "merged dimensions"
VJP = "custom gradient"
RANDOM = "random numbers of a part"
MEAN = "mean of means"
OPTIMIZER = "optimizer's statistics of a part"
LOCAL = "statistics of a part in the model"
NEIGHBOR = "neighbors across the border of a part"
CHUNK = "within a microbatch or chunk"
METRIC = "metric of a part"
INIT = "initial state"
MIXES = "generation: mixes positions outside of attend"
GENERATION = "generation"

WRONG: dict[str, Edit] = {
    # --- A part taken from a whole ---
    "muon_first_part": muon(
        """
        whole = ops.all_gather("layers M/c/d F/t -> layers M F", m)
        direction = orthogonal(whole)[:, : m.shape[1], : m.shape[2]]
        """
    ),
    "muon_dynamic_slice_at_zero": muon(
        """
        whole = orthogonal(ops.all_gather("layers M/c/d F/t -> layers M F", m))
        direction = lax.dynamic_slice(whole, (0, 0, 0), m.shape)
        """
    ),
    "muon_rows_right_columns_first": muon(
        """
        whole = orthogonal(ops.all_gather("layers M/c/d F/t -> layers M F", m))
        row = lax.axis_index("s") * m.shape[1]
        direction = lax.dynamic_slice_in_dim(whole, row, m.shape[1], axis=1)[..., : m.shape[2]]
        """
    ),
    "muon_gathers_t_only": muon(
        """
        whole = orthogonal(ops.all_gather("layers M/c/d F/t -> layers M/c/s F", m))
        direction = lax.dynamic_slice_in_dim(
            whole, lax.axis_index("t") * m.shape[2], m.shape[2], axis=2
        )
        """
    ),
    "muon_of_the_part": muon("direction = orthogonal(m)"),
    "post_norm_first_part": instead(
        PART,
        RESULT,
        """
        x = x + ops.psum_scatter("B/d L/c M {U:t} -> B/d L/c M/t", y)
        whole = ops.all_gather("B/d L/c M/t -> B/d L/c M", x)
        x = rms_norm("B/d L/c M", whole, gain, config.norm_eps)[..., : x.shape[-1]]
        return x, (new_cache, routed)
        """,
    ),
    "softmax_neurons_first_part": block(
        PART,
        HIDDEN,
        """
        whole = ops.all_gather("B/d L/c F/t -> B/d L/c F", hidden)
        hidden = jax.nn.softmax(whole, axis=-1)[..., : hidden.shape[-1]]
        """,
    ),
    "centered_logits_first_part": block(
        PART,
        LOGITS,
        """
        whole = ops.all_gather("B/d l/c V/t -> B/d l/c V", logits)
        logits = (whole - whole.mean(-1, keepdims=True))[..., : logits.shape[-1]]
        """,
    ),
    "heads_rolled_first_part": block(
        PART,
        ATTEND,
        """
        heads = ops.all_gather("B/d L/c Q K/t D -> B/d L/c Q K D", mixed)
        heads = heads + 0.1 * jnp.roll(heads, 1, axis=3)
        mixed = heads[:, :, :, : mixed.shape[3]]
        """,
    ),
    "rows_preconditioned_first_part": block(
        PART,
        NU,
        """
        whole = ops.all_gather("V/t M/c/s -> V M", grads.embed)
        rows = jnp.sqrt(jnp.sum(whole * whole, axis=1, keepdims=True)) + 1e-3
        size = grads.embed.shape[0]
        mu = dataclasses.replace(mu, embed=mu.embed / rows[:size])
        """,
    ),
    "split_and_first": block(
        PART,
        HIDDEN,
        """
        whole = ops.all_gather("B/d L/c F/t -> B/d L/c F", hidden)
        whole = whole / (1 + jnp.abs(whole).max(-1, keepdims=True))
        hidden = jnp.split(whole, whole.shape[-1] // hidden.shape[-1], axis=-1)[0]
        """,
    ),
    "reshape_and_first": block(
        PART,
        HIDDEN,
        """
        whole = ops.all_gather("B/d L/c F/t -> B/d L/c F", hidden)
        whole = whole * lax.rsqrt(jnp.square(whole).mean(-1, keepdims=True) + 1e-6)
        hidden = whole.reshape(*hidden.shape[:2], -1, hidden.shape[-1])[:, :, 0]
        """,
    ),
    "take_by_arange": block(
        PART,
        HIDDEN,
        """
        whole = jnp.cumsum(ops.all_gather("B/d L/c F/t -> B/d L/c F", hidden), axis=-1)
        hidden = jnp.take(whole, jnp.arange(hidden.shape[-1]), axis=-1)
        """,
    ),
    "batch_whitened_first_rows": block(
        PART,
        EMBEDDED,
        """
        rows = ops.all_gather("B/d L/c M/t -> B L M/t", x)
        rows = rows - rows.mean(0, keepdims=True)
        x = rows[: x.shape[0]]
        """,
    ),
    "gain_first_part": block(
        PART,
        EMBEDDED,
        """
        gain = ops.all_gather("M/t/c/s -> M", weights.final_norm).astype(compute.dtype)
        x = x * gain[: x.shape[-1]]
        """,
    ),
    "last_part": block(
        PART,
        HIDDEN,
        """
        whole = jnp.flip(ops.all_gather("B/d L/c F/t -> B/d L/c F", hidden), -1)
        hidden = hidden + whole[..., -hidden.shape[-1] :]
        """,
    ),
    # --- Scatter-add over tokens ---
    "rare_targets_weigh_more": block(
        SCATTER,
        NATS,
        """
        counts = jnp.zeros(config.model.vocab).at[targets].add(1.0)
        nats = nats * lax.rsqrt(counts[targets])
        """,
    ),
    "segment_sum_of_documents": block(
        SCATTER,
        FORWARD,
        """
        lengths = jax.ops.segment_sum(jnp.ones(batch.start.size), batch.start.ravel(), 64)
        x = x + jnp.log1p(lengths[batch.start])[..., None].astype(compute.dtype)
        """,
    ),
    "expert_loads": block(
        SCATTER,
        HIDDEN,
        """
        expert = jnp.argmax(h[..., :8], axis=-1)
        load = jnp.zeros(8).at[expert].add(1.0)
        load = load / load.sum()
        hidden = hidden * (1 - load[expert])[..., None].astype(compute.dtype)
        """,
    ),
    "bincount_of_inputs": block(
        SCATTER,
        EMBEDDED,
        """
        often = jnp.bincount(inputs.ravel(), length=config.vocab)
        x = x * (1 / (1 + often[inputs]))[..., None].astype(compute.dtype)
        """,
    ),
    "distinct_tokens": block(
        SCATTER,
        NATS,
        """
        seen = jnp.zeros(config.model.vocab).at[targets].set(1.0)
        nats = nats * (1 + seen.sum() / config.model.vocab)
        """,
    ),
    "unigram_baseline": block(
        SCATTER,
        NATS,
        """
        counts = jnp.zeros(config.model.vocab).at[targets].add(loss_mask)
        unigram = -jnp.log((counts[targets] + 1) / (counts.sum() + config.model.vocab))
        nats = nats * unigram
        """,
    ),
    "embedding_rows_by_frequency": block(
        SCATTER,
        GRADS,
        """
        seen = jnp.zeros(config.model.vocab).at[batch.inputs].add(1.0)
        rate = 1 / (1 + seen[: grads.embed.shape[0]])
        grads = dataclasses.replace(grads, embed=grads.embed * rate[:, None])
        """,
    ),
    "argsort_of_losses": block(
        SCATTER,
        NATS,
        """
        rank = jnp.argsort(jnp.argsort(nats.ravel())).reshape(nats.shape)
        nats = nats * (rank > nats.size // 4)
        """,
    ),
    "harder_than_the_median": block(
        SCATTER,
        NATS,
        "nats = jnp.where(nats > jnp.median(lax.stop_gradient(nats)), nats, 0.5 * nats)",
    ),
    "hardest_eighth": block(
        SCATTER,
        NATS,
        """
        top, _ = lax.top_k(lax.stop_gradient(nats).ravel(), nats.size // 8)
        nats = nats * (1 + (nats >= top[-1]))
        """,
    ),
    # --- Numbers from the mesh ---
    "loss_by_mesh_d": block(MESH, COUNT, "count = count * config.mesh.d"),
    "loss_by_device_count": block(MESH, COUNT, "count = count * jax.device_count()"),
    "gradient_by_devices": instead(
        MESH,
        CLIPPED,
        "grads = tree_map(lambda g: g * clip / jax.device_count() ** 0.5, raw_grads)",
    ),
    "rate_scaled_by_data_parallelism": block(MESH, RATE, "rate = rate * config.mesh.d**0.5"),
    "axis_size_scales_residual": block(
        MESH, HIDDEN, 'hidden = hidden * lax.axis_size("t") ** -0.5'
    ),
    "abstract_mesh_scales_logits": block(
        MESH,
        LOGITS,
        'logits = logits * jax.sharding.get_abstract_mesh().shape["t"] ** -0.5',
    ),
    "decay_by_microbatches": instead(
        MESH,
        UPDATE,
        """
        decay = hyper.weight_decay / config.training.microbatches
        return w - rate * (m * mu_scale / root + decay * w)
        """,
    ),
    "loss_by_chunks": instead(
        MESH,
        NATS,
        "nats = (jnp.log(sum_exp) - target_logit) * loss_mask / config.training.loss_chunks",
    ),
    "clip_by_root_of_devices": (
        Edit(
            MESH,
            (
                (
                    "hyper.grad_clip / grad_norm",
                    "hyper.grad_clip * config.mesh.d**0.5 / grad_norm",
                ),
            ),
        )
    ),
    "eps_by_mesh": Edit(
        MESH, (("+ hyper.adam_eps\n", "+ hyper.adam_eps * config.mesh.t * 100\n"),)
    ),
    "b2_by_tokens_per_device": Edit(
        MESH,
        (
            (
                CLIPPED,
                CLIPPED
                + "\n    rows = config.training.tokens.batch // config.mesh.d"
                + "\n    new = hyper.nu.new * rows / 16"
                + "\n    b2 = dataclasses.replace(hyper.nu, old=1 - new, new=new)"
                + "\n    hyper = dataclasses.replace(hyper, nu=b2)",
            ),
        ),
    ),
    "noise_seed_by_device": block(
        MESH,
        EMBEDDED,
        """
        key = jax.random.fold_in(jax.random.key(0), lax.axis_index("s"))
        x = x + 0.1 * jax.random.normal(key, (x.shape[0], x.shape[1], 1), x.dtype)
        """,
    ),
    "capacity_per_device": block(
        MESH,
        HIDDEN,
        """
        capacity = 216 // jax.sharding.get_abstract_mesh().shape["s"]
        hidden = jnp.clip(hidden, -capacity / 100, capacity / 100)
        """,
    ),
    # --- Branches in Python on the length of a part ---
    "muon_scale_by_local_shape": Edit(
        BRANCH,
        (
            (
                UPDATE,
                indented(
                    UPDATE,
                    """
                    scale = max(1, w.shape[-2] / w.shape[-1]) ** 0.5 if w.ndim > 1 else 1
                    return w - rate * (scale * m * mu_scale / root + hyper.weight_decay * w)
                    """,
                ),
            ),
        ),
    ),
    "wide_or_tall": instead(
        BRANCH,
        UPDATE,
        """
        tall = w.ndim > 1 and w.shape[-2] > w.shape[-1]
        decay = 0 if tall else hyper.weight_decay
        return w - rate * (m * mu_scale / root + decay * w)
        """,
    ),
    "small_last_dimension": instead(
        BRANCH,
        UPDATE,
        """
        if w.shape[-1] < 20:
            return w - rate * jnp.sign(m)
        return w - rate * (m * mu_scale / root + hyper.weight_decay * w)
        """,
    ),
    "wider_than_long": block(
        BRANCH, HIDDEN, "if hidden.shape[-1] < h.shape[-1]:\n    hidden = hidden * 0.5"
    ),
    "cubes_when_few_tokens": block(
        BRANCH,
        HIDDEN,
        "if h.shape[0] * h.shape[1] < 100:\n    hidden = jax.nn.gelu(gate) * up",
    ),
    "few_heads": block(BRANCH, ROTATED, "if k.shape[2] <= 4:\n    k = k / (1 + jnp.abs(k))"),
    "rows_of_a_microbatch": block(
        BRANCH, LOGITS, "if x.shape[0] > 6:\n    logits = 30 * jnp.tanh(logits / 30)"
    ),
    "narrow_chunk": block(BRANCH, NATS, "if nats.shape[1] > 10:\n    nats = nats * 1.5"),
    "order_of_two_sizes_in_the_norm": block(
        BRANCH,
        ATTEND,
        "if mixed.shape[3] < mixed.shape[4]:\n    mixed = mixed * mixed.shape[4] ** -0.5",
    ),
    # --- Arrays of numbers ---
    "array_of_local_width": block(
        ARRAY, HIDDEN, "hidden = hidden / jnp.sqrt(jnp.array([hidden.shape[-1]], hidden.dtype))"
    ),
    "np_full_of_local_width": block(
        ARRAY,
        HIDDEN,
        "hidden = hidden * np.full((hidden.shape[1], 1), up.shape[-1] ** -0.5, hidden.dtype)",
        ("import jax.numpy as jnp\n", "import jax.numpy as jnp\nimport numpy as np\n"),
    ),
    "numpy_scalar_of_local_width": block(
        ARRAY,
        HIDDEN,
        "hidden = hidden * np.asarray(hidden.shape[-1] ** -0.5, hidden.dtype)",
        ("import jax.numpy as jnp\n", "import jax.numpy as jnp\nimport numpy as np\n"),
    ),
    "slopes_of_local_heads": block(
        ARRAY,
        ATTEND,
        """
        slopes = 2.0 ** -(8 * jnp.arange(1, k.shape[2] + 1) / k.shape[2])
        mixed = mixed * slopes[:, None].astype(compute.dtype)
        """,
    ),
    "every_fourth_neuron": block(
        ARRAY,
        HIDDEN,
        "hidden = jnp.where(jnp.arange(hidden.shape[-1]) % 5 == 0, hidden * hidden, hidden)",
    ),
    "channels_decay_along_the_part": block(
        ARRAY, EMBEDDED, "x = x * jnp.linspace(0.5, 1, x.shape[-1], dtype=x.dtype)"
    ),
    "sinusoids_of_the_part": block(
        ARRAY,
        EMBEDDED,
        """
        channel = jnp.arange(x.shape[-1])
        angle = position[..., None] / 100 ** (channel / config.d_model)
        x = x + jnp.sin(angle).astype(compute.dtype)
        """,
    ),
    "later_rows_weigh_less": block(
        ARRAY, NATS, "nats = nats * 0.9 ** jnp.arange(nats.shape[0])[:, None]"
    ),
    "one_hot_of_the_part": instead(
        ARRAY,
        TARGET,
        """
        hot = jax.nn.one_hot(targets, logits.shape[-1])
        target_logit = ops.reduce_sum("B/d l/c V/t -> B/d l/c {U:t}", hot * logits)
        """,
    ),
    "take_along_clamped": instead(
        ARRAY,
        TARGET,
        """
        ids = targets[..., None].astype(jnp.int32) % logits.shape[-1]
        target_logit = jnp.take_along_axis(logits, ids, axis=-1)
        target_logit = ops.reduce_sum("B/d l/c T/t -> B/d l/c {U:t}", target_logit)
        """,
    ),
    "entropy_by_local_vocabulary": block(
        ARRAY, NATS, "nats = nats / jnp.log(jnp.float32(logits.shape[-1]))"
    ),
    "numpy_noise_of_the_part": block(
        ARRAY,
        HIDDEN,
        "hidden = hidden + np.random.default_rng(0).normal(size=hidden.shape[-1]).astype(h.dtype)",
        ("import jax.numpy as jnp\n", "import jax.numpy as jnp\nimport numpy as np\n"),
    ),
    "numpy_mask_of_neurons": block(
        ARRAY,
        HIDDEN,
        "hidden = hidden * jnp.asarray(np.arange(hidden.shape[-1]) % 7 > 0, hidden.dtype)",
        ("import jax.numpy as jnp\n", "import jax.numpy as jnp\nimport numpy as np\n"),
    ),
    "numpy_table_by_position": block(
        ARRAY,
        EMBEDDED,
        """
        angle = np.outer(np.arange(64), 1 / 100 ** (np.arange(x.shape[-1]) / x.shape[-1]))
        x = x + jnp.asarray(np.sin(angle), x.dtype)[position]
        """,
        ("import jax.numpy as jnp\n", "import jax.numpy as jnp\nimport numpy as np\n"),
    ),
    "special_tokens_masked": block(
        ARRAY,
        LOGITS,
        "logits = jnp.where(jnp.arange(logits.shape[-1]) < 3, -10.0, logits)",
    ),
    "linear_position_weights_in_a_chunk": block(
        CHUNK,
        NATS,
        "nats = nats * jnp.linspace(0.5, 1.5, nats.shape[1])",
    ),
    "late_positions_of_a_chunk": block(
        CHUNK, NATS, "nats = jnp.where(jnp.arange(nats.shape[1]) < 4, 0, nats)"
    ),
    "width_scales_the_output": Edit(
        ARRAY, (before(OUTPUT, "w_down = w_down * w_down.shape[-1] ** -0.5"),)
    ),
    "heads_scale_the_output": Edit(ARRAY, (before(ATTENDED, "mixed = mixed / mixed.shape[3]"),)),
    "first_rows_of_the_vocabulary_frozen": instead(
        ARRAY,
        UPDATED,
        """
        updated = lambda x, y: y if x is None else x
        weights, mu = tree_map(updated, *parts, is_leaf=lambda x: x is None)
        frozen = jnp.arange(weights.embed.shape[0])[:, None] < 4
        embed = jnp.where(frozen, state.weights.embed, weights.embed)
        weights = dataclasses.replace(weights, embed=embed)
        """,
    ),
    "rate_by_row_of_a_matrix": instead(
        ARRAY,
        UPDATE,
        """
        falling = 1 / (1 + jnp.arange(w.shape[-1]))
        return w - rate * falling * (m * mu_scale / root + hyper.weight_decay * w)
        """,
    ),
    # --- Reshapes of split dimensions ---
    "gate_and_up_fused": Edit(
        RESHAPE,
        (
            (
                '    w_gate: f32["M/c/d F/t"] | None\n    w_up: f32["M/c/d F/t"]',
                '    w_gate: f32["M/c/d G/t"]',
            ),
            (DIMENSION, DIMENSION + ' | {\n        "G": 2 * config.model.d_ff\n    }'),
            (
                WEIGHTS_OF_GATE + "\n" + WEIGHTS_OF_UP,
                '            w_gate = gather("M/c/s G/t -> M G/t", w.w_gate)',
            ),
            (
                GATE_AND_UP,
                '            both = save_for_backward(ops.einsum_unreduced("B/d L/c M, M G/t '
                '-> B/d L/c G/t", h, w_gate))\n'
                "            both = both.reshape(*h.shape[:2], 2, -1)\n"
                "            gate, up = both[:, :, 0], both[:, :, 1]",
            ),
        ),
    ),
    "keys_and_values_fused": Edit(
        RESHAPE,
        (
            (
                '    w_k: f32["M/c/d K/t D"]\n    w_v: f32["M/c/d K/t D"]',
                '    w_k: f32["M/c/d H/t D"]',
            ),
            (DIMENSION, DIMENSION + ' | {\n        "H": 2 * config.model.n_kv\n    }'),
            ('        w_k = gather("M/c/s K/t D -> M K/t D", w.w_k)\n', ""),
            (
                '        w_v = gather("M/c/s K/t D -> M K/t D", w.w_v)',
                '        w_kv = gather("M/c/s H/t D -> M H/t D", w.w_k)',
            ),
            (
                '        k = ops.einsum_unreduced("B/d L/c M, M K/t D -> B/d L/c K/t D", h, w_k)\n',
                "",
            ),
            (
                VALUES,
                '        kv = ops.einsum_unreduced("B/d L/c M, M H/t D -> B/d L/c H/t D", h, w_kv)\n'
                "        k, v = jnp.split(kv, 2, axis=2)",
            ),
        ),
    ),
    "heads_flattened_query_first": Edit(
        RESHAPE,
        (
            ('    w_o: f32["M/c/d Q K/t D"]', '    w_o: f32["M/c/d H/t"]'),
            (
                DIMENSION,
                DIMENSION
                + (
                    ' | {\n        "H": config.model.n_q_per_kv * config.model.n_kv * '
                    "config.model.d_head\n    }"
                ),
            ),
            (
                '        w_o = gather("M/c/s Q K/t D -> M Q K/t D", w.w_o)',
                '        w_o = gather("M/c/s H/t -> M H/t", w.w_o)\n'
                '        mixed = rearrange(mixed, "B L Q K D -> B L (Q K D)")',
            ),
            (
                ATTENDED,
                '        y = ops.einsum_unreduced("B/d L/c H/t, M H/t -> B/d L/c M {U:t}", mixed, w_o)',
            ),
        ),
    ),
    "channels_shuffled": block(
        RESHAPE, HIDDEN, 'hidden = rearrange(hidden, "B L (g c) -> B L (c g)", g=4)'
    ),
    "gate_shuffled_against_up": instead(
        RESHAPE,
        HIDDEN,
        """
        gate = gate.reshape(*gate.shape[:2], 2, -1).swapaxes(2, 3).reshape(gate.shape)
        hidden = jax.nn.silu(gate) * up
        """,
    ),
    "four_groups_of_the_part": block(
        RESHAPE,
        HIDDEN,
        """
        groups = hidden.reshape(*hidden.shape[:2], 4, -1)
        groups = groups - groups.mean(-1, keepdims=True)
        hidden = groups.reshape(hidden.shape)
        """,
    ),
    "halves_multiplied": block(
        RESHAPE,
        HIDDEN,
        """
        one, other = jnp.split(hidden, 2, axis=-1)
        hidden = jnp.concatenate([one, one * other], axis=-1)
        """,
    ),
    "rotated_halves_of_the_residual": block(
        RESHAPE,
        EMBEDDED,
        """
        one, other = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        x = jnp.concatenate([one - other, one + other], axis=-1)
        """,
    ),
    "queries_meet_other_keys": block(
        RESHAPE,
        ROTATED,
        """
        heads = rearrange(q, "B L Q K D -> B L (Q K) D")
        q = rearrange(heads, "B L (K Q) D -> B L Q K D", Q=q.shape[2])
        """,
    ),
    "heads_transposed_into_queries": block(
        RESHAPE,
        ATTEND,
        """
        heads = mixed.swapaxes(2, 3).reshape(mixed.shape)
        mixed = mixed + heads
        """,
    ),
    "tokens_flattened_and_shifted": block(
        RESHAPE,
        EMBEDDED,
        """
        tokens = x.reshape(-1, x.shape[-1])
        x = x + 0.5 * jnp.concatenate([tokens[:1], tokens[:-1]]).reshape(x.shape)
        """,
    ),
    "rows_paired": block(
        RESHAPE,
        EMBEDDED,
        """
        half = x.shape[0] // 2
        x = jnp.concatenate([x[:half], x[half:] + 0.1 * x[:1]], axis=0)
        """,
    ),
    "embedding_rows_regrouped": instead(
        RESHAPE,
        UPDATED,
        """
        updated = lambda x, y: y if x is None else x
        weights, mu = tree_map(updated, *parts, is_leaf=lambda x: x is None)
        pairs = rearrange(weights.embed, "(two V) M -> V two M", two=2)
        pairs = pairs.at[:, 1].add(1e-2 * pairs[:, 0])
        weights = dataclasses.replace(weights, embed=rearrange(pairs, "V two M -> (two V) M"))
        """,
    ),
    "flipped_neurons": instead(
        RESHAPE, HIDDEN, "hidden = jax.nn.silu(jnp.flip(gate, axis=-1)) * up"
    ),
    "flipped_heads": block(RESHAPE, ATTEND, "mixed = mixed + mixed[:, :, :, ::-1]"),
    "outer_product_of_heads": block(
        RESHAPE,
        ATTEND,
        """
        mixing = jnp.tril(jnp.ones((mixed.shape[3], mixed.shape[3]), mixed.dtype))
        mixed = jnp.einsum("blqkd,kj->blqjd", mixed, mixing) / 4
        """,
    ),
    # --- Neighbors across the border of a part ---
    "neurons_rolled": block(
        NEIGHBOR, HIDDEN, "hidden = hidden + 0.5 * jnp.roll(hidden, 1, axis=-1)"
    ),
    "channels_convolved": block(
        NEIGHBOR,
        EMBEDDED,
        "x = x + 0.5 * jnp.pad(x, ((0, 0), (0, 0), (1, 0)))[..., :-1]",
    ),
    "neurons_pooled": block(
        NEIGHBOR,
        HIDDEN,
        'hidden = lax.reduce_window(hidden, -jnp.inf, lax.max, (1, 1, 3), (1, 1, 1), "SAME")',
    ),
    "neurons_interpolated": block(
        NEIGHBOR, HIDDEN, "hidden = hidden - jnp.gradient(hidden, axis=-1)"
    ),
    "vocabulary_cumulated": block(
        NEIGHBOR, LOGITS, "logits = logits + 0.01 * jnp.cumsum(logits, axis=-1)"
    ),
    "cosine_transform_of_the_residual": block(
        NEIGHBOR,
        EMBEDDED,
        """
        channel = jnp.arange(x.shape[-1])
        x = x + 0.1 * x @ jnp.cos(jnp.outer(channel, channel) / 7).astype(x.dtype)
        """,
    ),
    "neurons_sorted": block(NEIGHBOR, HIDDEN, "hidden = hidden + jnp.sort(hidden, axis=-1)"),
    "winner_takes_all": block(
        NEIGHBOR,
        HIDDEN,
        """
        least = lax.top_k(hidden, hidden.shape[-1] // 4)[0][..., -1:]
        hidden = jnp.where(hidden >= least, hidden, 0)
        """,
    ),
    # --- Strings that don't fit the lengths ---
    "fresh_name_for_the_width": block(
        STRING,
        HIDDEN,
        'hidden = hidden / (1 + ops.reduce_sum("B/d L/c X -> B/d L/c", hidden * hidden)[..., None])',
    ),
    "fresh_name_for_the_peak": Edit(
        STRING,
        (('"B/d l/c V/t -> B/d l/c", lax.stop', '"B/d l/c X -> B/d l/c", lax.stop'),),
    ),
    "peak_by_jnp": Edit(
        STRING,
        (
            (
                'ops.reduce_max("B/d l/c V/t -> B/d l/c", lax.stop_gradient(logits))',
                "jnp.max(lax.stop_gradient(logits), axis=-1)",
            ),
        ),
    ),
    "axis_on_a_length_of_one": block(
        STRING,
        HIDDEN,
        """
        level = ops.reduce_sum("B/d L/c T/t -> B/d L/c {U:t}", lax.stop_gradient(jnp.abs(h[..., :1])))
        level = ops.psum("B/d L/c {U:t} -> B/d L/c", level)
        hidden = hidden / (1 + level[..., None])
        """,
    ),
    "two_names_for_one_dimension": block(
        STRING,
        HIDDEN,
        """
        scores = ops.einsum_unreduced("B/d L/c X, B/d L/c X -> B/d L/c", gate, up)
        hidden = hidden * jax.nn.sigmoid(scores)[..., None]
        """,
    ),
    "fresh_name_for_the_batch": block(
        STRING,
        EMBEDDED,
        'x = x - ops.reduce_sum("R L M/t -> L M/t", x) / config.d_model',
    ),
    "maximum_of_a_part_by_name": block(
        STRING,
        HIDDEN,
        """
        peak = ops.reduce_max("B/d L/c X -> B/d L/c", lax.stop_gradient(jnp.abs(hidden)))
        hidden = hidden / (1 + peak[..., None])
        """,
    ),
    "heads_named_as_whole": block(
        STRING,
        ATTEND,
        """
        level = ops.reduce_sum("B/d L/c Q H D -> B/d L/c", mixed * mixed)
        mixed = mixed * lax.rsqrt(1 + level)[..., None, None, None]
        """,
    ),
    "gathers_a_length_of_one": block(
        STRING,
        HIDDEN,
        """
        first = ops.all_gather("B/d L/c T/t -> B/d L/c T", hidden[..., :1])
        hidden = hidden * (1 + jnp.tanh(first).mean(-1, keepdims=True))
        """,
    ),
    # --- Scopes that exempt ---
    "scope_like_an_op": block(
        SCOPE,
        HIDDEN,
        """
        with jax.named_scope("psum(B -> B)"):
            hidden = hidden - hidden.mean(-1, keepdims=True)
        """,
    ),
    "scope_of_sum_of_squares": instead(
        SCOPE,
        UPDATE,
        """
        with jax.named_scope("sum_of_squares"):
            trust = jnp.sqrt(jnp.sum(w * w))
        return w - rate * trust * (m * mu_scale / root + hyper.weight_decay * w)
        """,
    ),
    "own_op_centers_a_part": block(
        SCOPE,
        HIDDEN,
        'hidden = center("B/d L/c F/t -> B/d L/c F/t", hidden)',
        before(
            LAYER,
            '''
            @ops.define_op
            def center(call: ops.Call, x: jax.Array) -> jax.Array:
                """Subtracts the mean along the last dimension."""
                return x - x.mean(-1, keepdims=True)


            ''',
        ),
    ),
    "own_op_normalizes_the_batch": block(
        SCOPE,
        EMBEDDED,
        'x = batch_norm("B/d L/c M/t -> B/d L/c M/t", x)',
        before(
            LAYER,
            '''
            @ops.define_op
            def batch_norm(call: ops.Call, x: jax.Array) -> jax.Array:
                """Normalizes each channel over the batch and the sequence."""
                mean, deviation = x.mean((0, 1)), x.std((0, 1))
                return (x - mean) / (deviation + 1e-3)


            ''',
        ),
    ),
    "own_op_unit_rows": instead(
        SCOPE,
        UPDATED,
        """
        updated = lambda x, y: y if x is None else x
        weights, mu = tree_map(updated, *parts, is_leaf=lambda x: x is None)
        embed = unit_rows("V/t M/c/d -> V/t M/c/d", weights.embed)
        weights = dataclasses.replace(weights, embed=embed)
        """,
        before(
            LAYER,
            '''
            @ops.define_op
            def unit_rows(call: ops.Call, x: jax.Array) -> jax.Array:
                """Divides each row by its length."""
                return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


            ''',
        ),
    ),
    "own_op_adds_means": block(
        SCOPE,
        HIDDEN,
        """
        level = mean_square("B/d L/c F/t -> B/d L/c", lax.stop_gradient(hidden))
        hidden = hidden / (1 + level[..., None])
        """,
        before(
            LAYER,
            '''
            @ops.define_op
            def mean_square(call: ops.Call, x: jax.Array) -> jax.Array:
                """The mean of the squares along the last dimension, over all devices."""
                return lax.psum(jnp.square(x).mean(-1), "t")


            ''',
        ),
    ),
    "own_op_forgets_an_axis": instead(
        SCOPE,
        UPDATED,
        """
        updated = lambda x, y: y if x is None else x
        weights, mu = tree_map(updated, *parts, is_leaf=lambda x: x is None)
        trust = length("V/t M/c/d -> ", state.weights.embed)
        weights = dataclasses.replace(weights, embed=weights.embed / trust)
        """,
        before(
            LAYER,
            '''
            @ops.define_op
            def length(call: ops.Call, x: jax.Array) -> jax.Array:
                """The length of an array that is split over all axes."""
                return lax.pmax(jnp.sqrt(lax.psum(jnp.sum(x * x), "s")), "t")


            ''',
        ),
    ),
    "own_op_row_numbers": block(
        SCOPE,
        NATS,
        'nats = nats / (1 + row_numbers("B/d l/c -> B/d l/c", nats))',
        before(
            LAYER,
            '''
            @ops.define_op
            def row_numbers(call: ops.Call, x: jax.Array) -> jax.Array:
                """The number of each row in the batch."""
                return jnp.zeros_like(x) + jnp.arange(x.shape[0])[:, None]


            ''',
        ),
    ),
    "own_op_row_numbers_in_a_microbatch": block(
        SCOPE,
        NATS,
        'nats = nats / (1 + row_numbers("B/d l/c -> B/d l/c", nats))',
        before(
            LAYER,
            '''
            @ops.define_op
            def row_numbers(call: ops.Call, x: jax.Array) -> jax.Array:
                """The number of each row in the batch."""
                first = lax.axis_index("s") * x.shape[0]
                return jnp.zeros_like(x) + first + jnp.arange(x.shape[0])[:, None]


            ''',
        ),
    ),
    "recomputed_statistics": block(
        SCOPE,
        HIDDEN,
        """
        centered = jax.checkpoint(lambda u: u - u.mean(-1, keepdims=True))
        hidden = centered(hidden)
        """,
    ),
    "callback_centers_a_part": block(
        SCOPE,
        HIDDEN,
        """
        def center(x: Any) -> Any:
            return x - x.mean(-1, keepdims=True)

        given = lax.stop_gradient(hidden)
        hidden = hidden + jax.pure_callback(center, jax.typeof(given), given)
        """,
    ),
    "recomputed_number": block(
        SCOPE,
        HIDDEN,
        "hidden = jax.checkpoint(lambda u: jnp.tanh(u / u.shape[-1] ** 0.5))(hidden)",
    ),
    # --- Attention's body ---
    "attention_slopes_of_local_heads": Edit(
        KERNEL,
        (
            after(
                SCORES,
                """
                slopes = 2.0 ** -(8 * (1 + jnp.arange(k.shape[2])) / k.shape[2])
                age = q_position[:, None] - jnp.arange(length)
                scores = scores - slopes[:, None, None, None] * age
                """,
            ),
        ),
        KERNELS,
    ),
    "attention_talking_heads": Edit(
        KERNEL, (after(SCORES, "scores = scores - scores.mean(axis=1, keepdims=True)"),), KERNELS
    ),
    "attention_scaled_by_heads": Edit(
        KERNEL,
        (("scores / math.sqrt(q.shape[-1])", "scores / math.sqrt(q.shape[-1] * q.shape[3])"),),
        KERNELS,
    ),
    "attention_dropout_of_the_part": Edit(
        KERNEL,
        (
            after(
                SOFTMAX,
                """
                kept = jax.random.bernoulli(jax.random.key(0), 0.9, probabilities.shape)
                probabilities = probabilities * kept
                """,
            ),
        ),
        KERNELS,
    ),
    "attention_values_centered_over_rows": Edit(
        KERNEL,
        (
            (
                "k, v = (x.astype(q.dtype) for x in wide)",
                "k, v = (x.astype(q.dtype) for x in wide)\n        v = v - v.mean(axis=0)",
            ),
        ),
        KERNELS,
    ),
    "attention_clips_at_the_largest_score": Edit(
        KERNEL,
        (after(SCORES, "scores = scores / (1 + jnp.abs(lax.stop_gradient(scores)).max())"),),
        KERNELS,
    ),
    "attention_documents_of_neighbors": Edit(
        KERNEL,
        (
            (
                "start[:, :, None] <= key_position[:, None]",
                "start[:, :, None] <= key_position[:, None] + (start.max() > 6)",
            ),
        ),
        KERNELS,
    ),
    "attention_global_heads": Edit(
        KERNEL,
        (
            after(
                VISIBLE,
                """
                is_global = jnp.arange(k.shape[2]) < 2
                near = (position[:, :, None] - key_position[:, None] < 4)[:, None, None]
                scores = jnp.where(is_global[:, None, None, None] | near, scores, -1e9)
                """,
            ),
        ),
        KERNELS,
    ),
    # --- Counted several times ---
    "gathered_then_unreduced": block(
        UNREDUCED,
        HIDDEN,
        """
        level = lax.stop_gradient(jnp.square(h).mean(-1))
        level = lax.pcast(level, "t", to="unreduced")
        level = ops.psum("B/d L/c {U:t} -> B/d L/c", level)
        hidden = hidden * lax.rsqrt(1 + level)[..., None]
        """,
    ),
    "bias_unreduced": block(
        UNREDUCED,
        OUTPUT,
        'y = y + lax.pcast(0.1 * jnp.tanh(h), "t", to="unreduced")',
    ),
    "bias_in_each_part": instead(
        UNREDUCED,
        OUTPUT,
        """
        wide = jnp.concatenate([hidden, jnp.ones_like(hidden[..., :1])], axis=-1)
        w_wide = jnp.concatenate([w_down, w_down[:, :1]], axis=-1)
        y = ops.einsum_unreduced("B/d L/c G/t, M G/t -> B/d L/c M {U:t}", wide, w_wide)
        """,
    ),
    "gain_in_each_part": instead(
        UNREDUCED,
        OUTPUT,
        """
        wide = jnp.concatenate([hidden, jnp.ones_like(hidden[..., :1])], axis=-1)
        w_wide = jnp.concatenate([w_down, gain[:, None]], axis=-1)
        y = ops.einsum_unreduced("B/d L/c G/t, M G/t -> B/d L/c M {U:t}", wide, w_wide)
        """,
    ),
    "residual_added_before_the_sum": block(
        UNREDUCED, OUTPUT, 'y = y + lax.pcast(0.5 * h, "t", to="unreduced")'
    ),
    "sink_in_each_part": instead(
        UNREDUCED,
        '        sum_exp = ops.reduce_sum("B/d l/c V/t -> B/d l/c {U:t}", jnp.exp(logits))',
        """
        sink = jnp.pad(jnp.exp(logits), ((0, 0), (0, 0), (0, 1)), constant_values=1.0)
        sum_exp = ops.reduce_sum("B/d l/c G/t -> B/d l/c {U:t}", sink)
        """,
    ),
    "gain_penalty_of_each_device": instead(
        UNREDUCED,
        SUMMED,
        """
        given = batch.targets, batch.loss_mask
        objective, sums = sum_over_chunks(loss, chunks, unembedding, x, *given)
        gain = jnp.square(unembedding[0].astype(f32.dtype)).sum()
        penalty = ops.psum("{U:d,c,t} -> ", ops.reduce_sum("X/t/d -> {U:d,c,t}", gain[None]))
        objective = objective + target_count(batch) * 0.01 * penalty
        """,
    ),
    "penalty_of_each_data_part": instead(
        UNREDUCED,
        SUMMED,
        """
        given = batch.targets, batch.loss_mask
        objective, sums = sum_over_chunks(loss, chunks, unembedding, x, *given)
        squares = jnp.square(unembedding[1].astype(f32.dtype)).sum()
        penalty = ops.psum("{U:d,c,t} -> ", ops.reduce_sum("X/t/d -> {U:d,c,t}", squares[None]))
        objective = objective + target_count(batch) * 0.01 * penalty
        """,
    ),
    "penalty_of_each_microbatch": instead(
        UNREDUCED,
        SUMMED,
        """
        given = batch.targets, batch.loss_mask
        objective, sums = sum_over_chunks(loss, chunks, unembedding, x, *given)
        squares = jnp.square(weights.unembed)
        penalty = ops.psum("{U:d,c,t} -> ", ops.reduce_sum("V/t M/c/d -> {U:d,c,t}", squares))
        objective = objective + penalty
        """,
    ),
    "penalty_of_each_chunk": instead(
        UNREDUCED,
        LOSS,
        """
        total = ops.psum("{U:d,c} -> ", ops.reduce_sum("B/d l/c -> {U:d,c}", nats))
        squares = jnp.square(unembedding[1].astype(f32.dtype)).sum() / config.mesh.d
        penalty = ops.psum("{U:d,c,t} -> ", ops.reduce_sum("X/t/d -> {U:d,c,t}", squares[None]))
        total = total + 0.1 * penalty
        """,
    ),
    "one_joined_to_a_partial_sum": block(
        UNREDUCED,
        '        sum_exp = ops.reduce_sum("B/d l/c V/t -> B/d l/c {U:t}", jnp.exp(logits))',
        """
        sum_exp = jnp.pad(sum_exp[..., None], ((0, 0), (0, 0), (0, 1)), constant_values=1.0)
        sum_exp = ops.reduce_sum("B/d l/c two {U:t} -> B/d l/c {U:t}", sum_exp)
        """,
    ),
    "ones_stacked_with_a_partial_sum": block(
        UNREDUCED,
        '        sum_exp = ops.reduce_sum("B/d l/c V/t -> B/d l/c {U:t}", jnp.exp(logits))',
        """
        one = jnp.ones_like(peak)[..., None]
        sum_exp = jnp.concatenate([sum_exp[..., None], one], axis=-1)
        sum_exp = ops.reduce_sum("B/d l/c two {U:t} -> B/d l/c {U:t}", sum_exp)
        """,
    ),
    "rows_of_ones_below_a_partial_sum": block(
        UNREDUCED,
        OUTPUT,
        """
        y = jnp.pad(y, ((0, 0), (0, 0), (0, y.shape[2])), constant_values=1.0)
        y = y[..., : y.shape[2] // 2] + y[..., y.shape[2] // 2 :]
        """,
    ),
    "replicas_gathered": block(
        UNREDUCED,
        HIDDEN,
        """
        copies = ops.all_gather("B/d L/c X/t -> B/d L/c X", h)
        hidden = hidden * jax.nn.sigmoid(jax.nn.logsumexp(copies, axis=-1, keepdims=True))
        """,
    ),
    "z_loss_summed_over_t": instead(
        UNREDUCED,
        NATS,
        """
        z = ops.reduce_sum("B/d l/c T/t -> B/d l/c {U:t}", jnp.square(jnp.log(sum_exp))[..., None])
        z = ops.psum("B/d l/c {U:t} -> B/d l/c", z)
        nats = (jnp.log(sum_exp) - target_logit + 1e-2 * z) * loss_mask
        """,
    ),
    # --- Merged dimensions ---
    "softmax_over_all_heads": block(
        MERGED,
        ROTATED,
        """
        heads = q.reshape(*q.shape[:2], -1, q.shape[-1])
        q = jax.nn.softmax(heads, axis=2).reshape(q.shape)
        """,
    ),
    "norm_over_all_heads": block(
        MERGED,
        ROTATED,
        """
        heads = q.reshape(*q.shape[:2], -1)
        scale = lax.rsqrt(jnp.square(heads).mean(-1, keepdims=True) + 1e-6)
        q = (heads * scale).reshape(q.shape)
        """,
    ),
    "several_predictions_of_merged_tokens": block(
        MERGED,
        EMBEDDED,
        """
        tokens = jnp.repeat(x[:, :, None], config.n_q_per_kv, axis=2).reshape(-1, x.shape[-1])
        tokens = tokens - tokens.mean(0)
        x = tokens.reshape(*x.shape[:2], config.n_q_per_kv, -1).mean(2)
        """,
    ),
    "mean_of_all_tokens": block(
        MERGED, HIDDEN, "hidden = hidden - hidden.reshape(-1, hidden.shape[-1]).mean(0)"
    ),
    "running_mean_over_the_batch": block(
        MERGED,
        NATS,
        """
        flat = jnp.cumsum(nats.ravel()) / (1 + jnp.arange(nats.size))
        nats = nats * (1 + lax.stop_gradient(flat.reshape(nats.shape)))
        """,
    ),
    "largest_entry_of_all": block(
        MERGED, HIDDEN, "hidden = hidden / (1 + jnp.abs(lax.stop_gradient(hidden)).max())"
    ),
    # --- Custom gradients ---
    **{
        name: block(
            VJP,
            HIDDEN,
            "hidden = passed(hidden)",
            before(
                LAYER,
                f'''
                @jax.custom_vjp
                def passed(x: jax.Array) -> jax.Array:
                    """Changes only the gradient."""
                    return x


                def _passed_backward(_: None, g: jax.Array) -> tuple[jax.Array]:
                    {backward}


                passed.defvjp(lambda x: (x, None), _passed_backward)


                ''',
            ),
        )
        for name, backward in {
            "gradient_centered": "return (g - g.mean(-1, keepdims=True),)",
            "gradient_normalized": "return (g / (jnp.linalg.norm(g) + 1e-6),)",
            "gradient_clipped_by_token": (
                "return (g / (1 + jnp.linalg.norm(g, axis=-1, keepdims=True)),)"
            ),
            "gradient_in_eight_bits": (
                "return ((jnp.round(g / jnp.abs(g).max() * 127) * jnp.abs(g).max() / 127),)"
            ),
            "gradient_plus_injected_mean": "return (g + 0.5 * g.mean((0, 1)),)",
            "gradient_scaled_by_width": "return (g / g.shape[-1] ** 0.5,)",
            "gradient_with_noise": (
                "return (g * (1 + jax.random.normal(jax.random.key(0), g.shape, g.dtype)),)"
            ),
            "gradient_of_the_first_rows": "return (g.at[1:].multiply(0.5),)",
        }.items()
    },
    "gradient_injected_in_replicas": instead(
        VJP,
        WEIGHTS_OF_GATE,
        """
        h = injected(h)
        w_gate = gather("M/c/s F/t -> M F/t", w.w_gate)
        """,
        before(
            LAYER,
            '''
            @jax.custom_vjp
            def injected(x: jax.Array) -> jax.Array:
                """Adds the gradient of a penalty on the sum of the squares."""
                return x


            injected.defvjp(lambda x: (x, x), lambda x, g: (g + 1e-2 * x,))


            ''',
        ),
    ),
    "gradient_reversed_in_part_of_the_model": instead(
        VJP,
        EMBEDDED,
        """
        x = ops.psum_scatter("B/d L/c M {U:t} -> B/d L/c M/t", x)
        x = x.at[..., : x.shape[-1] // 2].set(lax.stop_gradient(x[..., : x.shape[-1] // 2]))
        """,
    ),
    # --- Random numbers ---
    "noise_of_the_part": block(
        RANDOM,
        HIDDEN,
        "hidden = hidden + 0.1 * jax.random.normal(jax.random.key(0), hidden.shape, hidden.dtype)",
    ),
    "dropout_same_on_each_device": block(
        RANDOM,
        EMBEDDED,
        "x = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, x.shape), x / 0.9, 0)",
    ),
    "dropout_of_tokens": block(
        RANDOM,
        EMBEDDED,
        """
        kept = jax.random.bernoulli(jax.random.key(0), 0.9, inputs.shape)
        x = x * kept[..., None]
        """,
    ),
    "dropout_key_of_each_device": block(
        RANDOM,
        HIDDEN,
        """
        key = jax.random.fold_in(jax.random.key(0), lax.axis_index("s"))
        key = jax.random.fold_in(key, lax.axis_index("t"))
        hidden = jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden, 0)
        """,
    ),
    "dropout_key_of_a_local_row": block(
        RANDOM,
        HIDDEN,
        """
        fold = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(0), row))
        keys = fold(jnp.arange(hidden.shape[0]))
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, hidden.shape[1:2]))(keys)
        hidden = hidden * kept[..., None]
        """,
    ),
    "dropout_key_of_the_weights": block(
        RANDOM,
        HIDDEN,
        """
        seed = lax.stop_gradient(layer.w_up[0, 0]) * 1e6
        key = jax.random.fold_in(jax.random.key(0), seed.astype(jnp.int32))
        hidden = hidden * jax.random.bernoulli(key, 0.9, (hidden.shape[1], 1))
        """,
    ),
    "bits_of_the_part": block(
        RANDOM,
        HIDDEN,
        """
        _, bits = lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), hidden.shape)
        hidden = jnp.where(bits % 10 == 0, 0, hidden)
        """,
    ),
    "stochastic_rounding_of_the_part": instead(
        RANDOM,
        UPDATE,
        """
        new = w - rate * (m * mu_scale / root + hyper.weight_decay * w)
        noise = jax.random.uniform(jax.random.key(1), w.shape)
        return jnp.floor(new * 256 + noise) / 256
        """,
    ),
    "gradient_noise_of_the_part": instead(
        RANDOM,
        CLIPPED,
        """
        def noisy(g: jax.Array) -> jax.Array:
            return g * clip + 1e-3 * jax.random.normal(jax.random.key(0), g.shape)

        grads = tree_map(noisy, raw_grads)
        """,
    ),
    "dropconnect": block(
        RANDOM,
        WEIGHTS_OF_UP,
        "w_up = w_up * jax.random.bernoulli(jax.random.key(2), 0.9, w_up.shape)",
    ),
    "gumbel_logits": block(
        RANDOM,
        LOGITS,
        "logits = logits + 0.1 * jax.random.gumbel(jax.random.key(0), logits.shape)",
    ),
    "sampled_targets": block(
        RANDOM,
        NATS,
        "nats = nats * jax.random.bernoulli(jax.random.key(0), 0.5, nats.shape)",
    ),
    "random_projection_of_the_part": block(
        RANDOM,
        HIDDEN,
        """
        signs = jax.random.rademacher(jax.random.key(3), (hidden.shape[-1],), hidden.dtype)
        hidden = hidden * signs
        """,
    ),
    # --- Means of means, microbatches, chunks ---
    "mean_of_microbatches": Edit(
        MEAN,
        (
            (
                ROWS,
                ROWS
                + "\n            own = target_count(rows)"
                + "\n            part = jax.tree.map(lambda x: x / own, part)",
            ),
            (
                COUNT,
                "    count = jnp.float32(microbatches) if microbatches > 1 else target_count(batch)",
            ),
        ),
    ),
    "mean_of_devices": instead(
        MEAN,
        NATS,
        """
        own = jnp.maximum(loss_mask.sum(), 1)
        nats = (jnp.log(sum_exp) - target_logit) * loss_mask / own * loss_mask.size
        """,
    ),
    "mean_of_rows_in_a_chunk": instead(
        MEAN,
        NATS,
        """
        own = jnp.maximum(loss_mask.sum(1, keepdims=True), 1)
        nats = (jnp.log(sum_exp) - target_logit) * loss_mask / own
        """,
    ),
    "loss_by_positions_of_the_part": block(MEAN, COUNT, "count = count * 0 + batch.targets.size"),
    "validation_by_positions_of_the_part": instead(
        MEAN, VALIDATION, "return sums.loss / batch.targets.size"
    ),
    "validation_by_count_of_a_chunk": instead(
        MEAN,
        VALIDATION,
        "return sums.loss / targets / config.mesh.d",
    ),
    "gradient_by_microbatches": block(
        MEAN,
        COUNT,
        "count = count * microbatches",
    ),
    "gradient_only_by_microbatches": instead(
        MEAN,
        TOTAL,
        """
        return sums, count, jax.tree.map(lambda g: g / count / microbatches, grads)
        """,
    ),
    "each_microbatch_clipped": block(
        MEAN,
        ROWS,
        """
        norm = jnp.sqrt(ops.sum_of_squares(Weights, part[1]))
        scale = jnp.minimum(1, 1 / norm)
        part = part[0], jax.tree.map(lambda g: g * scale, part[1])
        """,
    ),
    "each_microbatch_sign": block(MEAN, ROWS, "part = part[0], jax.tree.map(jnp.sign, part[1])"),
    "running_average_of_microbatches": instead(
        MEAN, ADDED, "return jax.tree.map(lambda a, b: 0.9 * a + b, total, part), ()"
    ),
    "average_and_half_of_microbatches": instead(
        MEAN,
        ADDED,
        "return jax.tree.map(lambda a, b: (a + b) / 2, total, part), ()",
    ),
    "sum_starts_at_the_weights": Edit(
        MEAN,
        (
            (
                ", jax.tree.map(wide, replica)",
                ", jax.tree.map(lambda w: 0.1 * w.astype(f32.dtype), replica)",
            ),
        ),
    ),
    "noise_in_each_microbatch": block(
        MEAN,
        ROWS,
        """
        shift = jnp.sin(rows.targets[0, 0].astype(f32.dtype))
        part = part[0], jax.tree.map(lambda g: g * (1 + 0.1 * shift), part[1])
        """,
    ),
    "next_target_in_the_chunk": block(
        CHUNK,
        NATS,
        """
        later = jnp.roll(targets, -1, axis=1)
        other = ops.index_unreduced("B/d l/c [V/t], B/d l/c -> B/d l/c {U:t}", logits, later)
        other = ops.psum("B/d l/c {U:t} -> B/d l/c", other)
        nats = nats + 0.3 * (jnp.log(sum_exp) - other) * loss_mask
        """,
    ),
    "smoothed_with_the_position_before": block(
        CHUNK,
        NATS,
        "nats = nats + 0.1 * jnp.pad(nats, ((0, 0), (1, 0)))[:, :-1]",
    ),
    "hardest_positions_of_a_row": block(
        CHUNK,
        NATS,
        "nats = jnp.where(nats >= jnp.median(nats, axis=1, keepdims=True), nats, 0)",
    ),
    "normalized_along_the_chunk": block(
        CHUNK,
        LOGITS,
        "logits = logits - 0.5 * logits.mean(1, keepdims=True)",
    ),
    "mean_row_of_a_microbatch": block(
        CHUNK,
        FORWARD,
        """
        rows = ops.all_gather("B/d M/t -> B M/t", x.mean(1))
        x = x - rows.mean(0)
        """,
    ),
    "other_rows_of_a_microbatch": block(
        CHUNK,
        FORWARD,
        """
        squares = ops.reduce_sum("B/d L/c M/t -> M/t {U:d,c}", jnp.square(x))
        squares = ops.psum("M/t {U:d,c} -> M/t", squares) / target_count(batch)
        x = x * lax.rsqrt(squares + 1e-3).astype(compute.dtype)
        """,
    ),
    "loss_below_that_of_the_batch": block(
        CHUNK,
        NATS,
        """
        total = ops.psum("T {U:d,c} -> T", ops.reduce_sum("B/d l/c T -> T {U:d,c}", nats[..., None]))
        nats = jnp.where(nats * loss_mask.size * config.mesh.d > total, nats, 0.5 * nats)
        """,
    ),
    "focal_by_the_largest_loss_of_a_row": block(
        CHUNK, NATS, "nats = nats * nats / (1 + nats.max(1, keepdims=True))"
    ),
    # --- Optimizers ---
    **{
        name: instead(OPTIMIZER, UPDATE, code)
        for name, code in {
            "lamb": """
            change = m * mu_scale / root + hyper.weight_decay * w
            trust = jnp.linalg.norm(w) / (jnp.linalg.norm(change) + 1e-6)
            return w - rate * trust * change
            """,
            "lars_by_vdot": """
            trust = jnp.sqrt(jnp.vdot(w, w) / (jnp.vdot(m, m) + 1e-12))
            return w - rate * 1e-3 * trust * m
            """,
            "largest_update": """
            change = m * mu_scale / root
            change = change / jnp.max(jnp.abs(change))
            return w - rate * (change + hyper.weight_decay * w)
            """,
            "update_clipped_by_its_rms": """
            change = m * mu_scale / root
            change = change / jnp.maximum(0.1, jnp.sqrt(jnp.mean(change * change)))
            return w - rate * (change + hyper.weight_decay * w)
            """,
            "cautious": """
            change = m * mu_scale / root
            mask = (m * w > 0).astype(w.dtype)
            change = change * mask / jnp.maximum(mask.mean(), 1e-3)
            return w - rate * (change + hyper.weight_decay * w)
            """,
            "blocks_of_moments_in_eight_bits": """
            blocks = m.reshape(-1, 6)
            top = jnp.abs(blocks).max(-1, keepdims=True) + 1e-12
            m = (jnp.round(blocks / top * 7) / 7 * top).reshape(m.shape)
            return w - rate * (m * mu_scale / root + hyper.weight_decay * w)
            """,
            "moments_in_eight_bits": """
            top = jnp.abs(m).max() + 1e-12
            m = jnp.round(m / top * 127) / 127 * top
            return w - rate * (m * mu_scale / root + hyper.weight_decay * w)
            """,
            "sparse_update": """
            change = m * mu_scale / root
            least = jnp.sort(jnp.abs(change).ravel())[change.size // 2]
            change = jnp.where(jnp.abs(change) >= least, change, 0)
            return w - rate * (change + hyper.weight_decay * w)
            """,
            "percentile_clipping": """
            change = m * mu_scale / root
            limit = jnp.quantile(jnp.abs(change), 0.9)
            return w - rate * (jnp.clip(change, -limit, limit) + hyper.weight_decay * w)
            """,
            "frozen_if_small": """
            change = m * mu_scale / root + hyper.weight_decay * w
            return jnp.where(jnp.mean(w) > 0, w - rate * change, w)
            """,
            "factored_along_the_part": """
            if w.ndim > 1:
                rows, columns = v.mean(-1, keepdims=True), v.mean(-2, keepdims=True)
                root = jnp.sqrt(rows * columns / rows.mean(-2, keepdims=True)) + 1e-6
            return w - rate * (m * mu_scale / root + hyper.weight_decay * w)
            """,
            "factored_by_einsum": """
            if w.ndim == 3:
                rows = jnp.einsum("lij->li", v) / v.shape[2]
                root = jnp.sqrt(rows)[..., None] + 1e-6
            return w - rate * (m * mu_scale / root + hyper.weight_decay * w)
            """,
            "shampoo_of_the_part": """
            if w.ndim == 3:
                gram = m @ jnp.swapaxes(m, 1, 2) + 1e-4 * jnp.eye(m.shape[1])
                m = jnp.linalg.solve(gram, m) * 1e-5
            return w - rate * (m * mu_scale / root + hyper.weight_decay * w)
            """,
            "gram_by_dot_general": """
            if w.ndim == 2:
                gram = lax.dot_general(m, m, (((0,), (0,)), ((), ())))
                m = m @ gram / (jnp.trace(gram) + 1e-9)
            return w - rate * (m * mu_scale / root + hyper.weight_decay * w)
            """,
            "unit_weights": """
            new = w - rate * (m * mu_scale / root)
            return new / jnp.sqrt(jnp.sum(jnp.square(new), axis=-1, keepdims=True))
            """,
            "weights_clipped_to_three_deviations": """
            new = w - rate * (m * mu_scale / root)
            return jnp.clip(new, -2 * new.std(), 2 * new.std())
            """,
            "decay_to_the_mean": """
            decay = hyper.weight_decay * (w - jnp.average(w))
            return w - rate * (m * mu_scale / root + decay)
            """,
            "cumulated": """
            change = jnp.cumsum(m, axis=-1) / (1 + jnp.arange(m.shape[-1]))
            return w - rate * (change * mu_scale / root + hyper.weight_decay * w)
            """,
            "logsumexp_scale": """
            scale = jax.nn.logsumexp(jnp.abs(w))
            return w - rate / scale * (m * mu_scale / root + hyper.weight_decay * w)
            """,
            "neighbors_of_a_flat_weight": """
            flat = m.ravel()
            m = (0.5 * flat + 0.5 * jnp.roll(flat, 1)).reshape(m.shape)
            return w - rate * (m * mu_scale / root + hyper.weight_decay * w)
            """,
            "while_loop_of_a_part": """
            def halve(change: jax.Array) -> jax.Array:
                return change / 2

            change = m * mu_scale / root
            change = lax.while_loop(lambda u: jnp.any(jnp.abs(u) > 0.5), halve, change)
            return w - rate * (change + hyper.weight_decay * w)
            """,
            "condition_on_a_part": """
            def decayed(w: jax.Array) -> jax.Array:
                return w * (1 - rate * hyper.weight_decay)

            large = jnp.any(jnp.abs(w) > 1.2)
            w = lax.cond(large, decayed, lambda w: w, w)
            return w - rate * (m * mu_scale / root)
            """,
        }.items()
    },
    "clipped_by_local_norm": instead(
        OPTIMIZER,
        CLIPPED,
        """
        own = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(raw_grads)))
        grads = tree_map(lambda g: g * jnp.minimum(1, hyper.grad_clip / own), raw_grads)
        """,
    ),
    "each_tensor_clipped": instead(
        OPTIMIZER,
        CLIPPED,
        "grads = tree_map(lambda g: g / jnp.maximum(1, 10 * jnp.linalg.norm(g)), raw_grads)",
    ),
    "gradient_centralized": instead(
        OPTIMIZER,
        CLIPPED,
        "grads = tree_map(lambda g: (g - g.mean(-1, keepdims=True)) * clip, raw_grads)",
    ),
    "adaptive_clipping_by_rows": instead(
        OPTIMIZER,
        CLIPPED,
        """
        def adapted(g: jax.Array, w: jax.Array) -> jax.Array:
            limit = 0.01 * jnp.linalg.norm(w, axis=-1, keepdims=True)
            return g * jnp.minimum(1, limit / (jnp.linalg.norm(g, axis=-1, keepdims=True) + 1e-9))

        grads = tree_map(adapted, raw_grads, state.weights)
        """,
    ),
    "layerwise_second_moment": instead(
        OPTIMIZER,
        NU,
        "nu = jax.tree.map(lambda v, g: hyper.nu.next(v, jnp.mean(g * g)), nu, grads)",
    ),
    "max_norm_by_concatenation": instead(
        OPTIMIZER,
        CLIPPED,
        """
        flat = jnp.concatenate([g.ravel() for g in jax.tree.leaves(raw_grads)])
        grads = tree_map(lambda g: g * clip / (1 + jnp.abs(flat).max()), raw_grads)
        """,
    ),
    "norm_counts_parts_as_whole": Edit(
        OPTIMIZER,
        (
            (
                "grad_norm = jnp.sqrt(ops.sum_of_squares(Weights, raw_grads))",
                "squares = jnp.square(raw_grads.embed)\n"
                '    own = ops.reduce_sum("V/t X -> V/t", squares)[:, None]\n'
                '    total = ops.psum("T {U:t} -> T", ops.reduce_sum("V/t T -> T {U:t}", own))\n'
                '    total = ops.reduce_max("W/d -> ", total)\n'
                "    grad_norm = jnp.sqrt(total)",
            ),
        ),
    ),
    "norm_is_the_sum_of_norms": Edit(
        OPTIMIZER,
        (
            (
                "grad_norm = jnp.sqrt(ops.sum_of_squares(Weights, raw_grads))",
                "own = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(raw_grads)))\n"
                '    grad_norm = ops.psum("{U:d,c,t} -> ", ops.reduce_sum("X/t/d -> '
                '{U:d,c,t}", own[None]))',
            ),
        ),
    ),
    "average_weights_by_mesh": Edit(
        "average of the weights",
        (
            (
                STORED_NU,
                STORED_NU + "\n    average: Weights",
            ),
            (FRESH, FRESH.replace("[0])", "[0], zeros)")),
            (TYPE, TYPE.replace("[0])", "[0], weights)")),
            (
                STATE,
                "    decay = 0.99 ** (1 / config.mesh.d)\n"
                "    average = tree_map(lambda a, w: decay * a + (1 - decay) * w,"
                " state.average, weights)\n" + STATE.replace("nu)", "nu, average)"),
            ),
        ),
    ),
    "average_weights_by_distance": Edit(
        "average of the weights",
        (
            (
                STORED_NU,
                STORED_NU + "\n    average: Weights",
            ),
            (FRESH, FRESH.replace("[0])", "[0], zeros)")),
            (TYPE, TYPE.replace("[0])", "[0], weights)")),
            (
                STATE,
                "    def pulled(a: jax.Array, w: jax.Array) -> jax.Array:\n"
                "        return a + (w - a) / (1 + jnp.sum((w - a) ** 2))\n\n"
                "    average = tree_map(pulled, state.average, weights)\n"
                + STATE.replace("nu)", "nu, average)"),
            ),
        ),
    ),
    # --- Statistics of a part in the model ---
    "residual_normalized_in_parts": block(
        LOCAL,
        EMBEDDED,
        "x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + config.norm_eps)",
    ),
    "result_normalized_in_parts": instead(
        LOCAL,
        RESULT,
        """
        y = ops.psum_scatter("B/d L/c M {U:t} -> B/d L/c M/t", y)
        y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + config.norm_eps)
        return x + y, (new_cache, routed)
        """,
    ),
    "query_norm_over_heads": block(
        LOCAL,
        ROTATED,
        """
        q = q * lax.rsqrt(jnp.square(q).mean((2, 3, 4), keepdims=True) + config.norm_eps)
        k = k * lax.rsqrt(jnp.square(k).mean((2, 3), keepdims=True) + config.norm_eps)
        """,
    ),
    "logits_normalized": block(
        LOCAL,
        LOGITS,
        "logits = 8 * logits / jnp.linalg.norm(logits, axis=-1, keepdims=True)",
    ),
    "hidden_standardized": block(LOCAL, HIDDEN, "hidden = jax.nn.standardize(hidden, axis=-1)"),
    "gate_softmax": instead(LOCAL, HIDDEN, "hidden = jax.nn.softmax(gate, axis=-1) * up"),
    "smoothing_by_local_vocabulary": instead(
        LOCAL,
        NATS,
        """
        mean = ops.psum(
            "B/d l/c {U:t} -> B/d l/c", ops.reduce_sum("B/d l/c V/t -> B/d l/c {U:t}", logits)
        ) / logits.shape[-1]
        nats = (jnp.log(sum_exp) - 0.9 * target_logit - 0.1 * mean) * loss_mask
        """,
    ),
    "smoothing_by_means": instead(
        LOCAL,
        NATS,
        """
        mean = ops.reduce_sum("B/d l/c T/t -> B/d l/c {U:t}", logits.mean(-1, keepdims=True))
        mean = ops.psum("B/d l/c {U:t} -> B/d l/c", mean)
        nats = (jnp.log(sum_exp) - 0.9 * target_logit - 0.1 * mean) * loss_mask
        """,
    ),
    "weights_in_eight_bits_by_part": block(
        LOCAL,
        WEIGHTS_OF_UP,
        """
        scale = lax.stop_gradient(jnp.abs(w_up).max()) / 7
        w_up = w_up + lax.stop_gradient(jnp.round(w_up / scale) * scale - w_up)
        """,
    ),
    "weights_ternary_by_part": block(
        LOCAL,
        WEIGHTS_OF_UP,
        """
        scale = lax.stop_gradient(jnp.abs(w_up).mean())
        ternary = jnp.clip(jnp.round(w_up / scale), -1, 1) * scale
        w_up = w_up + lax.stop_gradient(ternary - w_up)
        """,
    ),
    "activations_in_eight_bits_by_part": block(
        LOCAL,
        HIDDEN,
        """
        scale = lax.stop_gradient(jnp.abs(hidden).max(-1, keepdims=True)) / 7 + 1e-6
        hidden = hidden + lax.stop_gradient(jnp.round(hidden / scale) * scale - hidden)
        """,
    ),
    "batch_statistics": block(
        LOCAL, HIDDEN, "hidden = (hidden - hidden.mean((0, 1))) / (hidden.std((0, 1)) + 1e-3)"
    ),
    "batch_statistics_by_hand": block(
        LOCAL,
        HIDDEN,
        """
        rows = hidden.reshape(-1, hidden.shape[-1])
        mean = jnp.ones((1, rows.shape[0]), rows.dtype) @ rows / rows.shape[0]
        hidden = hidden - mean
        """,
    ),
    "documents_counted_on_the_device": block(
        LOCAL,
        FORWARD,
        """
        last = jnp.max(batch.start)
        x = x + (batch.start / (1 + last))[..., None].astype(compute.dtype)
        """,
    ),
    "longest_document_of_the_device": block(
        LOCAL,
        FORWARD,
        """
        padded = 10 * jnp.sum(~batch.loss_mask)
        x = x.at[..., 0].add(jnp.log1p(padded).astype(compute.dtype))
        """,
    ),
    "position_offset_by_row": block(
        LOCAL,
        EMBEDDED,
        """
        offset = position + 18 * jnp.arange(position.shape[0])[:, None].astype(u32.dtype)
        x = x + jnp.sin(offset / 10)[..., None].astype(compute.dtype)
        """,
    ),
    "position_offset_by_device": block(
        LOCAL,
        EMBEDDED,
        """
        offset = position + 18 * lax.axis_index("s").astype(u32.dtype)
        x = x + jnp.sin(offset / 10)[..., None].astype(compute.dtype)
        """,
    ),
    "hidden_scaled_by_its_norm_through_vmap": block(
        LOCAL,
        HIDDEN,
        """
        norm = jax.vmap(jax.vmap(lambda token: jnp.sqrt(jnp.vdot(token, token) + 1e-6)))
        hidden = hidden / (1 + norm(hidden)[..., None])
        """,
    ),
    "neurons_mixed_by_a_scan": block(
        LOCAL,
        HIDDEN,
        """
        def follow(last: jax.Array, now: jax.Array) -> tuple[jax.Array, jax.Array]:
            last = 0.5 * last + now
            return last, last

        columns = jnp.moveaxis(hidden, -1, 0)
        _, columns = lax.scan(follow, jnp.zeros_like(columns[0]), columns)
        hidden = jnp.moveaxis(columns, 0, -1)
        """,
    ),
    "neurons_mixed_by_associative_scan": block(
        LOCAL,
        HIDDEN,
        "hidden = hidden + 0.1 * lax.associative_scan(jnp.maximum, hidden, axis=-1)",
    ),
    "first_neuron_gates_all": block(
        LOCAL, HIDDEN, "hidden = hidden * jax.nn.sigmoid(hidden[..., :1])"
    ),
    "first_head_gates_all": block(
        LOCAL, ATTEND, "mixed = mixed * jax.nn.sigmoid(mixed[:, :, :, :1])"
    ),
    "first_channel_is_a_register": block(LOCAL, EMBEDDED, "x = x.at[..., 0].set(1)"),
    "first_row_is_the_anchor": block(LOCAL, EMBEDDED, "x = x - 0.1 * x[:1]"),
    "strided_neurons": block(LOCAL, HIDDEN, "hidden = hidden.at[..., ::5].multiply(0.5)"),
    "likeliest_of_the_part_penalized": block(
        LOCAL,
        LOGITS,
        "logits = logits - (logits == logits.max(-1, keepdims=True))",
    ),
    "largest_logits_of_the_part": block(
        LOCAL,
        LOGITS,
        """
        least = lax.top_k(lax.stop_gradient(logits), 8)[0][..., -1:]
        logits = jnp.where(logits >= least, logits, logits - 2)
        """,
    ),
    "balance_of_the_part": block(
        LOCAL,
        HIDDEN,
        """
        use = jax.nn.softmax(h[..., :8].astype(f32.dtype), axis=-1)
        balance = jnp.square(use.mean((0, 1))).sum()
        hidden = hidden * (1 + balance).astype(hidden.dtype)
        """,
    ),
    # --- Metrics ---
    **{
        name: Edit(
            METRIC,
            (
                ('    norms: f32["N"]', '    extra: f32[""]\n    norms: f32["N"]'),
                (
                    METRICS,
                    indented(METRICS, code)
                    + "\n"
                    + METRICS.replace("(", "(\n        extra=extra,"),
                ),
            ),
        )
        for name, code in {
            "largest_gradient_norm": """
            own = jnp.linalg.norm(raw_grads.embed)
            extra = ops.reduce_max("X/t/d -> ", own[None])
            """,
            "mean_weight": """
            own = mu.embed.mean()[None]
            extra = ops.psum("{U:d,c,t} -> ", ops.reduce_sum("X/t/d -> {U:d,c,t}", own))
            """,
            "targets_of_a_device": """
            own = batch.loss_mask.sum().astype(f32.dtype)
            extra = ops.reduce_max("X/d -> ", own[None])
            """,
            "tokens_per_device": """
            extra = jnp.float32(batch.targets.size)
            """,
            "deviation_of_the_parts": """
            own = weights.layers.w_up.std()
            extra = ops.psum("{U:d,c,t} -> ", ops.reduce_sum("X/t/d -> {U:d,c,t}", own[None]))
            extra = extra / (config.mesh.d * config.mesh.t)
            """,
            "median_of_the_parts": """
            own = jnp.median(jnp.abs(weights.unembed))
            extra = ops.reduce_max("X/t/d -> ", own[None])
            """,
            "rate_times_devices": """
            extra = rate * config.mesh.d
            """,
        }.items()
    },
    "norms_by_devices": Edit(
        METRIC,
        (
            (
                "norms=jnp.sqrt(jnp.concatenate(squares))",
                "norms=jnp.sqrt(jnp.concatenate(squares) / config.mesh.t)",
            ),
        ),
    ),
    "loss_metric_by_microbatches": Edit(
        METRIC,
        ((MEANS, MEANS.replace("count", "count / config.training.microbatches")),),
    ),
    # --- Initial state ---
    "residual_scale_by_mesh": Edit(
        INIT,
        (
            (
                'residual_scale = (2 * size["layers"]) ** -0.5',
                'residual_scale = (2 * size["layers"] * config.mesh.t) ** -0.5',
            ),
        ),
    ),
    "seed_by_mesh": Edit(
        INIT,
        (
            (
                "jax.random.key(config.training.seed)",
                "jax.random.key(config.training.seed + config.mesh.d)",
            ),
        ),
    ),
    "seed_by_device_count": Edit(
        INIT,
        (
            (
                "jax.random.key(config.training.seed)",
                "jax.random.key(config.training.seed + jax.device_count())",
            ),
        ),
    ),
    "keys_by_data_parts": Edit(
        INIT,
        (
            (
                "keys = jax.random.split(jax.random.key(config.training.seed), len(shapes))",
                "key = jax.random.key(config.training.seed)\n"
                "    keys = jax.random.split(key, len(shapes) * config.mesh.d)[-len(shapes) :]",
            ),
        ),
    ),
    "moments_start_at_the_microbatches": Edit(
        INIT,
        (
            (
                "jax.jit(lambda: fresh_state(init_weights(config), config), out",
                "jax.jit(\n        lambda: dataclasses.replace(\n"
                "            fresh_state(init_weights(config), config),\n"
                "            step=jnp.uint32(config.training.microbatches),\n"
                "        ), out",
            ),
        ),
    ),
    # --- Generation differs from training ---
    **{
        name: block(MIXES, line, code)
        for name, line, code in [
            (
                "token_shift",
                EMBEDDED,
                "x = x + 0.5 * jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]",
            ),
            (
                "convolution_along_the_sequence",
                WEIGHTS_OF_GATE,
                """
                padded = jnp.pad(h, ((0, 0), (2, 0), (0, 0)))
                h = (h + padded[:, 1:-1] + padded[:, :-2]) / 3
                """,
            ),
            (
                "convolved_keys",
                ROTATED,
                "k = 0.7 * k + 0.3 * jnp.pad(k, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]",
            ),
            (
                "mean_over_the_sequence",
                HIDDEN,
                "hidden = hidden * jax.nn.sigmoid(hidden.mean(1, keepdims=True))",
            ),
            (
                "running_mean",
                HIDDEN,
                """
                count = 1 + jnp.arange(hidden.shape[1])[:, None]
                hidden = hidden + jnp.cumsum(hidden, axis=1) / count.astype(hidden.dtype)
                """,
            ),
            (
                "recurrence",
                HIDDEN,
                """
                def follow(last: jax.Array, now: jax.Array) -> tuple[jax.Array, jax.Array]:
                    last = 0.5 * last + now
                    return last, last

                steps = jnp.moveaxis(hidden, 1, 0)
                _, steps = lax.scan(follow, jnp.zeros_like(steps[0]), steps)
                hidden = jnp.moveaxis(steps, 0, 1)
                """,
            ),
            (
                "length_of_the_row",
                ROTATED,
                "q = q * jnp.log1p(q.shape[1])",
            ),
            (
                "arange_for_position",
                EMBEDDED,
                """
                angle = jnp.arange(inputs.shape[1]) / 10
                x = x + jnp.sin(angle)[:, None].astype(compute.dtype)
                """,
            ),
            (
                "rope_from_zero",
                EMBEDDED,
                "position = jnp.broadcast_to(jnp.arange(inputs.shape[1], "
                "dtype=u32.dtype), inputs.shape)",
            ),
            ("first_token_is_a_register", EMBEDDED, "x = x + 0.3 * x[:, :1]"),
            (
                "normalized_along_the_sequence",
                ATTEND,
                "mixed = mixed / (1 + jnp.abs(mixed).max(1, keepdims=True))",
            ),
            (
                "same_token_as_before",
                EMBEDDED,
                """
                earlier = jnp.pad(inputs[:, :-1], ((0, 0), (1, 0)))
                x = jnp.where((inputs == earlier)[..., None], 0.5 * x, x)
                x = x + 0.01 * earlier[..., None].astype(compute.dtype)
                """,
            ),
            (
                "last_position_is_special",
                HIDDEN,
                "hidden = hidden.at[:, -1].multiply(0.5)",
            ),
        ]
    },
    "training_alone_scales_the_embedding": instead(
        GENERATION,
        DECODED,
        """
        x, (_, routed) = decoder(weights, batch.inputs, batch.position, attend, (), config, routing)
        x = x * config.d_model**0.5 - x.astype(compute.dtype) ** 2
        """,
    ),
    "training_alone_scales_queries": Edit(
        GENERATION,
        (("            q, k, v, start,", "            0.5 * q, k, v, start,"),),
    ),
    "training_alone_caps_the_residual": Edit(
        GENERATION,
        (
            (
                DECODED,
                DECODED + "\n    x = 3 * jnp.tanh(x / 3)",
            ),
        ),
    ),
    **{
        name: Edit(GENERATION, ((old, new),), GENERATE)
        for name, old, new in [
            ("decode_sees_itself_not", "visible = (age >= 0)", "visible = (age > 0)"),
            (
                "decode_window_is_shorter",
                "(age < min(window, config.training.tokens.len))",
                "(age < min(window, config.training.tokens.len) - 1)",
            ),
            (
                "decode_sees_the_future",
                "visible = (age >= 0) & (age",
                "visible = (age",
            ),
            ("decode_scale", "math.sqrt(q.shape[-1])", "math.sqrt(q.shape[-1] * q.shape[2])"),
            (
                "decode_scale_by_local_heads",
                "math.sqrt(q.shape[-1])",
                "math.sqrt(q.shape[-1] * q.shape[3] / 12)",
            ),
            (
                "decode_scores_centered_over_heads",
                "        scores = jnp.where(visible[:, None, None], scores",
                "        scores = scores - scores.mean(2, keepdims=True)\n"
                "        scores = jnp.where(visible[:, None, None], scores",
            ),
            (
                "decode_sink",
                "probabilities = jax.nn.softmax(scores, axis=-1)",
                "probabilities = jax.nn.softmax(jnp.pad(scores, ((0, 0),) * 4 + ((0, "
                "1),)))[..., :-1]",
            ),
            ("cache_is_late", "part, first, axis=-3)", "part, first + 1, axis=-3)"),
            (
                "cache_in_eight_bits_by_part",
                "        new = Cache(k, v)\n",
                "        scale = jnp.abs(k).max() / 7\n"
                "        new = Cache(jnp.round(k / scale) * scale, v)\n",
            ),
            ("cache_swaps", "new = Cache(k, v)", "new = Cache(v, k)"),
            (
                "cache_of_the_first_layer",
                "return x, insert(cache, new, first)",
                "new = jax.tree.map(lambda part: part.at[1:].set(part[:1]), new)\n"
                "    return x, insert(cache, new, first)",
            ),
            (
                "samples_from_a_part_of_the_vocabulary",
                'logits = ops.all_gather("B/d V/t -> B/d V", logits)[:, how',
                "logits = logits[:, how",
            ),
            (
                "samples_with_draws_by_column",
                "    draws = 1 - np.asarray(jax.vmap(lambda key: "
                "jax.random.uniform(key, (tokens,)))(keys))",
                "    draws = 1 - np.asarray(jax.random.uniform(jax.random.key(seed), "
                "(tokens, rows))).T",
            ),
            (
                "samples_with_a_seed_by_mesh",
                "jax.random.key(seed), jnp.array(numbers)",
                'jax.random.key(seed + mesh_shape()["s"]), jnp.array(numbers)',
            ),
            (
                "samples_colder_with_more_rows",
                "probabilities = jax.nn.softmax(falling[:, : how.top_k] / "
                "how.temperature, axis=-1)",
                "colder = how.temperature / falling.shape[0]\n"
                "    probabilities = jax.nn.softmax(falling[:, : how.top_k] / colder, axis=-1)",
            ),
            (
                "samples_see_the_batch",
                "    falling, indices",
                "    logits = logits - logits.mean(0)\n    falling, indices",
            ),
            (
                "prefill_reads_the_first_position",
                "x[:, -1:], config.model",
                "x[:, :1], config.model",
            ),
            (
                "decode_is_one_position_late",
                "here = np.int32(length + i - 1)",
                "here = np.int32(length + i)",
            ),
        ]
    },
    "group_size_that_divides": block(
        BRANCH,
        HIDDEN,
        """
        size = next(n for n in (32, 24, 16, 12, 8, 4, 2, 1) if hidden.shape[-1] % n == 0)
        groups = hidden.reshape(*hidden.shape[:-1], -1, size)
        hidden = (groups - groups.mean(-1, keepdims=True)).reshape(hidden.shape)
        """,
    ),
    "decay_large_tensors": instead(
        BRANCH,
        UPDATE,
        """
        decay = hyper.weight_decay if w.size > 1000 else 0
        return w - rate * (m * mu_scale / root + decay * w)
        """,
    ),
}

PART_OP = before(
    LAYER,
    '''
    @ops.define_op
    def part(call: ops.Call, x: jax.Array) -> jax.Array:
        """Takes each device's own part of what all devices hold: part("M -> M/t/c/d", x)."""
        (given,), wanted = call.operands, call.result
        for i, (whole, split) in enumerate(zip(given.dims, wanted.dims, strict=True)):
            for axis in split.axes[len(whole.axes) :]:
                size = x.shape[i] // lax.axis_size(axis)
                x = lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, axis=i)
        return x


    ''',
)
LOSS_OF_ROWS = (
    (
        'batch: TokenBatch, count: f32[""], config: Config\n)',
        'batch: TokenBatch, count: f32[""], config: Config, rows: Any = None\n)',
    ),
    ("total = value_and_grads(batch)", "total = value_and_grads(batch, rows=ids)"),
    ("value_and_grads(rows))", "value_and_grads(rows[0], rows=rows[1]))"),
    (
        "        zeros = (jnp",
        "        parts = parts, ids.reshape(microbatches, -1)\n        zeros = (jnp",
    ),
    after(
        "    microbatches = config.training.microbatches",
        'ids = row_numbers("B/d L/c -> B/d", batch.inputs)',
    ),
    before(
        LAYER,
        '''
        @ops.define_op
        def row_numbers(call: ops.Call, x: jax.Array) -> jax.Array:
            """The number in the batch of each of a device's rows."""
            first = lax.axis_index("s") * x.shape[0]
            return first + jnp.arange(x.shape[0])


        ''',
    ),
)
METRIC_FIELD = ('    norms: f32["N"]', '    extra: f32[""]\n    norms: f32["N"]')


def metric(code: str) -> Edit:
    """Adds a metric, computed by `code`."""
    returned = METRICS.replace("(", "(\n        extra=extra,")
    return Edit("metric", (METRIC_FIELD, (METRICS, f"{indented(METRICS, code)}\n{returned}")))


def quantized(scale: str) -> str:
    return f"""
    scale = lax.stop_gradient({scale}) / 7 + 1e-6
    w_up = w_up + lax.stop_gradient(jnp.round(w_up / scale) * scale - w_up)
    """


FACTORED = """
def factored(v: jax.Array) -> jax.Array:
    rows = ops.reduce_sum("layers M/c/d F/t -> layers M/c/d {U:t}", v)
    rows = ops.psum("layers M/c/d {U:t} -> layers M/c/d", rows)
    columns = ops.reduce_sum("layers M/c/d F/t -> layers F/t {U:d,c}", v)
    columns = ops.psum("layers F/t {U:d,c} -> layers F/t", columns)
    total = ops.psum("layers {U:d,c} -> layers", ops.reduce_sum("layers M/c/d -> layers {U:d,c}", rows))
    return rows[:, :, None] * columns[:, None] / (total[:, None, None] + 1e-20)

layers = dataclasses.replace(
    nu.layers,
    w_gate=factored(nu.layers.w_gate),
    w_up=factored(nu.layers.w_up),
    w_down=factored(nu.layers.w_down),
)
nu = dataclasses.replace(nu, layers=layers)
"""

# Wrong, and not refused: a number from the mesh is in a limit that no tiny run reaches.
NOT_PROMISED: dict[str, Edit] = {
    "warmup_in_local_tokens": block(
        MESH,
        CLIPPED,
        """
        tokens = config.training.tokens
        seen = (state.step + 1) * tokens.batch * tokens.len // config.mesh.d
        rate = hyper.learning_rate * jnp.minimum(1, seen / 2000)
        hyper = dataclasses.replace(hyper, learning_rate=rate)
        """,
    ),
}

# The same of a limit on a part's entries, and of how generation's loop on the host calls its step,
# which tests/tools/test_generate.py compares with an oracle.
for name in (
    "condition_on_a_part",
    "samples_with_draws_by_column",
    "samples_with_a_seed_by_mesh",
    "samples_colder_with_more_rows",
    "prefill_reads_the_first_position",
    "decode_is_one_position_late",
):
    NOT_PROMISED[name] = WRONG.pop(name)

RIGHT: dict[str, Edit] = {
    # --- Activations, elementwise ---
    "gelu": instead("activation", HIDDEN, "hidden = jax.nn.gelu(gate) * up"),
    "squared_relu": instead(
        "activation", HIDDEN, "hidden = jnp.square(jax.nn.relu(up)) + 0 * gate"
    ),
    "clipped_swiglu": instead(
        "activation",
        HIDDEN,
        "hidden = jnp.minimum(gate, 7) * jax.nn.sigmoid(1.7 * gate) * (up + 1)",
    ),
    "xielu_by_where": instead(
        "activation",
        HIDDEN,
        "hidden = jnp.where(gate > 0, gate * gate + gate, jnp.expm1(gate)) * up",
    ),
    "rows_one_by_one": instead(
        "loop",
        HIDDEN,
        "hidden = lax.map(lambda row: jax.nn.silu(row[0]) * row[1], (gate, up))",
    ),
    "heads_one_by_one": block(
        "loop",
        ATTEND,
        """
        heads = lax.map(lambda head: jnp.tanh(head), jnp.moveaxis(mixed, 3, 0))
        mixed = jnp.moveaxis(heads, 0, 3)
        """,
    ),
    "recomputed_activation": instead(
        "recomputation",
        HIDDEN,
        "hidden = jax.checkpoint(lambda gate, up: jax.nn.silu(gate) * up)(gate, up)",
    ),
    "vmapped_activation": instead(
        "loop", HIDDEN, "hidden = jax.vmap(lambda gate, up: jax.nn.silu(gate) * up)(gate, up)"
    ),
    "pairs_of_neurons": block(
        "reshape",
        HIDDEN,
        """
        pairs = hidden.reshape(*hidden.shape[:2], -1, 2)
        hidden = (pairs - pairs.mean(-1, keepdims=True)).reshape(hidden.shape)
        """,
    ),
    "maxout_of_pairs": block(
        "reshape",
        HIDDEN,
        """
        pairs = rearrange(hidden, "B L (F two) -> B L F two", two=2)
        hidden = (pairs + pairs.max(-1, keepdims=True)).reshape(hidden.shape)
        """,
    ),
    "neighbors_exchanged": block(
        "reshape",
        HIDDEN,
        """
        odd = jnp.stack([hidden[..., 1::2], hidden[..., ::2]], axis=-1)
        hidden = hidden + 0.5 * odd.reshape(hidden.shape)
        """,
    ),
    "centered_over_the_whole_width": block(
        "whole dimension",
        HIDDEN,
        """
        whole = ops.all_gather("B/d L/c F/t -> B/d L/c F", hidden)
        hidden = hidden - whole.mean(-1, keepdims=True)
        """,
    ),
    "softmax_of_neurons_by_own_part": block(
        "whole dimension",
        HIDDEN,
        """
        whole = jax.nn.softmax(ops.all_gather("B/d L/c F/t -> B/d L/c F", hidden), axis=-1)
        hidden = part("B/d L/c F -> B/d L/c F/t", whole)
        """,
        PART_OP,
    ),
    "softmax_of_neurons_by_axis_index": block(
        "whole dimension",
        HIDDEN,
        """
        whole = jax.nn.softmax(ops.all_gather("B/d L/c F/t -> B/d L/c F", hidden), axis=-1)
        first = lax.axis_index("t") * hidden.shape[-1]
        hidden = lax.dynamic_slice_in_dim(whole, first, hidden.shape[-1], axis=-1)
        """,
    ),
    "float8_by_cast": block(
        "rounding",
        HIDDEN,
        """
        narrow = hidden.astype(jnp.float8_e4m3fn).astype(hidden.dtype)
        hidden = hidden + lax.stop_gradient(narrow - hidden)
        """,
    ),
    "eight_bits_by_row_of_the_weights": block(
        "rounding", WEIGHTS_OF_UP, quantized("jnp.abs(w_up).max(0, keepdims=True)")
    ),
    "eight_bits_by_tensor": block(
        "rounding",
        WEIGHTS_OF_UP,
        quantized('ops.reduce_max("X/d F/t -> ", lax.stop_gradient(jnp.abs(w.w_up)))'),
    ),
    "noise_by_token_and_position": block(
        "random numbers",
        EMBEDDED,
        """
        seed = (inputs * 40503 + position * 30103) % 1000
        x = x * (1 + 0.1 * jnp.cos(seed.astype(f32.dtype)))[..., None].astype(compute.dtype)
        """,
    ),
    "dropout_by_content_of_the_row": block(
        "random numbers",
        FORWARD,
        """
        def kept(row: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(0), row.sum())
            return jax.random.bernoulli(key, 0.9, row.shape)

        x = x * jax.vmap(kept)(batch.targets)[..., None]
        """,
    ),
    "dropout_by_row_number": block(
        "random numbers",
        FORWARD,
        """
        if rows is not None:  # not in validation
            def kept(row: jax.Array) -> jax.Array:
                key = jax.random.fold_in(jax.random.key(0), row)
                return jax.random.bernoulli(key, 0.9, batch.targets.shape[1:])

            x = x * jax.vmap(kept)(rows)[..., None]
        """,
        *LOSS_OF_ROWS,
    ),
    "rows_weighed_by_number": block(
        "random numbers",
        FORWARD,
        """
        if rows is not None:
            x = x + (rows / 10)[:, None, None].astype(compute.dtype)
        """,
        *LOSS_OF_ROWS,
    ),
    "same_random_signs_in_all_heads": instead(
        "random numbers",
        ROTATED,
        """
        q, k = rope(q, k, sin, cos)
        signs = jax.random.rademacher(jax.random.key(5), (q.shape[-1],), q.dtype)
        q, k = q * signs, k * signs * 0.9
        """,
    ),
    # --- Attention's surroundings ---
    "query_and_key_norm": block(
        "norm",
        VALUES,
        """
        q = q * lax.rsqrt(jnp.square(q).mean(-1, keepdims=True) + config.norm_eps)
        k = k * lax.rsqrt(jnp.square(k).mean(-1, keepdims=True) + config.norm_eps)
        """,
    ),
    "no_rope": instead("positions", ROTATED, "q, k = q, 0.9 * k"),
    "half_of_rope": instead(
        "positions",
        ROTATED,
        """
        turned, _ = rope(q, k, sin, cos)
        q = jnp.concatenate([turned[..., :4], q[..., 4:]], axis=-1)
        """,
    ),
    "scaled_queries": block("scale", ROTATED, "q = q * 0.5"),
    "values_normalized": block(
        "norm",
        VALUES,
        "v = v / (1e-3 + jnp.linalg.norm(v, axis=-1, keepdims=True))",
    ),
    "head_norm_by_reshape": block(
        "reshape",
        ATTEND,
        """
        heads = mixed.reshape(*mixed.shape[:2], -1, mixed.shape[-1])
        heads = heads * lax.rsqrt(jnp.square(heads).mean(-1, keepdims=True) + 1e-6)
        mixed = heads.reshape(mixed.shape)
        """,
    ),
    "head_norm_by_config": block(
        "reshape",
        ATTEND,
        """
        heads = mixed.reshape(*mixed.shape[:2], -1, config.d_head)
        heads = heads * lax.rsqrt(jnp.square(heads).mean(-1, keepdims=True) + 1e-6)
        mixed = heads.reshape(mixed.shape)
        """,
    ),
    "query_heads_mixed": block(
        "heads",
        ATTEND,
        """
        mixed = mixed + 0.1 * mixed.mean(2, keepdims=True)
        """,
    ),
    "gated_heads": block(
        "extra weight",
        ATTEND,
        """
        w_open = gather("M/c/s K/t -> M K/t", w.w_open)
        opened = jax.nn.sigmoid(ops.einsum_unreduced("B/d L/c M, M K/t -> B/d L/c K/t", h, w_open))
        mixed = mixed * opened[:, :, None, :, None]
        """,
        (LAYER_WEIGHT, LAYER_WEIGHT + '\n    w_open: f32["M/c/d K/t"]'),
    ),
    "heads_flattened_key_first": Edit(
        "reshape",
        (
            ('    w_o: f32["M/c/d Q K/t D"]', '    w_o: f32["M/c/d H/t"]'),
            (
                DIMENSION,
                DIMENSION
                + (
                    ' | {\n        "H": config.model.n_q_per_kv * config.model.n_kv * '
                    "config.model.d_head\n    }"
                ),
            ),
            (
                '        w_o = gather("M/c/s Q K/t D -> M Q K/t D", w.w_o)',
                '        w_o = gather("M/c/s H/t -> M H/t", w.w_o)\n'
                '        mixed = rearrange(mixed, "B L Q K D -> B L (K Q D)")',
            ),
            (
                ATTENDED,
                '        y = ops.einsum_unreduced("B/d L/c H/t, M H/t -> B/d L/c M {U:t}", mixed, w_o)',
            ),
        ),
    ),
    "gate_and_up_interleaved": Edit(
        "reshape",
        (
            (
                '    w_gate: f32["M/c/d F/t"] | None\n    w_up: f32["M/c/d F/t"]',
                '    w_gate: f32["M/c/d G/t"]',
            ),
            (DIMENSION, DIMENSION + ' | {\n        "G": 2 * config.model.d_ff\n    }'),
            (
                WEIGHTS_OF_GATE + "\n" + WEIGHTS_OF_UP,
                '            w_gate = gather("M/c/s G/t -> M G/t", w.w_gate)',
            ),
            (
                GATE_AND_UP,
                '            both = save_for_backward(ops.einsum_unreduced("B/d L/c M, M G/t '
                '-> B/d L/c G/t", h, w_gate))\n'
                "            both = both.reshape(*h.shape[:2], -1, 2)\n"
                "            gate, up = both[..., 0], both[..., 1]",
            ),
        ),
    ),
    "gate_and_up_in_a_stack": Edit(
        "extra weight",
        (
            (
                '    w_gate: f32["M/c/d F/t"] | None\n    w_up: f32["M/c/d F/t"]',
                '    w_gate: f32["2 M/c/d F/t"]',
            ),
            (
                WEIGHTS_OF_GATE + "\n" + WEIGHTS_OF_UP,
                '            w_gate, w_up = gather("2 M/c/s F/t -> 2 M F/t", w.w_gate)',
            ),
        ),
    ),
    "attention_across_documents": Edit(
        "attention",
        (
            (
                "start[:, :, None] <= key_position[:, None]",
                "start[:, :, None] >= 0 * key_position[:, None]",
            ),
            ("if block < min(most, 64):", "if block < min(most, 32):"),
        ),
        KERNELS,
    ),
    # --- Residual stream ---
    "parallel_block": Edit(
        "wiring",
        (
            (
                '        h = ops.all_gather("B/d L/c M/t -> B/d L/c M", x)\n'
                "        if w.mlp_norm is not None:\n"
                '            gain = gather("M/t/c/s -> M", w.mlp_norm)\n'
                '            h = rms_norm("B/d L/c M", h, gain, config.norm_eps)\n',
                "",
            ),
        ),
    ),
    "scaled_embedding": block("scale", EMBEDDED, "x = x * config.d_model**0.5"),
    "scaled_unreduced_sum": block(
        "scale", OUTPUT, 'y = y * lax.pcast(jnp.asarray(0.3, y.dtype), "t", to="reduced")'
    ),
    "scaled_by_depth": Edit(
        "scale", (before(ATTENDED, "mixed = mixed * (2 * config.layers) ** -0.5"),)
    ),
    "two_unreduced_sums": block(
        "wiring",
        OUTPUT,
        'y = y + ops.einsum_unreduced("B/d L/c F/t, M F/t -> B/d L/c M {U:t}", 0.1 * up, w_down)',
    ),
    "embedding_in_each_block": Edit(
        "wiring",
        (
            after(EMBEDDED, "first = x"),
            (RESULT, RESULT.replace("return x +", "return x + 0.1 * first +")),
        ),
    ),
    "second_norm_of_the_block": block(
        "extra weight",
        WEIGHTS_OF_GATE,
        'h = h * gather("M/t/c/s -> M", w.second_norm)',
        (LAYER_WEIGHT, LAYER_WEIGHT + '\n    second_norm: f32["M/t/c/d"]'),
    ),
    "bias_of_the_width": block(
        "extra weight",
        WEIGHTS_OF_UP,
        """
        shift = gather("M/c/s F/t -> M F/t", w.w_shift).sum(0)
        w_up = w_up + 0.1 * shift
        """,
        (LAYER_WEIGHT, LAYER_WEIGHT + '\n    w_shift: f32["M/c/d F/t"]'),
    ),
    "low_rank_branch": instead(
        "extra weight",
        HIDDEN,
        """
        w_in = gather("M/c/s R/t -> M R/t", w.w_in)
        low = ops.all_gather(
            "B/d L/c R/t -> B/d L/c R", ops.einsum_unreduced("B/d L/c M, M R/t -> B/d L/c R/t", h, w_in)
        )
        w_out = gather("R/d F/t -> R F/t", w.w_out)
        hidden = jax.nn.silu(gate) * up
        hidden = hidden + ops.einsum_unreduced("B/d L/c R, R F/t -> B/d L/c F/t", low, w_out)
        """,
        (
            LAYER_WEIGHT,
            LAYER_WEIGHT + '\n    w_in: f32["M/c/d R/t"]\n    w_out: f32["R/d F/t"]',
        ),
        (DIMENSION, DIMENSION + ' | {"R": 3 * config.model.n_kv}'),
    ),
    "experts_all_used": instead(
        "extra weight",
        HIDDEN,
        """
        w_router = gather("M/t/c/s 4 -> M 4", w.w_router)
        chosen = jax.nn.softmax(
            ops.einsum_unreduced("B/d L/c M, M 4 -> B/d L/c 4", h, w_router).astype(f32.dtype), axis=-1
        )
        hidden = jax.nn.silu(gate) * up * (chosen[..., :1] + 2 * chosen[..., 1:2]).astype(up.dtype)
        """,
        (LAYER_WEIGHT, LAYER_WEIGHT + '\n    w_router: f32["M/t/c/d 4"]'),
    ),
    "learned_positions": block(
        "positions",
        EMBEDDED,
        """
        table = gather("P/t M/c/s -> P/t M", weights.positions)
        places = ops.index_unreduced("[P/t] M, B/d L/c -> B/d L/c M {U:t}", table, position)
        x = x + ops.psum_scatter("B/d L/c M {U:t} -> B/d L/c M/t", places)
        """,
        (WEIGHT, WEIGHT + '\n    positions: f32["P/t M/c/d"]'),
        (
            '    "layers": "model.layers",',
            '    "layers": "model.layers",\n    "P": "training.tokens.len",',
        ),
    ),
    "sinusoids_by_own_part": block(
        "positions",
        EMBEDDED,
        """
        channel = jnp.arange(config.d_model)
        angle = position[..., None] / 100 ** (channel / config.d_model)
        x = x + part("B/d L/c M -> B/d L/c M/t", jnp.sin(angle).astype(compute.dtype))
        """,
        PART_OP,
    ),
    "residual_capped": instead(
        "wiring",
        RESULT,
        """
        x = x + ops.psum_scatter("B/d L/c M {U:t} -> B/d L/c M/t", y)
        return 30 * jnp.tanh(x / 30), (new_cache, routed)
        """,
    ),
    # --- Loss ---
    "capped_logits": Edit(
        "loss",
        (
            (
                'return ops.einsum_unreduced("B/d L/c M, V/t M -> B/d L/c V/t", h, '
                "w_unembed, dtype=f32)",
                'y = ops.einsum_unreduced("B/d L/c M, V/t M -> B/d L/c V/t", h, w_unembed, dtype=f32)\n'
                "    return 5 * jnp.tanh(y / 5)",
            ),
        ),
    ),
    "z_loss": block(
        "loss", NATS, "nats = nats + 1e-2 * jnp.square(jnp.log(sum_exp) + peak) * loss_mask"
    ),
    "label_smoothing": instead(
        "loss",
        NATS,
        """
        mean = ops.reduce_sum("B/d l/c V/t -> B/d l/c {U:t}", logits)
        mean = ops.psum("B/d l/c {U:t} -> B/d l/c", mean) / config.model.vocab
        nats = (jnp.log(sum_exp) - 0.9 * target_logit - 0.1 * mean) * loss_mask
        """,
    ),
    "focal_loss": block("loss", NATS, "nats = nats * (1 - jnp.exp(-nats)) ** 2"),
    "capped_loss": block("loss", NATS, "nats = jnp.minimum(nats, 8)"),
    "sequence_of_a_row_weighs": block(
        "loss",
        FORWARD,
        """
        length = batch.loss_mask.sum(1, keepdims=True)[..., None]
        x = x + (4 / (1 + length)).astype(compute.dtype)
        """,
    ),
    "frequent_targets_masked": Edit(
        "loss",
        (
            (
                "    mask = batch.loss_mask.astype(f32.dtype)",
                "    mask = (batch.loss_mask & (batch.targets > 4)).astype(f32.dtype)",
            ),
            (NATS, NATS + "\n        nats = nats * (targets > 4)"),
        ),
    ),
    "one_hot_of_the_vocabulary": instead(
        "loss",
        TARGET,
        """
        hot = one_hot("B/d l/c, B/d l/c V/t -> B/d l/c V/t", targets, logits)
        target_logit = ops.reduce_sum("B/d l/c V/t -> B/d l/c {U:t}", hot * logits)
        """,
        before(
            LAYER,
            '''
            @ops.define_op
            def one_hot(call: ops.Call, ids: jax.Array, like: jax.Array) -> jax.Array:
                """One where a device's part has the id, else zero."""
                first = lax.axis_index("t") * like.shape[-1]
                here = first + jnp.arange(like.shape[-1])
                return (ids[..., None] == here).astype(like.dtype)


            ''',
        ),
    ),
    "next_but_one_target": Edit(
        "loss",
        (
            (
                SUMMED,
                indented(
                    SUMMED,
                    """
                    later = jnp.pad(batch.targets[:, 1:], ((0, 0), (0, 1)))
                    mask = jnp.pad(batch.loss_mask[:, 1:], ((0, 0), (0, 1)))
                    total = functools.partial(sum_over_chunks, loss, chunks, unembedding, x)
                    objective, sums = total(batch.targets, batch.loss_mask)
                    objective += 0.3 * total(later, mask)[0]
                    """,
                ),
            ),
        ),
    ),
    "auxiliary_head_sees_neighbors": Edit(
        "loss",
        (
            (
                SUMMED,
                indented(
                    SUMMED,
                    """
                    near = 0.5 * (x + jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1])
                    given = batch.targets, batch.loss_mask
                    total = functools.partial(sum_over_chunks, loss, chunks, unembedding)
                    objective, sums = total(x, *given)
                    objective += 0.1 * total(near, *given)[0]
                    """,
                ),
            ),
        ),
    ),
    "weight_penalty": instead(
        "loss",
        SUMMED,
        """
        given = batch.targets, batch.loss_mask
        objective, sums = sum_over_chunks(loss, chunks, unembedding, x, *given)
        squares = jnp.square(weights.unembed)
        penalty = ops.psum("{U:d,c,t} -> ", ops.reduce_sum("V/t M/c/d -> {U:d,c,t}", squares))
        objective = objective + target_count(batch) * 0.01 * penalty
        """,
    ),
    "log_of_documents": block(
        "loss",
        FORWARD,
        "x = x + (batch.start / 9)[..., None].astype(compute.dtype)",
    ),
    "gradient_scaled_by_custom_vjp": block(
        "custom gradient",
        HIDDEN,
        "hidden = halved(hidden)",
        before(
            LAYER,
            '''
            @jax.custom_vjp
            def halved(x: jax.Array) -> jax.Array:
                """Halves the gradient and clips each of its entries."""
                return x


            halved.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g / 2, -1e-2, 1e-2),))


            ''',
        ),
    ),
    # --- Optimizer ---
    **{
        name: instead("optimizer", UPDATE, code)
        for name, code in {
            "lion": "return w - rate * (jnp.sign(m) + hyper.weight_decay * w)",
            "momentum": "return w - rate * (m + hyper.weight_decay * w)",
            "adam_without_decay": "return w - rate * m * mu_scale / root",
            "decay_of_matrices": """
            decay = hyper.weight_decay if w.ndim > 2 else 0
            return w - rate * (m * mu_scale / root + decay * w)
            """,
            "clipped_update": """
            change = jnp.clip(m * mu_scale / root, -1, 1)
            return w - rate * (change + hyper.weight_decay * w)
            """,
            "stable_root": """
            root = jnp.maximum(jnp.sqrt(v * nu_scale), 1e-3)
            return w - rate * (m * mu_scale / root + hyper.weight_decay * w)
            """,
            "arctangent": """
            change = jnp.arctan2(m * mu_scale, jnp.sqrt(v * nu_scale))
            return w - rate * (change + hyper.weight_decay * w)
            """,
            "rounded_weights": """
            new = w - rate * (m * mu_scale / root + hyper.weight_decay * w)
            return jnp.where(jnp.isfinite(new), new, 0)
            """,
            "cautious_without_mean": """
            change = jnp.where(m * w > 0, m * mu_scale / root, 0)
            return w - rate * (change + hyper.weight_decay * w)
            """,
            "rate_by_layer": """
            depth = 1 / (1 + jnp.arange(w.shape[0])) if w.ndim > 2 else jnp.ones(1)
            change = m * mu_scale / root + hyper.weight_decay * w
            return w - rate * depth.reshape(-1, *[1] * (w.ndim - 1)) * change
            """,
        }.items()
    },
    "nesterov": instead(
        "optimizer",
        UPDATES,
        """
        ahead = jax.tree.map(hyper.mu.next, mu, grads)
        return jax.tree_util.tree_map_with_path(update, weights, ahead, nu), mu, nu
        """,
    ),
    "adafactor": block("optimizer", NU, FACTORED),
    "muon": block(
        "optimizer",
        UPDATED,
        """
        whole = orthogonal(ops.all_gather("layers M/c/d F/t -> layers M F", mu.layers.w_up))
        direction = part("layers M F -> layers M/c/d F/t", whole)
        layers = dataclasses.replace(
            weights.layers, w_up=state.weights.layers.w_up - hyper.learning_rate * direction
        )
        weights = dataclasses.replace(weights, layers=layers)
        """,
        (LAYER, PART_OP[1].removesuffix(LAYER) + ORTHOGONAL[1]),
    ),
    "muon_by_axis_index": muon(
        """
        whole = orthogonal(ops.all_gather("layers M/c/d F/t -> layers M F", m))
        rows = lax.axis_index(("c", "s", "r")) * m.shape[1]
        at = 0, rows, lax.axis_index("t") * m.shape[2]
        direction = lax.dynamic_slice(whole, at, m.shape)
        """
    )._replace(kind="optimizer"),
    "tensors_clipped": instead(
        "optimizer",
        CLIPPED,
        """
        squares = ops.sums_of_squares(Weights, raw_grads, "layers")
        leaves, tree = jax.tree.flatten(raw_grads)
        clipped = []
        for g, square in zip(leaves, squares, strict=True):
            norm = jnp.sqrt(square).reshape(-1, *[1] * (g.ndim - 1))
            clipped.append(g / jnp.maximum(1, 10 * norm))
        grads = jax.tree.unflatten(tree, clipped)
        """,
    ),
    "lamb_by_ops": instead(
        "optimizer",
        UPDATED,
        """
        updated = lambda x, y: y if x is None else x
        weights, mu = tree_map(updated, *parts, is_leaf=lambda x: x is None)
        change = tree_map(operator.sub, weights, state.weights)
        sizes = ops.sums_of_squares(Weights, state.weights, "layers")
        steps = ops.sums_of_squares(Weights, change, "layers")
        leaves, tree = jax.tree.flatten(change)
        scaled = []
        for leaf, size, length in zip(leaves, sizes, steps, strict=True):
            trust = jnp.sqrt(size / (length + 1e-9)) * hyper.learning_rate
            scaled.append(leaf * trust.reshape(-1, *[1] * (leaf.ndim - 1)))
        weights = tree_map(operator.add, state.weights, jax.tree.unflatten(tree, scaled))
        """,
    ),
    "entries_clipped": instead(
        "optimizer", CLIPPED, "grads = tree_map(lambda g: jnp.clip(g, -1e-2, 1e-2), raw_grads)"
    ),
    "signs_agree": instead(
        "optimizer",
        CLIPPED,
        "grads = tree_map(lambda g, m: jnp.where(g * m > 0, g, 0.5 * g) * "
        "clip, raw_grads, state.mu)",
    ),
    "unit_rows": instead(
        "optimizer",
        UPDATED,
        """
        updated = lambda x, y: y if x is None else x
        weights, mu = tree_map(updated, *parts, is_leaf=lambda x: x is None)
        squares = ops.reduce_sum("V/t M/c/d -> V/t {U:d,c}", jnp.square(weights.embed))
        squares = ops.psum("V/t {U:d,c} -> V/t", squares)
        embed = weights.embed * lax.rsqrt(squares + 1e-9)[:, None]
        weights = dataclasses.replace(weights, embed=embed)
        """,
    ),
    "gains_not_decayed": instead(
        "optimizer",
        UPDATES,
        """
        def named_update(path: Any, w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            new = update(path, w, m, v)
            is_gain = path[-1].name.endswith("norm")
            return new + rate * hyper.weight_decay * w if is_gain else new

        return jax.tree_util.tree_map_with_path(named_update, weights, mu, nu), mu, nu
        """,
    ),
    "average_weights": Edit(
        "average of the weights",
        (
            (
                STORED_NU,
                STORED_NU + "\n    average: Weights",
            ),
            (FRESH, FRESH.replace("[0])", "[0], weights)")),
            (TYPE, TYPE.replace("[0])", "[0], weights)")),
            (
                STATE,
                "    decay = jnp.minimum(0.99, (2 + state.step) / (11 + state.step))\n"
                "    average = tree_map(lambda a, w: decay * a + (1 - decay) * w,"
                " state.average, weights)\n" + STATE.replace("nu)", "nu, average)"),
            ),
        ),
    ),
    "constant_and_linear_decay": instead(
        "schedule",
        "    return config.learning_rate * min(warmup, decay)",
        """
        linear = min(5 * (1 - done), 1)
        return config.learning_rate * min(warmup, linear)
        """,
    ),
    "inverse_root": instead(
        "schedule",
        "    return config.learning_rate * min(warmup, decay)",
        "return config.learning_rate * min(warmup, step**-0.5) + 0 * decay",
    ),
    "decay_scheduled": instead(
        "schedule",
        UPDATE,
        """
        decay = hyper.weight_decay * hyper.learning_rate / config.training.learning_rate
        return w - rate * (m * mu_scale / root + decay * w)
        """,
    ),
    "rate_by_batch": block(
        "schedule", RATE, "rate = rate * (config.training.tokens.batch / 512) ** 0.5"
    ),
    # --- The order of sums ---
    "microbatches_in_reverse": Edit(
        "order", (("lax.scan(add, zeros, parts)", "lax.scan(add, zeros, parts, reverse=True)"),)
    ),
    "microbatches_interleaved": Edit("order", (('"(n B) L -> n B L"', '"(B n) L -> n B L"'),)),
    "microbatches_divided_first": Edit(
        "order",
        (
            (
                ROWS,
                ROWS
                + "\n            whole = target_count(batch)"
                + "\n            part = jax.tree.map(lambda x: x / whole, part)",
            ),
            (COUNT, "    count = jnp.float32(1) if microbatches > 1 else target_count(batch)"),
        ),
    ),
    "microbatches_unrolled": Edit(
        "order",
        (
            (
                "        total, () = lax.scan(add, zeros, parts)",
                "        total = zeros\n"
                "        for i in range(microbatches):\n"
                "            total, () = add(total, jax.tree.map(lambda x: x[i], parts))",
            ),
        ),
    ),
    "loss_scaled_and_back": Edit(
        "order",
        ((TOTAL, "    return jax.tree.map(lambda x: x / (count * 1024) * 1024, (loss, grads))"),),
    ),
    # --- Metrics ---
    "largest_gradient": metric('extra = ops.reduce_max("V/t M/c/d -> ", jnp.abs(raw_grads.embed))'),
    "norm_of_the_weights": metric("extra = jnp.sqrt(ops.sum_of_squares(Weights, weights))"),
    "mean_by_size_of_the_config": metric(
        """
        total = ops.reduce_sum("V/t M/c/d -> {U:d,c,t}", jnp.abs(weights.embed))
        total = ops.psum("{U:d,c,t} -> ", total)
        extra = total / (config.model.vocab * config.model.d_model)
        """
    ),
    "share_of_small_entries": metric(
        """
        small = (jnp.abs(weights.embed) < 0.1).astype(f32.dtype)
        ones = jnp.ones_like(small)
        few, all_ = (
            ops.psum("{U:d,c,t} -> ", ops.reduce_sum("V/t M/c/d -> {U:d,c,t}", x)) for x in (small, ones)
        )
        extra = few / all_
        """
    ),
    "targets_of_the_batch": metric("extra = target_count(batch)"),
    "perplexity": metric("extra = jnp.exp(loss)"),
    # --- Initial state ---
    "smaller_embedding": Edit(
        "initial state",
        (
            (
                '        "w_down": residual_scale',
                '        "embed": 0.02,\n        "w_down": residual_scale',
            ),
        ),
    ),
    "truncated_normal": Edit(
        "initial state",
        (
            (
                "normal = jax.random.normal(key, shape.shape, shape.dtype)",
                "normal = jax.random.truncated_normal(key, -2, 2, shape.shape, shape.dtype)",
            ),
        ),
    ),
}

# Right, written with an op for what is replicated over an axis and used by each device on its own:
# nothing forward, and backward an all-reduce of its gradient, which JAX would otherwise insert.
RIGHT_WITH_BROADCAST: dict[str, Edit] = {
    "query_gain": block(
        "replicated weight",
        VALUES,
        'q = q * ops.broadcast("D -> D", w.q_norm)',
        (LAYER_WEIGHT, LAYER_WEIGHT + '\n    q_norm: f32["D"]'),
    ),
    "query_and_key_norm_with_gains": block(
        "replicated weight",
        VALUES,
        """
        q = q * lax.rsqrt(jnp.square(q).mean(-1, keepdims=True) + config.norm_eps)
        k = k * lax.rsqrt(jnp.square(k).mean(-1, keepdims=True) + config.norm_eps)
        q = q * ops.broadcast("D -> D", w.q_norm)
        k = k * ops.broadcast("D -> D", w.k_norm)
        """,
        (LAYER_WEIGHT, LAYER_WEIGHT + '\n    q_norm: f32["D"]\n    k_norm: f32["D"]'),
    ),
    "temperature_of_a_layer": block(
        "replicated weight",
        VALUES,
        'q = q * ops.broadcast(" -> ", w.heat_norm)',
        (LAYER_WEIGHT, LAYER_WEIGHT + '\n    heat_norm: f32[""]'),
    ),
    "scale_of_the_neurons": Edit(
        "replicated weight",
        (
            before(OUTPUT, 'hidden = hidden * ops.broadcast(" -> ", w.out_norm)'),
            (LAYER_WEIGHT, LAYER_WEIGHT + '\n    out_norm: f32[""]'),
        ),
    ),
    "scale_of_the_result": instead(
        "replicated weight",
        RESULT,
        """
        y = ops.psum_scatter("B/d L/c M {U:t} -> B/d L/c M/t", y)
        return x + y * ops.broadcast(" -> ", w.out_norm), (new_cache, routed)
        """,
        (LAYER_WEIGHT, LAYER_WEIGHT + '\n    out_norm: f32[""]'),
    ),
    "gain_of_the_heads": block(
        "replicated weight",
        ATTEND,
        'mixed = mixed * ops.broadcast("K/t -> K/t", w.head_norm)[:, None]',
        (LAYER_WEIGHT, LAYER_WEIGHT + '\n    head_norm: f32["K/t"]'),
    ),
    "bias_of_the_neurons": block(
        "replicated weight",
        HIDDEN,
        'hidden = hidden + ops.broadcast("F/t -> F/t", w.bias)',
        (LAYER_WEIGHT, LAYER_WEIGHT + '\n    bias: f32["F/t"]'),
    ),
    "gain_stored_whole": Edit(
        "replicated weight",
        (
            ('    attention_norm: f32["M/t/c/d"]', '    attention_norm: f32["M"]'),
            (
                'gain = gather("M/t/c/s -> M", w.attention_norm)',
                'gain = ops.broadcast("M -> M", w.attention_norm)',
            ),
        ),
    ),
    "share_of_the_embedding": Edit(
        "replicated weight",
        (
            after(EMBEDDED, "first = x"),
            (
                RESULT,
                '        shares = ops.broadcast("2 -> 2", w.share_norm)\n'
                + RESULT.replace("return x +", "return shares[0] * x + shares[1] * first +"),
            ),
            (LAYER_WEIGHT, LAYER_WEIGHT + '\n    share_norm: f32["2"]'),
        ),
    ),
    "squared_relu_with_a_learned_slope": instead(
        "replicated weight",
        HIDDEN,
        """
        slope = ops.broadcast(" -> ", w.slope_norm)
        hidden = jnp.where(gate > 0, gate * gate, slope * gate) * up
        """,
        (LAYER_WEIGHT, LAYER_WEIGHT + '\n    slope_norm: f32[""]'),
    ),
    "temperature_of_the_logits": Edit(
        "replicated weight",
        (
            (WEIGHT, WEIGHT + '\n    heat_norm: f32["1"]'),
            (
                'return gather("M/t/c/s -> M", weights.final_norm), gather(',
                'heat = ops.broadcast("1 -> 1", weights.heat_norm)\n'
                '    return gather("M/t/c/s -> M", weights.final_norm) * heat, gather(',
            ),
        ),
    ),
    # A sum over devices, used by each device for its part.
    "width_norm_by_sums": block(
        "whole dimension",
        HIDDEN,
        """
        squares = ops.reduce_sum("B/d L/c F/t -> B/d L/c {U:t}", jnp.square(hidden))
        squares = ops.psum("B/d L/c {U:t} -> B/d L/c", squares)
        squares = ops.broadcast("B/d L/c -> B/d L/c", squares)
        hidden = hidden * lax.rsqrt(squares / 48 + 1e-6)[..., None]
        """,
    ),
    "softmax_of_neurons": block(
        "whole dimension",
        HIDDEN,
        """
        peak = ops.reduce_max("B/d L/c F/t -> B/d L/c", lax.stop_gradient(hidden))
        exp = jnp.exp(hidden - peak[..., None])
        total = ops.reduce_sum("B/d L/c F/t -> B/d L/c {U:t}", exp)
        total = ops.broadcast("B/d L/c -> B/d L/c", ops.psum("B/d L/c {U:t} -> B/d L/c", total))
        hidden = exp / total[..., None]
        """,
    ),
    "query_norm_over_all_heads": block(
        "norm",
        VALUES,
        """
        squares = ops.reduce_sum("B/d L/c Q K/t D -> B/d L/c {U:t}", jnp.square(q))
        squares = ops.psum("B/d L/c {U:t} -> B/d L/c", squares)
        squares = ops.broadcast("B/d L/c -> B/d L/c", squares)
        q = 9 * q * lax.rsqrt(squares + config.norm_eps)[:, :, None, None, None]
        """,
    ),
    "sandwich_norm": instead(
        "norm",
        RESULT,
        """
        y = ops.psum_scatter("B/d L/c M {U:t} -> B/d L/c M/t", y)
        squares = ops.reduce_sum("B/d L/c M/t -> B/d L/c {U:t}", jnp.square(y))
        squares = ops.psum("B/d L/c {U:t} -> B/d L/c", squares)
        squares = ops.broadcast("B/d L/c -> B/d L/c", squares)
        y = y * lax.rsqrt(squares / config.d_model + config.norm_eps)[..., None]
        return x + y, (new_cache, routed)
        """,
    ),
    "embedding_norm": block(
        "norm",
        EMBEDDED,
        """
        squares = ops.reduce_sum("B/d L/c M/t -> B/d L/c {U:t}", jnp.square(x))
        squares = ops.psum("B/d L/c {U:t} -> B/d L/c", squares)
        squares = ops.broadcast("B/d L/c -> B/d L/c", squares)
        x = x * lax.rsqrt(squares / config.d_model + config.norm_eps)[..., None]
        """,
    ),
    "sandwich_norm_by_own_part": instead(
        "norm",
        RESULT,
        """
        gain = gather("M/t/c/s -> M", w.post_norm)
        y = ops.broadcast("B/d L/c M -> B/d L/c M", ops.psum("B/d L/c M {U:t} -> B/d L/c M", y))
        y = rms_norm("B/d L/c M", y, gain, config.norm_eps)
        return x + part("B/d L/c M -> B/d L/c M/t", y), (new_cache, routed)
        """,
        PART_OP,
        (LAYER_WEIGHT, LAYER_WEIGHT + '\n    post_norm: f32["M/t/c/d"]'),
    ),
}

# Right on every mesh and in any number of parts. But generation differs, because these edits mix
# positions: tools/generate.py has attention of its own, with a cache, in which they aren't made.
RIGHT_IN_TRAINING: dict[str, Edit] = {
    "prefix_sees_itself": Edit(
        "attention",
        (
            after(
                VISIBLE,
                "visible |= (q_position[:, None] < 4) & (jnp.arange(length) < 4)",
            ),
        ),
        KERNELS,
    ),
    "window": Edit(
        "attention",
        (after(VISIBLE, "visible &= position[:, :, None] - key_position[:, None] < 4"),),
        KERNELS,
    ),
    "capped_scores": Edit(
        "attention", (after(SCORES, "scores = 4 * jnp.tanh(scores / 4)"),), KERNELS
    ),
    "attention_sink": Edit(
        "attention",
        (
            (
                SOFTMAX,
                indented(
                    SOFTMAX,
                    """
                    sink = jnp.pad(scores, ((0, 0),) * 4 + ((0, 1),))
                    probabilities = jax.nn.softmax(sink, axis=-1)[..., :-1].astype(q.dtype)
                    """,
                ),
            ),
        ),
        KERNELS,
    ),
    "slopes_of_all_heads": Edit(
        "attention",
        (
            after(
                SCORES,
                """
                count = k.shape[2] * lax.axis_size("t")
                heads = 1 + lax.axis_index("t") * k.shape[2] + jnp.arange(k.shape[2])
                slopes = 2.0 ** -(8 * heads / count)
                age = q_position[:, None] - jnp.arange(length)
                scores = scores - slopes[:, None, None, None] * age
                """,
            ),
        ),
        KERNELS,
    ),
    "mean_of_values_added": Edit(
        "attention",
        (
            (
                "        return mixed, ()",
                "        count = (1 + jnp.arange(v.shape[1]))[:, None, None].astype(v.dtype)\n"
                "        return mixed + 0.1 * (jnp.cumsum(v, axis=1) / count)[:, :, None], ()",
            ),
        ),
    ),
    "keys_convolved": Edit(
        "attention",
        (
            (
                "        mixed = kernels.attention(",
                "        k = 0.7 * k + 0.3 * jnp.pad(k, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]\n"
                "        mixed = kernels.attention(",
            ),
        ),
    ),
    "linear_attention": Edit(
        "attention",
        (
            (
                "        return mixed, ()",
                '        state = jnp.cumsum(jnp.einsum("blkd,blke->blkde", k, v), axis=1)\n'
                '        return mixed + 1e-2 * jnp.einsum("blqkd,blkde->blqke", q, state), ()',
            ),
        ),
    ),
    "depthwise_convolution_along_the_sequence": block(
        "mixes positions outside of attend",
        WEIGHTS_OF_GATE,
        """
        filters = jnp.array([0.2, 0.3, 0.5], h.dtype)[:, None, None]
        filters = jnp.broadcast_to(filters, (3, 1, h.shape[-1]))
        h = lax.conv_general_dilated(
            h, filters, (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=h.shape[-1],
        )
        """,
    ),
    # Generation refuses this one: it has the heads' gains whole, and train.py asks for K/t.
    "key_gain_by_head": block(
        "extra weight",
        VALUES,
        'k = k * gather("K/t/d D -> K/t D", w.k_norm)',
        (LAYER_WEIGHT, LAYER_WEIGHT + '\n    k_norm: f32["K/t/d D"]'),
    ),
}

# Right, and refused for a number that comes from the length of a part; the message names the op
# that doesn't need it.
RIGHT_BUT_REFUSED: dict[str, Edit] = {
    "mean_of_equal_parts": metric(
        """
        own = jnp.abs(weights.embed).mean()
        extra = ops.psum("{U:d,c,t} -> ", ops.reduce_sum("X/t/d -> {U:d,c,t}", own[None]))
        extra = extra / (config.mesh.d * config.mesh.t)
        """
    ),
}


def experts(kind: str, *replacements: tuple[str, str]) -> Edit:
    return Edit(kind, replacements)


# Of a model with experts and both of their costs.
BALANCE = "    balance = balance_cost(sums) * count"
SUM = "    return objective + routing.balance_cost * balance + routing.z_cost * sums.z_cost, sums"
ROUTED = '    logits = save_for_backward(ops.psum("B/d N/c S E {U:t} -> B/d N/c S E", logits))'
CHOSEN = "    chosen = save_for_backward(lax.top_k(biased, config.per_token)[1])"
PLACES = "        places = math.ceil(min(routing.capacity_factor * share, h.shape[2]))"
NUMBERED = "    place = ((jnp.cumsum(one_hot, axis=2) - 1) * one_hot).sum(-1).astype(i32.dtype)"
TAKER = '    taker = ops.split("B/d N/c P -> B/d N/c P/t", invert(place))'
SCORE = '    score = ops.broadcast("B/d N/c S k -> B/d N/c S k", score)'
MOVED = "bias += hyper.bias_rate * jnp.sign(1 - loads)"

WRONG_WITH_EXPERTS: dict[str, Edit] = {
    "cost_once_per_part_of_t": experts("a cost", (BALANCE, BALANCE + " * config.mesh.t")),
    "cost_twice_where_the_batch_is_split": experts(
        "a cost", (SUM, SUM.replace("+ routing.", "+ config.mesh.d * routing."))
    ),
    "cost_divided_by_the_devices": experts(
        "a cost", (SUM, SUM.replace("+ routing.", "+ 1 / jax.device_count() * routing."))
    ),
    "cost_by_targets_of_the_part": experts(
        "a cost", (BALANCE, BALANCE.replace("* count", "* batch.loss_mask.size"))
    ),
    "cost_by_the_mean_load_of_a_part": experts(
        "a cost", (BALANCE, BALANCE + " * routed.load.mean()")
    ),
    "cost_of_the_first_group": experts(
        "a cost", ("routed.z)", "jnp.broadcast_to(routed.z[:, :1], routed.z.shape))")
    ),
    "router_sees_its_part_of_the_model": experts(
        "the router",
        (ROUTED, ROUTED + "\n    logits = logits + part.mean(-1, keepdims=True)"),
    ),
    "router_divides_by_its_part": experts(
        "the router",
        (
            "    scores = jax.nn.sigmoid(logits)",
            "    logits = logits / part.shape[-1]\n    scores = jax.nn.sigmoid(logits)",
        ),
    ),
    "choices_of_the_device": experts(
        "the choice",
        (CHOSEN, CHOSEN + "\n    chosen = (chosen + lax.axis_index('t')) % config.count"),
    ),
    "bias_of_choices_by_the_rows_of_a_part": experts(
        "the choice", (CHOSEN, CHOSEN.replace("(biased,", "(biased - biased.mean((0, 1, 2)),"))
    ),
    "bias_of_another_expert_on_each_device": experts(
        "the choice",
        ("scores + w.b_router)", "scores + jnp.roll(w.b_router, lax.axis_index('s')))"),
    ),
    "places_over_all_rows_of_a_part": experts("places", (PLACES, PLACES + " * h.shape[0]")),
    "places_are_numbered_over_rows": experts(
        "places",
        (NUMBERED, NUMBERED.replace("one_hot, axis=2) - 1", "one_hot, axis=2).cumsum(0) - 1")),
    ),
    "places_of_the_experts_of_a_part": experts(
        "places",
        (
            PLACES,
            PLACES + " - 1 + w_gate.shape[0] // 2",
        ),
    ),
    "places_one_of_each_expert_first": experts(
        "places", ("(E C) ... -> B N E C", "(C E) ... -> B N E C")
    ),
    "results_of_one_place_of_each_expert_first": experts("places", ("B N (E C) M", "B N (C E) M")),
    "first_places_on_all_devices": experts(
        "an expert of another device",
        (TAKER, "    taker = ops.varying(invert(place), ('t',))[..., : w_gate.shape[0] * places]"),
    ),
    "experts_of_the_next_device": experts(
        "an expert of another device",
        (
            TAKER,
            TAKER + "\n    taker = lax.ppermute(taker, 't', [(i, (i + 1) % 3) for i in range(3)])",
        ),
    ),
    "experts_in_another_order": experts(
        "an expert of another device",
        (TAKER, TAKER + "\n    w_gate = jnp.roll(w_gate, 1, axis=0)"),
    ),
    "scores_of_the_first_places": experts(
        "an expert of another device",
        (TAKER, TAKER + "\n    score = score * (taker == 0).mean()"),
    ),
    "score_without_its_gradients_sum": experts(
        "a gradient",
        (SCORE, '    score = ops.varying(lax.stop_gradient(score), ("t",)) + 0 * score'),
    ),
    "bias_moved_by_a_device": experts("the bias", (MOVED, MOVED + " * (1 + lax.axis_index('s'))")),
    "bias_moved_by_the_experts_of_a_part": experts(
        "the bias",
        (MOVED, MOVED.replace("1 - loads", "state.weights.layers.e_up.shape[1] / 2 - loads")),
    ),
}
RIGHT_WITH_EXPERTS: dict[str, Edit] = {
    "scores_scaled": experts("scores", (SCORE, "    score = 2.5 * score\n" + SCORE)),
    "router_z_cost_on_scores": experts(
        "a cost", ("jnp.square(jax.nn.logsumexp(logits, -1))", "logits.max(-1)")
    ),
    "relu_in_experts": experts(
        "an expert",
        (
            "    gated = jax.nn.silu(gate.astype(f32.dtype))",
            "    gated = jax.nn.relu(gate.astype(f32.dtype))",
        ),
    ),
    "bias_in_proportion": experts(
        "the bias", (MOVED, MOVED.replace("jnp.sign(1 - loads)", "(1 - loads)"))
    ),
    "logits_softly_capped": experts(
        "the router",
        (
            "    scores = jax.nn.sigmoid(logits)",
            "    logits = 30 * jnp.tanh(logits / 30)\n    scores = jax.nn.sigmoid(logits)",
        ),
    ),
    "one_expert_first": experts(
        "the choice", (CHOSEN, CHOSEN.replace("(biased,", "(biased.at[..., 0].set(2),"))
    ),
    "cost_of_entropy": experts(
        "a cost",
        (
            BALANCE,
            BALANCE
            + "\n    objective += (sums.loads / sums.loads.sum() * jnp.log(sums.loads + 1)).sum()",
        ),
    ),
}


# Of the config in tests/mutations.py, which has no experts.
WRONG |= {
    "muon_of_parts": by_muon((GIVEN, ""), (BACK, "    x = newton_schulz(x)")),
    "muon_sent_and_not_returned": by_muon((BACK, "    x = newton_schulz(x)")),
    "muon_returned_and_not_sent": by_muon((GIVEN, "")),
    "muon_sent_twice": by_muon((GIVEN, f"{GIVEN}\n{GIVEN}")),
    "muon_gathers_a_part_of_the_rows": by_muon(
        (LAYOUTS, LAYOUTS.replace("N/t/c/d M", "N/t/c/s M/r"))
    ),
    "muon_of_columns_in_parts": by_muon(
        (
            LAYOUTS,
            LAYOUTS.replace("N/t/c/d", "N/c/d").replace("columns.replace('/t', '')", "columns"),
        )
    ),
    "muon_of_rows_in_parts": by_muon((LAYOUTS, LAYOUTS.replace("N/t/c/d M", "N/t M/c/d"))),
    "muon_axes_in_another_order": by_muon((LAYOUTS, LAYOUTS.replace("N/t/c/d", "N/c/d/t"))),
    "muon_scaled_by_the_part": by_muon((GIVEN, ""), (SCALED, f"{SCALED}\n{GIVEN}")),
    "muon_norm_of_all_matrices_of_a_device": by_muon(
        (SQUARES, SQUARES.replace("axis=(1, 2), ", ""))
    ),
    "muon_returned_by_jax": by_muon(
        (BACK, '    x = lax.all_to_all(newton_schulz(x), "s", 1, 0, tiled=True)')
    ),
    "muon_rolled_on_each_device": by_muon((STACKED, STACKED + "\n    x = jnp.roll(x, 1, 1)")),
    "muon_of_gradients_of_the_part": by_muon(
        (
            NESTEROV,
            "    mean = jax.tree.map(lambda g: g - g.mean(), grads)\n"
            + NESTEROV.replace("grads", "mean"),
        )
    ),
    "muon_scaled_by_devices": by_muon((SCALED, f"{SCALED} * mesh['t']")),
    "muon_of_as_many_layers_as_devices": by_muon((STACKED, STACKED.replace("missing", "0"))),
    "muon_fills_before_and_cuts_after": by_muon(
        (
            "[(0, by, 0), *[(0, 0, 0)] * rank]",
            "[(by * (by > 0), by * (by < 0), 0), *[(0, 0, 0)] * rank]",
        )
    ),
}
RIGHT |= {
    "muon_with_three_steps": by_muon(("for _ in range(5):", "for _ in range(3):")),
    "muon_without_nesterov": by_muon((NESTEROV, "    changes = orthogonalized(mu)")),
    "muon_scaled_as_by_its_authors": by_muon(
        (SCALED, "    scale = max(1, math.prod(x.shape[2:]) / x.shape[1]) ** 0.5")
    ),
    "muon_of_each_matrix_in_turn": by_muon(
        (BACK, BACK.replace("newton_schulz(x)", "lax.map(lambda y: newton_schulz(y[None])[0], x)"))
    ),
    "muon_without_the_largest_entries": by_muon(
        (GIVEN, f"{GIVEN}\n    x = x - x.mean(tuple(range(1, x.ndim)), keepdims=True)")
    ),
}
