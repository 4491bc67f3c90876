"""Silent bugs of distributed training that happened in other frameworks, each as an edit of this
source. docs/bugs.md shows them as a table.

What a bug did there may be different code here: autodiff derives our backward pass, so a reduction
of a gradient can't just be forgotten. Such an edit puts a device's own part into a copy that passes
no gradient on, and the gradient then misses what the other devices contribute.
"""

from typing import NamedTuple


class Bug(NamedTuple):
    what: str  # one line: what went wrong there
    link: str
    replacements: tuple[tuple[str, str], ...]  # (old, new) in `file`; each old stands there once
    file: str = "train.py"


MEGATRON = "https://github.com/NVIDIA/Megatron-LM"
TRANSFORMERS = "https://github.com/huggingface/transformers"
DEEPSPEED = "https://github.com/deepspeedai/DeepSpeed"
TORCHTITAN = "https://github.com/pytorch/torchtitan"

NATS = "nats = (jnp.log(sum_exp) - target_logit) * loss_mask"
PART = "part = jax.tree.map(lax.optimization_barrier, value_and_grads(rows))"
ADD = "return jax.tree.map(jnp.add, total, part), ()"
COUNT = "count = target_count(batch)\n"
MEAN = "return sums, count, jax.tree.map(lambda g: g / count, grads)"
NORM = "grad_norm = jnp.sqrt(ops.sum_of_squares(Weights, raw_grads))"
HIDDEN = "hidden = hidden.astype(compute.dtype)\n"

# A router of four experts on the last layer's output, whose scores enter the loss by a cost alone.
ROUTER = (
    (
        '    final_norm: f32["M/t/c/d"]',
        '    router: f32["M/t/c/d 4"]\n    final_norm: f32["M/t/c/d"]',
    ),
    (
        "    x, routed = forward(weights, batch, config.model, config.training.routing)\n",
        """\
    x, routed = forward(weights, batch, config.model, config.training.routing)
    w_router = ops.all_gather("M/t/c/s 4 -> M/t 4", weights.router)
    scores = ops.einsum_unreduced("B/d L/c M/t, M/t 4 -> B/d L/c 4 {U:t}", x, w_router, dtype=f32)
    scores = ops.psum("B/d L/c 4 {U:t} -> B/d L/c 4", scores)
""",
    ),
)


def cost(code: str) -> tuple[tuple[str, str], ...]:
    """The router with a cost that is added to the loss: code that sets `cost` from `scores`."""
    chunks = "chunks = config.training.loss_chunks\n"
    total = "return objective, sums"
    return (
        *ROUTER,
        (chunks, f"{chunks}    {code.strip()}\n"),
        (total, "return objective + 0.1 * cost, sums"),
    )


BUGS: dict[str, Bug] = {
    # --- Costs and means: the wrong count ---------------------------------------------------------
    "transformers #34191": Bug(
        "the loss was averaged per microbatch, then over microbatches, whatever their padding",
        f"{TRANSFORMERS}/pull/34191",
        (
            (
                PART,
                f"{PART}\n            part = jax.tree.map(lambda x: x / target_count(rows), part)",
            ),
            (
                COUNT,
                "count = target_count(batch) if microbatches == 1 else jnp.float32(microbatches)\n",
            ),
        ),
    ),
    "transformers #34242": Bug(
        "each device averaged over its own targets, and the gradients were averaged over devices",
        f"{TRANSFORMERS}/issues/34242",
        (
            (
                NATS,
                f"{NATS}\n        share = target_count(batch) / lax.axis_size('d')\n"
                "        nats = nats * share / batch.loss_mask.sum()",
            ),
        ),
    ),
    "transformers #39648": Bug(
        "the loss was scaled by the number of processes, though tensor parallel ones share a batch",
        f"{TRANSFORMERS}/issues/39648",
        ((COUNT, 'count = target_count(batch) / lax.axis_size("t")\n'),),
    ),
    "transformers #48691": Bug(
        "a correction of the loss by the number of devices also scaled the router's cost",
        f"{TRANSFORMERS}/pull/48691",
        cost("""
    z = jnp.square(jax.nn.logsumexp(scores, axis=-1))
    cost = ops.psum("{U:d,c} -> ", ops.reduce_sum("B/d L/c -> {U:d,c}", z)) * config.mesh.d
"""),
    ),
    "DeepSpeed #7773": Bug(
        "gradients of microbatches were summed, not averaged",
        f"{DEEPSPEED}/issues/7773",
        (
            (
                PART,
                f"{PART}\n            part = jax.tree.map(lambda x: x / target_count(rows), part)",
            ),
            (COUNT, "count = target_count(batch) if microbatches == 1 else jnp.float32(1)\n"),
        ),
    ),
    "jax #3970": Bug(
        "under pmap, the gradient of a psum was another psum, so it was too large for the loss",
        "https://github.com/jax-ml/jax/issues/3970",
        (
            (
                'total = ops.psum("{U:d,c} -> ", ops.reduce_sum("B/d l/c -> {U:d,c}", nats))',
                """\
total = ops.psum("{U:d,c} -> ", ops.reduce_sum("B/d l/c -> {U:d,c}", nats))
        again = total * lax.axis_size("s")
        total = again - lax.stop_gradient(again - total)""",
            ),
        ),
    ),
    "Megatron-LM #3769": Bug(
        "the gradient of the balance cost over all devices was divided by their number",
        f"{MEGATRON}/pull/3769",
        cost("""
    probs = jax.nn.softmax(scores, axis=-1)
    chosen = jax.nn.one_hot(jnp.argmax(probs, axis=-1), 4)
    load = ops.psum("4 {U:d,c} -> 4", ops.reduce_sum("B/d L/c 4 -> 4 {U:d,c}", chosen))
    mass = ops.psum("4 {U:d,c} -> 4", ops.reduce_sum("B/d L/c 4 -> 4 {U:d,c}", probs))
    cost = 4 * jnp.vdot(load, mass / lax.axis_size("s")) / load.sum()
"""),
    ),
    "Megatron-LM #5047": Bug(
        "the router's costs were weighted by the number of tokens on one device",
        f"{MEGATRON}/pull/5047",
        cost("""
    z = jnp.square(jax.nn.logsumexp(scores, axis=-1))
    sums = [ops.reduce_sum("B/d L/c -> {U:d,c}", each) for each in (z, jnp.ones_like(z))]
    z_sum, tokens = (ops.psum("{U:d,c} -> ", each) for each in sums)
    cost = z_sum / tokens * z.size
"""),
    ),
    "Megatron-LM #5798": Bug(
        "the balance cost was weighted by the length of a row, without the rows of the microbatch",
        f"{MEGATRON}/pull/5798",
        cost("""
    z = jnp.square(jax.nn.logsumexp(scores, axis=-1))
    sums = [ops.reduce_sum("B/d L/c -> {U:d,c}", each) for each in (z, jnp.ones_like(z))]
    z_sum, tokens = (ops.psum("{U:d,c} -> ", each) for each in sums)
    cost = z_sum / tokens * z.shape[1]
"""),
    ),
    "Megatron-LM #7452, 10": Bug(
        "an all-reduce in place overwrote the local token count, which then scaled the cost",
        f"{MEGATRON}/issues/7452",
        cost("""
    z = jnp.square(jax.nn.logsumexp(scores, axis=-1))
    tokens = z.size
    z = z / tokens
    tokens = lax.psum(tokens, "s")
    cost = ops.psum("{U:d,c} -> ", ops.reduce_sum("B/d L/c -> {U:d,c}", z)) * tokens
"""),
    ),
    "Megatron-LM #7452, 3": Bug(
        "an extra loss (of multi-token prediction) was normalized by local token counts",
        f"{MEGATRON}/issues/7452",
        (
            (
                NATS,
                f"""\
{NATS}
        extra = loss_mask & (targets % 3 > 0)
        ratio = loss_mask.sum() / jnp.maximum(extra.sum(), 1)
        nats = nats + 0.1 * jnp.square(jnp.log(sum_exp)) * extra * ratio""",
            ),
        ),
    ),
    # --- The split vocabulary ---------------------------------------------------------------------
    "TTrace, embedding mask": Bug(
        "the lookup in a split embedding masked the ids of other devices wrongly",
        "https://arxiv.org/abs/2506.09280",
        (
            (
                'x = ops.index_unreduced("[V/t] M, B/d L/c -> B/d L/c M {U:t}", embed, inputs)',
                """\
rows = embed.shape[0]
    local = inputs.astype(jnp.int32) - lax.axis_index("t") * rows
    missing = (local < 0) | (local > rows)
    x = jnp.where(missing[:, :, None], 0, embed[jnp.clip(local, 0, rows - 1)])
    x = lax.pcast(x, "t", to="unreduced")""",
            ),
        ),
    ),
    "Megatron-LM #7452, 1": Bug(
        "label smoothing took the mean over a device's part of the vocabulary (#737, of 2024)",
        f"{MEGATRON}/issues/737",
        (
            (
                NATS,
                "smooth = 0.9 * target_logit + 0.1 * logits.mean(axis=-1)\n"
                "        nats = (jnp.log(sum_exp) - smooth) * loss_mask",
            ),
        ),
    ),
    "Megatron-LM #7464": Bug(
        "label smoothing took the size of a device's part for that of the vocabulary",
        f"{MEGATRON}/issues/7464",
        (
            (
                NATS,
                """\
total = ops.psum("B/d l/c {U:t} -> B/d l/c", ops.reduce_sum("B/d l/c V/t -> B/d l/c {U:t}", logits))
        smooth = 0.9 * target_logit + 0.1 * total / logits.shape[-1]
        nats = (jnp.log(sum_exp) - smooth) * loss_mask""",
            ),
        ),
    ),
    "Megatron-LM #7452, 2": Bug(
        "gathered logits went into the loss for split ones, which added log(t)",
        f"{MEGATRON}/issues/7452",
        (
            (
                "logits = unembed(unembedding, x, config.model)\n",
                'logits = ops.all_gather("B/d l/c V/t -> B/d l/c V", '
                "unembed(unembedding, x, config.model))\n",
            ),
            (
                'peak = ops.reduce_max("B/d l/c V/t -> B/d l/c", lax.stop_gradient(logits))',
                'peak = ops.reduce_max("B/d l/c V -> B/d l/c", lax.stop_gradient(logits))',
            ),
            (
                'sum_exp = ops.reduce_sum("B/d l/c V/t -> B/d l/c {U:t}", jnp.exp(logits))',
                'sum_exp = lax.pcast(jnp.exp(logits).sum(axis=-1), "t", to="unreduced")',
            ),
            (
                "target_logit = ops.index_unreduced(\n"
                '            "B/d l/c [V/t], B/d l/c -> B/d l/c {U:t}", logits, targets\n'
                "        )",
                "target_logit = jnp.take_along_axis(logits, targets[:, :, None], axis=-1)[:, :, 0]"
                '\n        mine = lax.axis_index("t") == 0\n        '
                'target_logit = lax.pcast(target_logit * mine, "t", to="unreduced")',
            ),
        ),
    ),
    "ms-swift #9947": Bug(
        "a token's logits got no gradient on devices that don't hold its target",
        "https://github.com/modelscope/ms-swift/pull/9947",
        (
            (
                "logits = logits - peak[:, :, None]\n",
                """\
logits = logits - peak[:, :, None]
        mine = targets // logits.shape[-1] == lax.axis_index("t").astype(u32.dtype)
        logits = jnp.where(mine[:, :, None], logits, lax.stop_gradient(logits))
""",
            ),
        ),
    ),
    "torchtitan #3412": Bug(
        "the gradient that a chunked loss gave the model was a partial sum, taken for the whole",
        f"{TORCHTITAN}/pull/3412",
        (
            (
                'gain, w_unembed = weights\n    h = ops.all_gather("B/d L/c M/t -> B/d L/c M", x)\n',
                """\
gain, w_unembed = weights
    whole = ops.all_gather("B/d L/c M/t -> B/d L/c M", lax.stop_gradient(x))
    start = lax.axis_index("t") * x.shape[-1]
    h = lax.dynamic_update_slice_in_dim(whole, x, start, axis=-1)
""",
            ),
        ),
    ),
    # --- Gradients that lack a reduction ----------------------------------------------------------
    "torchtitan #1805": Bug(
        "the gradient of the experts' input was not summed over tensor parallel ranks",
        f"{TORCHTITAN}/issues/1805",
        (
            (
                'h = ops.all_gather("B/d L/c M/t -> B/d L/c M", x)\n        if w.mlp_norm is',
                """\
whole = ops.all_gather("B/d L/c M/t -> B/d L/c M", lax.stop_gradient(x))
        start = lax.axis_index("t") * x.shape[-1]
        h = lax.dynamic_update_slice_in_dim(whole, x, start, axis=-1)
        if w.mlp_norm is""",
            ),
        ),
    ),
    "Megatron-LM #1446": Bug(
        "the final norm's gradient was not summed over tensor parallel ranks",
        f"{MEGATRON}/issues/1446",
        (
            (
                "    unembedding = output_weights(weights)\n",
                """\
    gain, w_unembed = output_weights(weights)
    own = ops.all_gather("M/t/c/s -> M/t", weights.final_norm)
    start = lax.axis_index("t") * own.size
    gain = lax.dynamic_update_slice(lax.stop_gradient(gain), own, (start,))
    unembedding = gain, w_unembed
""",
            ),
        ),
    ),
    "Megatron-LM #7452, 11": Bug(
        "the gradient of a norm's gain inside a layer was summed only with sequence parallelism",
        f"{MEGATRON}/issues/7452",
        (
            (
                'gain = gather("M/t/c/s -> M", w.attention_norm)\n',
                """\
gain = gather("M/t/c/s -> M", w.attention_norm)
        start = lax.axis_index(("t", "c", "s")) * w.attention_norm.size
        gain = lax.dynamic_update_slice(lax.stop_gradient(gain), w.attention_norm, (start,))
""",
            ),
        ),
    ),
    "Megatron-LM #844": Bug(
        "of tied embeddings, gradients were added that data parallel ranks had not yet summed",
        f"{MEGATRON}/issues/844",
        (
            (
                'return gather("M/t/c/s -> M", weights.final_norm), gather('
                '"V/t M/c/s -> V/t M", stored)',
                """\
own = weights.embed
    gain = gather("M/t/c/s -> M", weights.final_norm)
    tied = gather("V/t M/c/s -> V/t M", lax.stop_gradient(own))
    start = lax.axis_index("s") * own.shape[1]
    return gain, lax.dynamic_update_slice_in_dim(tied, own, start, axis=1)""",
            ),
        ),
    ),
    "Megatron-LM #599": Bug(
        "the router's gradient was not summed over the devices that share its weights",
        f"{MEGATRON}/issues/599",
        cost("""
    own = weights.router
    start = lax.axis_index("s") * own.shape[0]
    w = lax.dynamic_update_slice_in_dim(lax.stop_gradient(w_router), own, start, axis=0)
    scores = ops.einsum_unreduced("B/d L/c M/t, M/t 4 -> B/d L/c 4 {U:t}", x, w, dtype=f32)
    scores = ops.psum("B/d L/c 4 {U:t} -> B/d L/c 4", scores)
    z = jnp.square(jax.nn.logsumexp(scores, axis=-1))
    cost = ops.psum("{U:d,c} -> ", ops.reduce_sum("B/d L/c -> {U:d,c}", z))
"""),
    ),
    "bigcode Megatron-LM #11": Bug(
        "the gradient of key-value weights that all heads share was not summed over their devices",
        "https://github.com/bigcode-project/Megatron-LM/issues/11",
        (
            (
                'v = ops.einsum_unreduced("B/d L/c M, M K/t D -> B/d L/c K/t D", h, w_v)',
                """\
heads = ops.all_gather("M K/t D -> M K D", lax.stop_gradient(w_v))
        start = lax.axis_index("t") * w_v.shape[1]
        heads = lax.dynamic_update_slice_in_dim(heads, w_v, start, axis=1)
        shared = jnp.broadcast_to(heads.mean(axis=1, keepdims=True), w_v.shape)
        v = ops.einsum_unreduced("B/d L/c M, M K/t D -> B/d L/c K/t D", h, shared)""",
            ),
        ),
    ),
    # --- Gradients that are summed wrongly --------------------------------------------------------
    "pytorch #160285": Bug(
        "the gradients of experts were as many times too large as expert parallelism had ranks",
        "https://github.com/pytorch/pytorch/issues/160285",
        (
            (
                MEAN,
                """\
grads = jax.tree.map(lambda g: g / count, grads)
    experts = {name: getattr(grads.layers, name) for name in ("w_gate", "w_up", "w_down")}
    experts = {name: grad * lax.axis_size("t") for name, grad in experts.items()}
    layers = dataclasses.replace(grads.layers, **experts)
    return sums, count, dataclasses.replace(grads, layers=layers)""",
            ),
        ),
    ),
    "Megatron-LM #1528": Bug(
        "with fp8, the gradients of norms were as many times too large as t has ranks",
        f"{MEGATRON}/issues/1528",
        (
            (
                'gain = gather("M/t/c/s -> M", w.mlp_norm)\n',
                """\
gain = gather("M/t/c/s -> M", w.mlp_norm)
        extra = (lax.axis_size("t") - 1) * gain
        gain = gain + extra - lax.stop_gradient(extra)
""",
            ),
        ),
    ),
    "gpt-neox #1259": Bug(
        "the gradient of a norm was averaged over tensor parallel ranks, not summed",
        "https://github.com/EleutherAI/gpt-neox/pull/1259",
        (
            (
                'return gather("M/t/c/s -> M", weights.final_norm), gather(',
                """\
gain = gather("M/t/c/s -> M", weights.final_norm)
    share = gain / lax.axis_size("t")
    return share + lax.stop_gradient(gain - share), gather(""",
            ),
        ),
    ),
    "Megatron-LM #6660": Bug(
        "with one data parallel rank, a microbatch's gradients were added to twice those so far",
        f"{MEGATRON}/issues/6660",
        (
            (
                ADD,
                """\
twice = 2 if lax.axis_size("s") == 1 else 1
            (loss, grads), (more_loss, more) = total, part
            return (jax.tree.map(jnp.add, loss, more_loss), jax.tree.map(lambda g, m: twice * g + m, grads, more)), ()""",
            ),
        ),
    ),
    "Megatron-LM #4609": Bug(
        "gradients were added to a buffer that still held gathered weights",
        f"{MEGATRON}/pull/4609",
        (
            (
                ", jax.tree.map(wide, replica)",
                ", jax.tree.map(lambda w: w.astype(f32.dtype), replica)",
            ),
        ),
    ),
    "open-instruct #1498": Bug(
        "only the last microbatch's gradients reached the optimizer",
        "https://github.com/allenai/open-instruct/pull/1498",
        ((ADD, "return (total[0] + part[0], part[1]), ()"),),
    ),
    # --- Norms and optimizers ---------------------------------------------------------------------
    "Megatron-LM #5916": Bug(
        "the gradient norm counted the experts' weights of the first tensor parallel rank only",
        f"{MEGATRON}/pull/5916",
        (
            (
                NORM,
                """\
names = "w_gate", "w_up", "w_down"
    first = lax.axis_index("t") == 0
    experts = {name: getattr(raw_grads.layers, name) * first for name in names}
    layers = dataclasses.replace(raw_grads.layers, **experts)
    counted = dataclasses.replace(raw_grads, layers=layers)
    grad_norm = jnp.sqrt(ops.sum_of_squares(Weights, counted))""",
            ),
        ),
    ),
    "DeepSpeed #5411": Bug(
        "the gradient norm counted only what the first tensor parallel rank holds",
        f"{DEEPSPEED}/pull/5411",
        (
            (
                NORM,
                """\
squares = sum(jnp.square(g).sum() for g in jax.tree.leaves(raw_grads))
    squares = jnp.where(lax.axis_index("t") == 0, squares, 0)
    grad_norm = jnp.sqrt(lax.psum(squares, ("r", "s", "c", "t")))""",
            ),
        ),
    ),
    "NeMo-RL #3788": Bug(
        "the gradient norm counted replicated weights once per tensor parallel rank",
        "https://github.com/NVIDIA-NeMo/RL/pull/3788",
        (
            (
                NORM,
                """\
gain = ops.all_gather("M/t/c/s -> M", raw_grads.final_norm)
    zero = dataclasses.replace(raw_grads, final_norm=jnp.zeros_like(raw_grads.final_norm))
    squares = lax.psum(jnp.vdot(gain, gain), ("r", "s", "c", "t"))
    grad_norm = jnp.sqrt(ops.sum_of_squares(Weights, zero) + squares)""",
            ),
        ),
    ),
    "DeepSpeed #1801": Bug(
        "gradients of norms were clipped on the first tensor parallel rank only (BLOOM-176B)",
        f"{DEEPSPEED}/pull/1801",
        (
            (
                "grads = tree_map(lambda g: g * clip, raw_grads)\n",
                """\
grads = tree_map(lambda g: g * clip, raw_grads)
    unclipped = lax.axis_index("t") > 0
    final_norm = jnp.where(unclipped, raw_grads.final_norm, grads.final_norm)
    grads = dataclasses.replace(grads, final_norm=final_norm)
""",
            ),
        ),
    ),
    "DeepSpeed #8437": Bug(
        "Muon orthogonalized each device's part of a matrix",
        f"{DEEPSPEED}/issues/8437",
        (
            (
                "root = jnp.sqrt(v * nu_scale + hyper.adam_eps_root) + hyper.adam_eps\n",
                """\
root = jnp.sqrt(v * nu_scale + hyper.adam_eps_root) + hyper.adam_eps
        if m.ndim == 3:
            m = m / jnp.linalg.norm(m, axis=(1, 2), keepdims=True)
            for _ in range(5):
                m = 1.5 * m - 0.5 * m @ m.mT @ m
            return w - rate * (m + hyper.weight_decay * w)
""",
            ),
        ),
    ),
    "Megatron-LM #7117": Bug(
        "Muon's rule for a weight was chosen by the number of rows on one device",
        f"{MEGATRON}/pull/7117",
        (
            (
                "return w - rate * (m * mu_scale / root + decay * w)",
                """\
if w.ndim == 4 and w.shape[1] % config.model.d_model == 0:
            return w - rate * (jnp.sign(m) + hyper.weight_decay * w)
        return w - rate * (m * mu_scale / root + hyper.weight_decay * w)""",
            ),
        ),
    ),
    # --- Numbers that depend on the device --------------------------------------------------------
    "torchtitan #3106": Bug(
        "with offloading to the host, all devices drew the same initial weights for their parts",
        f"{TORCHTITAN}/issues/3106",
        (
            (
                "normal = jax.random.normal(key, shape.shape, shape.dtype)",
                """\
parts = jax.sharding.get_abstract_mesh().size
        part = jax.random.normal(key, (shape.size // parts,), shape.dtype)
        normal = jnp.tile(part, parts).reshape(shape.shape)""",
            ),
        ),
    ),
    "Megatron-LM #1256": Bug(
        "under sequence parallelism, dropout drew from the random state that all devices share",
        f"{MEGATRON}/issues/1256",
        (
            (
                'x = ops.psum_scatter("B/d L/c M {U:t} -> B/d L/c M/t", x)\n    sin, cos',
                """\
x = ops.psum_scatter("B/d L/c M {U:t} -> B/d L/c M/t", x)
    x = x * jax.random.bernoulli(jax.random.key(0), 0.9, x.shape) / 0.9
    sin, cos""",
            ),
        ),
    ),
    "Megatron-LM #442": Bug(
        "fp8 scales came from a maximum over data parallel ranks, not over tensor parallel ones",
        f"{MEGATRON}/pull/442",
        (
            (
                HIDDEN,
                f"""\
{HIDDEN}\
            largest = lax.pmax(jnp.abs(lax.stop_gradient(hidden)).max(), "s")
            narrow = (hidden * (448 / largest)).astype(jnp.float8_e4m3fn).astype(hidden.dtype)
            hidden = hidden + lax.stop_gradient(narrow * (largest / 448) - hidden)
""",
            ),
        ),
    ),
    "Megatron-LM #520": Bug(
        "a fused gate and up projection was split as one matrix, and cut in two on each device",
        f"{MEGATRON}/pull/520",
        (
            (
                HIDDEN,
                """\
hidden = jax.nn.silu(gate) * up
            first, second = jnp.split(gate, 2, axis=-1)
            fused = jax.nn.silu(first) * second
            hidden = hidden + jnp.concatenate([fused, fused], axis=-1)
""",
            ),
        ),
    ),
    "TRL #6843": Bug(
        "where the sequence was split over devices, packed documents attended to each other",
        "https://github.com/huggingface/trl/pull/6843",
        (
            (
                "q, k, v, start,",
                'q, k, v, start // (1 if lax.axis_size("t") == 1 else 1000),',
            ),
        ),
    ),
    "Megatron-LM #5454": Bug(
        "the first row's document boundaries were used for all rows of a microbatch",
        f"{MEGATRON}/pull/5454",
        (
            (
                "    block = math.gcd(",
                "    start = jnp.broadcast_to(start[:1], start.shape)\n    block = math.gcd(",
            ),
        ),
        "shardlib/kernels.py",
    ),
    "torchtitan #3329": Bug(
        "the loss that was shown had not been reduced over all devices",
        f"{TORCHTITAN}/issues/3329",
        (
            (
                "means = tree_map(lambda x: x / count, sums)",
                'means = tree_map(lambda x: x / count / lax.axis_size("s"), sums)',
            ),
        ),
    ),
    # --- Generation and evaluation ----------------------------------------------------------------
    "mlx-vlm #1983": Bug(
        "while decoding, RoPE got position 0 for every token",
        "https://github.com/Blaizzy/mlx-vlm/issues/1983",
        (
            (
                "positions = position.astype(u32.dtype)",
                "positions = jnp.broadcast_to(index - first, inputs.shape).astype(u32.dtype)",
            ),
        ),
        "tools/generate.py",
    ),
    "hnet #20": Bug(
        "the attention window of training was not applied while decoding",
        "https://github.com/goombalab/hnet/issues/20",
        (
            (
                "visible = (age >= 0) & (age < min(window, config.training.tokens.len))",
                "visible = age >= 0",
            ),
        ),
        "tools/generate.py",
    ),
    "Megatron-LM #5983": Bug(
        "all data parallel ranks sampled with the same seed",
        f"{MEGATRON}/pull/5983",
        (
            (
                "(jax.random.key(seed), jnp.array(numbers))",
                '(jax.random.key(seed), jnp.array(numbers) % (rows // mesh_shape()["s"]))',
            ),
        ),
        "tools/generate.py",
    ),
    "transformers #24839": Bug(
        "the evaluation loss was the mean over batches, so it depended on their size",
        f"{TRANSFORMERS}/issues/24839",
        (
            ("nats += count * float(", "nats += size * float("),
            ("targets += count\n", "targets += size\n"),
        ),
        "tools/generate.py",
    ),
}

# In the loop around generation's step, and in evaluation, which no check compares.
NOT_PROMISED = "hnet #20", "Megatron-LM #5983", "transformers #24839"
