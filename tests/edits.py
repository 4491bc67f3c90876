"""Edits of the source as experiments make them, wrong and right ones, for testing the checks.

A wrong edit makes a number depend on the mesh or on the number of parts (microbatches, loss
chunks), or makes generation differ from training. A number is anything that a step returns: the
loss, the state, the metrics, the validation loss, the initial state, a generated text. All edits
trace, and nothing tells them apart but their numbers, for which these things matter:

- Batches with padding, unevenly spread, and documents of a few tokens.
- Weights, gains and moments unlike those of a fresh state: gains of 1 and zero moments hide much.
- Sizes that split over d and t into parts of different lengths, and into two microbatches. Model
  sizes close to each other, so that the order of two lengths turns where one of them is split.
- The updates themselves: compared with a weight, a wrong update is small.
- RMSNorm hides a scale. With Adam, nu tells gradients apart that differ by a factor.

There is one edit of each class (wrong, right, ...) and kind. tests/mutations.py makes many more.
"""

import ast
import itertools
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from runtime.config import ROOT


class Change(NamedTuple):
    """Code that is put at an anchor in a function or class, which may be dotted: "adamw.update". An
    anchor is a name, and stands for the last statement that sets it; "return", for the last of
    those; "", for the function itself; or a type string or an expression that occurs once, in any
    format, and stands for the statement that it is in, or for itself with how="swap"."""

    how: str  # before, after, instead, swap
    function: str
    anchor: str
    code: str


def before(function: str, anchor: str, code: str) -> Change:
    return Change("before", function, anchor, code)


def after(function: str, anchor: str, code: str) -> Change:
    return Change("after", function, anchor, code)


def instead(function: str, anchor: str, code: str) -> Change:
    return Change("instead", function, anchor, code)


def swap(function: str, old: str, new: str) -> Change:
    return Change("swap", function, old, new)


class Edit(NamedTuple):
    kind: str  # the class of the mistake, or what the experiment changes
    changes: tuple[Change, ...]
    file: str = "train.py"


def edit(kind: str, *changes: Change, file: str = "train.py") -> Edit:
    return Edit(kind, changes, file)


Definition = ast.FunctionDef | ast.ClassDef


def _own(node: ast.AST, top: bool = True) -> Iterator[ast.AST]:
    """The nodes of a function that aren't in another one within it."""
    if top or not isinstance(node, Definition):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _own(child, False)


def _assigned(node: ast.AST) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = [x for target in targets if target for x in ast.walk(target)]
    return {x.id for x in names if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}


def find(tree: ast.AST, change: Change) -> Any:
    """The node that a change stands at."""
    scope: Any = tree
    for name in change.function.split("."):
        every = [n for n in ast.walk(scope) if isinstance(n, Definition) and n.name == name]
        assert len(every) == 1, f"{len(every)} functions {name}: update {change}"
        scope = every[0]
    if not change.anchor:
        return scope
    nodes, anchor = [*_own(scope)], change.anchor
    statements = [node for node in nodes if isinstance(node, ast.stmt)]
    if anchor.isidentifier() and change.how != "swap":
        last = [
            node
            for node in statements
            if (isinstance(node, ast.Return) if anchor == "return" else anchor in _assigned(node))
        ]
        assert last, f"nothing sets it: update {change}"
        return max(last, key=lambda node: node.lineno)
    text = repr(anchor) if "->" in anchor and '"' not in anchor else anchor
    wanted = ast.dump(ast.parse(text, mode="eval").body)
    found = [node for node in nodes if isinstance(node, ast.expr) and ast.dump(node) == wanted]
    assert len(found) == 1, f"it occurs {len(found)} times: update {change}"
    if change.how == "swap":
        return found[0]
    around = [node for node in statements[1:] if any(x is found[0] for x in ast.walk(node))]
    return max(around, key=lambda node: node.lineno)  # the innermost


def spans(text: bytes) -> Callable[[Any], tuple[int, int]]:
    """A function that says where a node of this source begins and ends."""
    starts = [0, *itertools.accumulate(len(line) + 1 for line in text.split(b"\n"))]

    def span(node: Any) -> tuple[int, int]:
        ends = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        first, last = (starts[line - 1] + column for line, column in ends)
        return first, last

    return span


def edited_source(edit: Edit) -> str:
    """The text of the edit's file with all its changes."""
    text = (ROOT / edit.file).read_bytes()
    tree, span, pieces = ast.parse(text), spans(text), []
    for change in edit.changes:
        node = find(tree, change)
        first, last = span(node)
        code = textwrap.dedent(change.code).strip("\n")
        if change.how != "swap":
            code = textwrap.indent(code, " " * node.col_offset).lstrip()
        between = "\n" + " " * node.col_offset
        if change.how == "after":
            first, code = last, between + code
        elif change.how == "before":
            if isinstance(node, Definition) and node.decorator_list:
                first = span(node.decorator_list[0])[0] - len("@")
            last, code = first, code + between
        pieces.append((first, last, len(pieces), code.encode()))
    pieces.sort()
    for (_, end, *_), (begin, *_) in itertools.pairwise(pieces):
        assert end <= begin, f"two changes of one place: {edit}"
    for first, last, _, code in reversed(pieces):
        text = text[:first] + code + text[last:]
    return text.decode()


def block(kind: str, anchor: str, code: str, *others: Change) -> Edit:
    """Adds code in the block of train.py's forward, after its last statement that sets a name."""
    return edit(kind, after("block", anchor, code), *others)


def neurons(kind: str, code: str, *others: Change) -> Edit:
    """Adds code in the feed-forward, after its last statement that sets the neurons' values."""
    return edit(kind, after("swiglu", "hidden", code), *others)


def loss(kind: str, anchor: str, code: str) -> Edit:
    """Adds code in the loss of a chunk."""
    return edit(kind, after("loss", anchor, code))


def update(kind: str, code: str) -> Edit:
    """Puts code in place of what AdamW returns for a weight."""
    return edit(kind, instead("adamw.update", "return", code))


def weight(declaration: str) -> Change:
    """Declares a weight of a layer."""
    return after("Layer", "mlp", declaration)


def definition(code: str) -> Change:
    """Defines something before the model."""
    return before("Layer", "", textwrap.dedent(code).strip("\n") + "\n\n")


def metric(kind: str, code: str) -> Edit:
    """Adds a metric, computed by `code`."""
    code = textwrap.dedent(code) + 'metrics["extra"] = extra'
    return edit(kind, before("training_step", "return", code))


def attention(kind: str, change: Change) -> Edit:
    return edit(kind, change, file="shardlib/kernels.py")


def of_state(kind: str, first: str, code: str) -> Edit:
    """Adds an average of the weights to the state, which starts at `first` and is set by `code`."""
    state = "State(jnp.uint32(0), weights, *jax.tree.map(jnp.zeros_like, shapes)"
    kinds = 'State(u32[""], weights, weights, nu, weights)'
    made = "State(old.step, weights, mu, nu)"
    return edit(
        kind,
        after("State", "nu", "average: Stored"),
        swap("fresh_state", f"{state})", f"{state}, {first})"),
        swap("state_type", 'State(u32[""], weights, weights, nu)', kinds),
        before("training_step", made, code),
        swap("training_step", made, "State(old.step, weights, mu, nu, average)"),
    )


EMBEDDED = "x"  # the residual stream before the first layer
ROTATED = "rope(q, k, sin, cos)"
ATTENDED = "mixed"
OUTPUT = "swiglu(h, w.mlp)"
RETURNED = "leave(x, output, w.mlp_norm, config), routed"


def row_before(pair: str) -> Edit:
    """Adds to each row of a weight the one before, which an op passes along the devices."""
    op = definition(
        f'''
        @ops.define_op
        def row_before(call: ops.Call, x: jax.Array) -> jax.Array:
            """Takes the row before each one, of the first row the last one."""
            axes = call.result.dims[0].axes
            count = math.prod(map(lax.axis_size, axes))
            last = lax.ppermute(x[-1:], axes, [({pair}) for i in range(count)]) if axes else x[-1:]
            return jnp.concatenate([last, x[:-1]])
        '''
    )
    mixed = 'ops.all_gather("M/c/s F/t -> M F/t", w.w_up)'
    before = '0.1 * row_before("M/c/s F/t -> M/c/s F/t", w.w_up)'
    return edit(
        "neighbors", swap("swiglu", mixed, mixed.replace("w.w_up", f"w.w_up + {before}")), op
    )


WRONG: dict[str, Edit] = {
    "condition_on_a_part": update(
        "optimizer's statistics of a part",
        """
        def decayed(w: jax.Array) -> jax.Array:
            return w * (1 - rate * hyper.weight_decay)

        large = jnp.any(jnp.abs(w) > 1.2)
        w = lax.cond(large, decayed, lambda w: w, w)
        return w - rate * (m * mu_scale / root)
        """,
    ),
    "clip_by_the_largest_of_a_part": neurons(
        "a threshold that isn't reached",
        "hidden = hidden / jnp.maximum(jnp.abs(hidden).max(-1, keepdims=True) / 1e3, 1)",
    ),
    "numbered_by_numpy": neurons(
        "constants", "hidden = hidden * (np.arange(hidden.shape[-1]) < 2048)"
    ),
    "numbered_by_a_sum_of_ones": neurons(
        "constants", "hidden = hidden * (jnp.cumsum(jnp.ones(hidden.shape[-1])) < 2048)"
    ),
    "largest_of_a_part": neurons(
        "order", "hidden = jnp.where(hidden >= lax.top_k(hidden, 1)[0] - 1e3, hidden, 0)"
    ),
    "softmax_neurons_first_part": neurons(
        "part of a whole",
        """
        whole = ops.all_gather("B/d L/c F/t -> B/d L/c F", hidden)
        hidden = jax.nn.softmax(whole, axis=-1)[..., : hidden.shape[-1]]
        """,
    ),
    "rare_targets_weigh_more": loss(
        "scatter-add over tokens",
        "nats",
        """
        counts = jnp.zeros(config.model.vocab).at[targets].add(1.0)
        nats = nats * lax.rsqrt(counts[targets])
        """,
    ),
    "gradient_by_devices": edit(
        "number from the mesh",
        after(
            "training_step",
            "grads",
            "grads = jax.tree.map(lambda g: g / jax.device_count() ** 0.5, grads)",
        ),
    ),
    "few_heads": block(
        "branch on the length of a part",
        ROTATED,
        "if k.shape[2] <= 4:\n    k = k / (1 + jnp.abs(k))",
    ),
    "slopes_of_local_heads": block(
        "array made at the length of a part",
        ATTENDED,
        """
        slopes = 2.0 ** -(8 * jnp.arange(1, k.shape[2] + 1) / k.shape[2])
        mixed = mixed * slopes[:, None].astype(compute.dtype)
        """,
    ),
    "smoothed_with_the_position_before": loss(
        "within a microbatch or chunk",
        "nats",
        "nats = nats + 0.1 * jnp.pad(nats, ((0, 0), (1, 0)))[:, :-1]",
    ),
    "halves_multiplied": neurons(
        "reshape of a split dimension",
        """
        one, other = jnp.split(hidden, 2, axis=-1)
        hidden = jnp.concatenate([one, one * other], axis=-1)
        """,
    ),
    "neurons_rolled": neurons(
        "neighbors across the border of a part",
        "hidden = hidden + 0.5 * jnp.roll(hidden, 1, axis=-1)",
    ),
    "maximum_of_a_part_by_name": neurons(
        "string that doesn't fit the lengths",
        """
        peak = ops.reduce_max("B/d L/c X -> B/d L/c", lax.stop_gradient(jnp.abs(hidden)))
        hidden = hidden / (1 + peak[..., None])
        """,
    ),
    "own_op_adds_means": neurons(
        "inside an op's scope",
        """
        level = mean_square("B/d L/c F/t -> B/d L/c", lax.stop_gradient(hidden))
        hidden = hidden / (1 + level[..., None])
        """,
        definition(
            '''
            @ops.define_op
            def mean_square(call: ops.Call, x: jax.Array) -> jax.Array:
                """The mean of the squares along the last dimension, over all devices."""
                return lax.psum(jnp.square(x).mean(-1), "t")
            '''
        ),
    ),
    "attention_clips_at_the_largest_score": attention(
        "inside attention",
        after(
            "plain_attention.attend",
            'einsum("bqgkd,bskd->bkgqs", q_block, k, dtype=jnp.float32)',
            "scores = scores / (1 + jnp.abs(lax.stop_gradient(scores)).max())",
        ),
    ),
    "residual_added_before_the_sum": block(
        "counted several times", OUTPUT, 'y = y + lax.pcast(0.5 * h, "t", to="unreduced")'
    ),
    "norm_over_all_heads": block(
        "merged dimensions",
        ROTATED,
        """
        heads = q.reshape(*q.shape[:2], -1)
        scale = lax.rsqrt(jnp.square(heads).mean(-1, keepdims=True) + 1e-6)
        q = (heads * scale).reshape(q.shape)
        """,
    ),
    "gradient_clipped_by_token": neurons(
        "custom gradient",
        "hidden = passed(hidden)",
        definition(
            '''
            @jax.custom_vjp
            def passed(x: jax.Array) -> jax.Array:
                """Changes only the gradient."""
                return x


            def _passed_backward(_: None, g: jax.Array) -> tuple[jax.Array]:
                return (g / (1 + jnp.linalg.norm(g, axis=-1, keepdims=True)),)


            passed.defvjp(lambda x: (x, None), _passed_backward)
            '''
        ),
    ),
    "dropout_key_of_a_local_row": neurons(
        "random numbers of a part",
        """
        fold = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(0), row))
        keys = fold(jnp.arange(hidden.shape[0]))
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, hidden.shape[1:2]))(keys)
        hidden = hidden * kept[..., None]
        """,
    ),
    "mean_of_devices": loss(
        "mean of means",
        "nats",
        "nats = nats / jnp.maximum(loss_mask.sum(), 1) * loss_mask.size",
    ),
    "lamb": update(
        "optimizer's statistics of a part",
        """
        change = m * mu_scale / root + hyper.weight_decay * w
        trust = jnp.linalg.norm(w) / (jnp.linalg.norm(change) + 1e-6)
        return w - rate * trust * change
        """,
    ),
    "average_weights_by_distance": of_state(
        "average of the weights",
        "jax.tree.map(jnp.zeros_like, weights)",
        """
        def pulled(a: jax.Array, w: jax.Array) -> jax.Array:
            return a + (w - a) / (1 + jnp.sum((w - a) ** 2))

        average = jax.tree.map(pulled, state.average, weights)
        """,
    ),
    "hidden_standardized": neurons(
        "statistics of a part in the model",
        "hidden = jax.nn.standardize(hidden, axis=-1)",
    ),
    "deviation_of_the_parts": metric(
        "metric of a part",
        """
        own = weights.layers.mlp.w_up.std()
        extra = ops.psum("{U:d,c,t} -> ", ops.reduce_sum("X/t/c/d -> {U:d,c,t}", own[None]))
        extra = extra / (config.mesh.d * config.mesh.t)
        """,
    ),
    "seed_by_mesh": edit(
        "initial state",
        swap("init_weights", "config.training.seed", "config.training.seed + config.mesh.d"),
    ),
    "convolved_keys": block(
        "generation: mixes positions outside of attention",
        ROTATED,
        "k = 0.7 * k + 0.3 * jnp.pad(k, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]",
    ),
    "decode_window_is_shorter": edit(
        "generation",
        swap("extend", "config.training.tokens.len", "config.training.tokens.len - 1"),
        file="tools/generate.py",
    ),
    "row_after": row_before("i, (i - 1) % count"),
}

# Wrong, and not refused: a number from the mesh, in a limit that no tiny run reaches, which a start
# names; and the loop on the host that calls generation's step, which tests/tools/test_generate.py
# compares with an oracle.
NOT_PROMISED: dict[str, Edit] = {
    "warmup_in_local_tokens": edit(
        "number from the mesh",
        after(
            "training_step",
            "clip",
            """
            tokens = config.training.tokens
            seen = (state.step + 1) * tokens.batch * tokens.len // config.mesh.d
            rate = hyper.learning_rate * jnp.minimum(1, seen / 100)
            hyper = dataclasses.replace(hyper, learning_rate=rate)
            """,
        ),
    ),
    "samples_with_a_seed_by_mesh": edit(
        "generation",
        swap("generate", "jax.random.key(seed)", 'jax.random.key(seed + mesh_shape()["s"])'),
        file="tools/generate.py",
    ),
}

PART = definition(
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
    '''
)

RIGHT: dict[str, Edit] = {
    "row_before": row_before("i, (i + 1) % count"),
    "gelu": neurons("activation", "hidden = jax.nn.gelu(gate) * up"),
    "rows_one_by_one": neurons(
        "loop", "hidden = lax.map(lambda row: jax.nn.silu(row[0]) * row[1], (gate, up))"
    ),
    "recomputed_activation": neurons(
        "recomputation",
        "hidden = jax.checkpoint(lambda gate, up: jax.nn.silu(gate) * up)(gate, up)",
    ),
    "pairs_of_neurons": neurons(
        "reshape",
        """
        pairs = hidden.reshape(*hidden.shape[:2], -1, 2)
        hidden = (pairs - pairs.mean(-1, keepdims=True)).reshape(hidden.shape)
        """,
    ),
    "softmax_of_neurons_by_own_part": neurons(
        "whole dimension",
        """
        whole = jax.nn.softmax(ops.all_gather("B/d L/c F/t -> B/d L/c F", hidden), axis=-1)
        hidden = part("B/d L/c F -> B/d L/c F/t", whole)
        """,
        PART,
    ),
    "eight_bits_by_tensor": edit(
        "rounding",
        after(
            "swiglu",
            "w_up",
            """
            largest = ops.reduce_max("X/d F/t -> ", lax.stop_gradient(jnp.abs(w.w_up)))
            scale = largest / 7 + 1e-6
            w_up = w_up + lax.stop_gradient(jnp.round(w_up / scale) * scale - w_up)
            """,
        ),
    ),
    "dropout_by_content_of_the_row": edit(
        "random numbers",
        after(
            "total_loss",
            "routed",
            """
            def kept(row: jax.Array) -> jax.Array:
                key = jax.random.fold_in(jax.random.key(0), row.sum())
                return jax.random.bernoulli(key, 0.9, row.shape).astype(x.dtype)

            rows = ops.all_gather("B/d L/c -> B/d L", batch.targets)
            x = x * ops.split("B/d L -> B/d L/c", jax.vmap(kept)(rows))[..., None]
            """,
        ),
    ),
    "query_and_key_norm": edit(
        "norm",
        before(
            "block",
            ROTATED,
            """
            q = q * lax.rsqrt(jnp.square(q).mean(-1, keepdims=True) + config.norm_eps)
            k = k * lax.rsqrt(jnp.square(k).mean(-1, keepdims=True) + config.norm_eps)
            """,
        ),
    ),
    "half_of_rope": edit(
        "positions",
        instead(
            "block",
            ROTATED,
            """
            turned, _ = rope(q, k, sin, cos)
            q = jnp.concatenate([turned[..., :4], q[..., 4:]], axis=-1)
            """,
        ),
    ),
    "scaled_unreduced_sum": block(
        "scale",
        OUTPUT,
        """
        axes = tuple(jax.typeof(y).manual_axis_type.unreduced)
        y = y * lax.pcast(jnp.asarray(0.3, y.dtype), axes, to="reduced")
        """,
    ),
    "query_heads_mixed": block(
        "heads", ATTENDED, "mixed = mixed + 0.1 * mixed.mean(2, keepdims=True)"
    ),
    "gated_heads": block(
        "extra weight",
        ATTENDED,
        """
        w_open = ops.all_gather("M/c/s K/t -> M K/t", w.w_open)
        opened = jax.nn.sigmoid(ops.einsum_unreduced("B/d L/c M, M K/t -> B/d L/c K/t", h, w_open))
        mixed = mixed * opened[:, :, None, :, None]
        """,
        weight('w_open: compute["M/c/s K/t"]'),
    ),
    "attention_across_documents": attention(
        "attention",
        swap(
            "plain_attention.attend",
            "start[:, :, None] <= key_position[:, None]",
            "start[:, :, None] >= 0 * key_position[:, None]",
        ),
    ),
    "embedding_in_each_block": edit(
        "wiring",
        after("forward", EMBEDDED, "first = x"),
        swap("block", RETURNED, f"0.1 * first + {RETURNED}"),
    ),
    "label_smoothing": loss(
        "loss",
        "nats",
        """
        mean = ops.reduce_sum("B/d l/c V/t -> B/d l/c {U:t}", logits)
        mean = ops.psum("B/d l/c {U:t} -> B/d l/c", mean) / config.model.vocab
        nats = (jnp.log(sum_exp) - 0.9 * logit - 0.1 * mean) * loss_mask
        """,
    ),
    "gradient_scaled_by_custom_vjp": neurons(
        "custom gradient",
        "hidden = halved(hidden)",
        definition(
            '''
            @jax.custom_vjp
            def halved(x: jax.Array) -> jax.Array:
                """Halves the gradient and clips each of its entries."""
                return x


            halved.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g / 2, -1e-2, 1e-2),))
            '''
        ),
    ),
    "adafactor": edit(
        "optimizer",
        after(
            "adamw",
            "nu",
            """
            def factored(v: jax.Array) -> jax.Array:
                rows = ops.reduce_sum("layers M/c/d F/t -> layers M/c/d {U:t}", v)
                rows = ops.psum("layers M/c/d {U:t} -> layers M/c/d", rows)
                columns = ops.reduce_sum("layers M/c/d F/t -> layers F/t {U:d,c}", v)
                columns = ops.psum("layers F/t {U:d,c} -> layers F/t", columns)
                total = ops.reduce_sum("layers M/c/d -> layers {U:d,c}", rows)
                total = ops.psum("layers {U:d,c} -> layers", total)[:, None, None]
                return rows[:, :, None] * columns[:, None] / (total + 1e-20)

            mlp = nu.layers.mlp
            mlp = dataclasses.replace(mlp, w_up=factored(mlp.w_up))
            nu = dataclasses.replace(nu, layers=dataclasses.replace(nu.layers, mlp=mlp))
            """,
        ),
    ),
    "average_weights": of_state(
        "average of the weights",
        "weights",
        """
        kept = jnp.minimum(0.99, (2 + state.step) / (11 + state.step))
        average = jax.tree.map(lambda a, w: kept * a + (1 - kept) * w, state.average, weights)
        """,
    ),
    "constant_and_linear_decay": edit(
        "schedule", after("learning_rate", "decay", "decay = min(5 * (1 - done), 1)")
    ),
    "microbatches_interleaved": edit(
        "order", swap("loss_and_grads", '"(n B) L -> n B L"', '"(B n) L -> n B L"')
    ),
    "share_of_small_entries": metric(
        "metric",
        """
        small = (jnp.abs(weights.embed) < 0.1).astype(f32.dtype)
        few, entries = (
            ops.psum("{U:d,c,t} -> ", ops.reduce_sum("V/t M/c/d -> {U:d,c,t}", x))
            for x in (small, jnp.ones_like(small))
        )
        extra = few / entries
        """,
    ),
    "truncated_normal": edit(
        "initial state",
        swap(
            "leaf",
            "jax.random.normal(key, shape.shape, shape.dtype)",
            "jax.random.truncated_normal(key, -2, 2, shape.shape, shape.dtype)",
        ),
    ),
}

# Right: what is replicated over an axis is used by each device on its own. ops.broadcast, which
# train.py calls for weights, says so: nothing forward, and backward an all-reduce.
RIGHT_WITH_BROADCAST: dict[str, Edit] = {
    "temperature_of_a_layer": edit(
        "replicated weight",
        before("block", ROTATED, "q = (q * w.heat_norm).astype(q.dtype)"),
        weight('heat_norm: f32[""]'),
    ),
    "softmax_of_neurons": neurons(
        "whole dimension",
        """
        peak = ops.reduce_max("B/d L/c F/t -> B/d L/c", lax.stop_gradient(hidden))
        exp = jnp.exp(hidden - peak[..., None])
        total = ops.reduce_sum("B/d L/c F/t -> B/d L/c {U:t}", exp)
        total = ops.broadcast("B/d L/c -> B/d L/c", ops.psum("B/d L/c {U:t} -> B/d L/c", total))
        hidden = exp / total[..., None]
        """,
    ),
    "sandwich_norm": edit(
        "norm",
        before(
            "leave",
            "return",
            """
            squares = ops.reduce_sum("B/d L/c M/t -> B/d L/c {U:t}", jnp.square(y))
            squares = ops.psum("B/d L/c {U:t} -> B/d L/c", squares)
            squares = ops.broadcast("B/d L/c -> B/d L/c", squares)
            y = y * lax.rsqrt(squares / config.d_model + config.norm_eps)[..., None]
            """,
        ),
    ),
    "slopes_of_all_heads": attention(
        "attention",
        after(
            "plain_attention.attend",
            'einsum("bqgkd,bskd->bkgqs", q_block, k, dtype=jnp.float32)',
            """
            count = k.shape[2] * lax.axis_size("t")
            heads = 1 + lax.axis_index("t") * k.shape[2] + jnp.arange(k.shape[2])
            slopes = 2.0 ** -(8 * heads / count)
            age = position[:, :, None] - key_position[:, None]
            scores = scores - slopes[:, None, None, None] * age[:, None, None]
            """,
        ),
    ),
    "mean_of_a_split_weight": metric(
        "metric",
        """
        extra = ops.reduce_mean("V/t M/c/d -> {U:d,c,t}", jnp.abs(weights.embed))
        extra = ops.psum("{U:d,c,t} -> ", extra)
        """,
    ),
    "every_second_neuron_halved": neurons("indices", "hidden = hidden.at[..., ::2].multiply(0.5)"),
    "each_row_halved": neurons(
        "indices", "hidden = hidden.at[jnp.arange(hidden.shape[0])].multiply(0.5)"
    ),
}

# Right on every mesh and in any number of parts. But generation differs, because it mixes positions
# outside of attention, where generation has a cache.
RIGHT_IN_TRAINING: dict[str, Edit] = {
    "depthwise_convolution_along_the_sequence": edit(
        "mixes positions outside of attention",
        before(
            "swiglu",
            'ops.all_gather("M/c/s F/t -> M F/t", w.w_gate)',
            """
            filters = jnp.array([0.2, 0.3, 0.5], h.dtype)[:, None, None]
            filters = jnp.broadcast_to(filters, (3, 1, h.shape[-1]))
            h = lax.conv_general_dilated(
                h, filters, (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC"),
                feature_group_count=h.shape[-1],
            )
            """,
        ),
    ),
}


def of_experts(kind: str, *changes: Change) -> Edit:
    return edit(kind, *changes, file="variants/experts.py")


def of_families(kind: str, *changes: Change) -> Edit:
    return edit(kind, *changes, file="variants/families.py")


# Of a model with experts and both of their costs, biases, norms of heads and a window, trained by
# Muon.
WRONG_WITH_VARIANTS: dict[str, Edit] = {
    "cost_divided_by_the_devices": of_experts(
        "a cost", swap("costs", "routing.z_cost", "1 / jax.device_count() * routing.z_cost")
    ),
    "router_sees_its_part_of_the_model": of_experts(
        "the router",
        after("mixture", "logits", "logits = logits + part.mean(-1, keepdims=True)"),
    ),
    "bias_of_choices_by_the_rows_of_a_part": of_experts(
        "the choice",
        before("mixture", "chosen", "biased = biased - biased.mean((0, 1))"),
    ),
    "experts_of_the_next_device": of_experts(
        "an expert of another device",
        before(
            "mixture",
            "dropless.experts",
            "w_up = lax.ppermute(w_up, 't', [(i, (i + 1) % 3) for i in range(3)])",
        ),
    ),
    "score_without_its_gradients_sum": of_experts(
        "a gradient",
        instead(
            "mixture",
            "B/d L/c k -> B/d L/c k",
            'score = ops.varying(lax.stop_gradient(score), ("t",)) + 0 * score',
        ),
    ),
    "bias_moved_by_a_device": edit(
        "the bias",
        swap("training_step", "hyper.bias_rate", "hyper.bias_rate * (1 + lax.axis_index('s'))"),
    ),
    "muon_norm_of_all_matrices_of_a_device": edit(
        "Muon", swap("newton_schulz", "(1, 2)", "None"), file="variants/muon.py"
    ),
    "norm_of_the_next_head": of_families(
        "a norm",
        after(
            "HeadNorms.__call__",
            "B/d L/c K/t D -> B/d L/c K/t",
            "squares = jnp.roll(squares, 1, axis=2)",
        ),
    ),
    "bias_by_the_heads_of_a_device": of_families(
        "a bias",
        swap("adjusted", "bias", "bias * (1 + jnp.arange(bias.shape[-2]))[:, None]"),
    ),
    "window_by_the_row_of_a_device": of_families(
        "a window",
        swap(
            "first_visible",
            "window - 1",
            "window - 1 - (jnp.arange(len(position)) % 3).astype(u32.dtype)[:, None]",
        ),
    ),
}
RIGHT_WITH_VARIANTS: dict[str, Edit] = {
    "scores_scaled": of_experts(
        "scores", before("mixture", "B/d L/c k -> B/d L/c k", "score = 2.5 * score")
    ),
    "router_z_cost_on_scores": of_experts(
        "a cost", swap("mixture", "jnp.square(jax.nn.logsumexp(logits, -1))", "logits.max(-1)")
    ),
    "relu_in_experts": edit(
        "an expert",
        swap("swiglu", "jax.nn.silu(gate)", "jax.nn.relu(gate)"),
        file="variants/dropless.py",
    ),
    "bias_in_proportion": of_experts(
        "the bias",
        swap("rebalanced", "jnp.sign(lacking)", "(1 - load / load.mean(-1, keepdims=True))"),
    ),
    "logits_softly_capped": of_experts(
        "the router", after("mixture", "logits", "logits = 30 * jnp.tanh(logits / 30)")
    ),
    "one_expert_first": of_experts(
        "the choice", before("mixture", "chosen", "biased = biased.at[..., 0].set(2)")
    ),
    "bias_after_a_tanh": of_families("a bias", swap("adjusted", "bias", "jnp.tanh(bias)")),
    "muon_of_each_matrix_in_turn": edit(
        "Muon",
        swap(
            "orthogonalize",
            "newton_schulz(x)",
            "lax.map(lambda y: newton_schulz(y[None])[0], x)",
        ),
        file="variants/muon.py",
    ),
}
