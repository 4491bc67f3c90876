"""Edits of the source as experiments make them, wrong and right ones, for testing the checks.

A wrong edit makes a number depend on the mesh or on the number of parts (microbatches, loss
chunks), or makes generation differ from training. A number is anything that a step returns: the
loss, the state, the metrics, the validation loss, the initial state, a generated text. All edits
trace. Many wrong ones show only in their numbers, if batches, states and sizes are chosen well:

- Batches with padding, unevenly spread, and documents of a few tokens.
- Weights, gains and moments unlike those of a fresh state: gains of 1 and zero moments hide much.
- Sizes that split over d and t into parts of different lengths, and into two microbatches. Model
  sizes close to each other, so that splitting one of them may reverse their order.
- The updates themselves: compared with a weight, a wrong update is small.
- RMSNorm hides a scale. Adam's update hides a factor of the gradients; its nu shows it.

A list has one or two edits of a kind. tests/mutations.py makes many more.

A list of edits is a text. A line `=== NAME: KIND` begins an edit. A line `--- HOW FUNCTION: ANCHOR`
or `--- HOW FUNCTION in FILE: ANCHOR` begins a change of it, in train.py or in that file; the lines
below are its code. `--- NAME` stands for the changes of that shared edit. HOW says where the code
goes: before, after, or instead of the statement at the anchor; swap replaces the anchor itself.
FUNCTION may be a class, and dotted: adamw.update. ANCHOR is a name (the last statement that sets
it), `return` (the last one), empty (the function itself), or a type string or an expression that
occurs once, in any format.
"""

import ast
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from runtime.config import ROOT


class Change(NamedTuple):
    """Code that is put at an anchor in a function or class."""

    how: str  # before, after, instead, swap
    function: str
    anchor: str
    code: str


class Edit(NamedTuple):
    changes: list[Change]
    file: str


CHANGE = re.compile(r"(\w+) ([\w.]+)(?: in (\S+))?: ?(.*)")


def listed(text: str) -> dict[str, Edit]:
    """Reads a list of edits, by name."""
    edits = {}
    for block in text.split("=== ")[1:]:
        first, *parts = block.split("\n--- ")
        changes, file = list[Change](), "train.py"
        for part in parts:
            line, _, code = part.partition("\n")
            if line in SHARED:
                changes += SHARED[line].changes
            else:
                how, function, other, anchor = CHANGE.fullmatch(line).groups()
                changes.append(Change(how, function, anchor, code.strip("\n")))
                file = other or file
        edits[first.partition(":")[0].strip()] = Edit(changes, file)
    return edits


Definition = ast.FunctionDef | ast.ClassDef


def _own(node: ast.AST, top: bool = True) -> Iterator[ast.AST]:
    """Yields the nodes of a function that aren't in another one within it."""
    if top or not isinstance(node, Definition):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _own(child, False)


def _assigned(node: ast.AST) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = [x for target in targets if target for x in ast.walk(target)]
    return {x.id for x in names if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}


def find(tree: ast.AST, change: Change) -> Any:
    """Returns the node at a change's anchor."""
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
    """Returns a function from a node of this source to the bytes where it begins and ends."""
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
        code = change.code
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


SHARED: dict[str, Edit] = {}
SHARED |= listed("""
=== router
--- before Weights: final_norm
w_router: compute["M/t/c/s 4", matrix("M")]
--- after total_loss: routed
w_router = ops.all_gather("M/t/c/s 4 -> M/t 4", weights.w_router)
scores = ops.einsum_unreduced("B/d L/c M/t, M/t 4 -> B/d L/c 4 {U:t}", x, w_router, dtype=f32)
scores = ops.psum("B/d L/c 4 {U:t} -> B/d L/c 4", scores)
--- swap total_loss: objective, sums
objective + 0.1 * cost, sums
=== average
--- after State: nu
average: Stored
--- swap state_type: State(u32[""], weights, weights, nu)
State(u32[""], weights, weights, nu, weights)
--- swap training_step: State(old.step, weights, mu, nu)
State(old.step, weights, mu, nu, average)
=== row_before
--- swap swiglu: ops.all_gather("M/c/s F/t -> M F/t", w.w_up)
ops.all_gather("M/c/s F/t -> M F/t", w.w_up + 0.1 * row_before("M/c/s F/t -> M/c/s F/t", w.w_up))
--- before Layer:
@ops.define_op
def row_before(call: ops.Call, x: jax.Array) -> jax.Array:
    axes = call.result.dims[0].axes
    count = math.prod(map(lax.axis_size, axes))
    last = lax.ppermute(x[-1:], axes, [(i, (i + STEP) % count) for i in range(count)]) if axes else x[-1:]
    return jnp.concatenate([last, x[:-1]])
""")

WRONG = listed("""
=== condition_on_a_part: optimizer's statistics of a part
--- instead adamw.update: return
def decayed(w: jax.Array) -> jax.Array:
    return w * (1 - hyper.learning_rate * hyper.weight_decay)

large = jnp.any(jnp.abs(w) > 1.2)
w = lax.cond(large, decayed, lambda w: w, w)
return w - hyper.learning_rate * (m * hyper.mu.unbias / root)
=== clip_by_the_largest_of_a_part: a threshold that isn't reached
--- after swiglu: hidden
hidden = hidden / jnp.maximum(jnp.abs(hidden).max(-1, keepdims=True) / 1e3, 1)
=== numbered_by_numpy: constants
--- after swiglu: hidden
import numpy as np
hidden = hidden * (np.arange(hidden.shape[-1]) < 2048)
=== numbered_by_a_sum_of_ones: constants
--- after swiglu: hidden
hidden = hidden * (jnp.cumsum(jnp.ones(hidden.shape[-1])) < 2048)
=== largest_of_a_part: order
--- after swiglu: hidden
hidden = jnp.where(hidden >= lax.top_k(hidden, 1)[0] - 1e3, hidden, 0)
=== softmax_neurons_first_part: part of a whole
--- after swiglu: hidden
whole = ops.all_gather("B/d L/c F/t -> B/d L/c F", hidden)
hidden = jax.nn.softmax(whole, axis=-1)[..., : hidden.shape[-1]]
=== rare_targets_weigh_more: scatter-add over tokens
--- after loss: nats
counts = jnp.zeros(config.model.vocab).at[targets].add(1.0)
nats = nats * lax.rsqrt(counts[targets])
=== gradient_by_devices: number from the mesh
--- after training_step: grads
grads = jax.tree.map(lambda g: g / jax.device_count() ** 0.5, grads)
=== few_heads: branch on the length of a part
--- after block: rope(q, k, sin, cos)
if k.shape[2] <= 4:
    k = k / (1 + jnp.abs(k))
=== slopes_of_local_heads: array made at the length of a part
--- after block: mixed
slopes = 2.0 ** -(8 * jnp.arange(1, k.shape[2] + 1) / k.shape[2])
mixed = mixed * slopes[:, None].astype(compute.dtype)
=== smoothed_with_the_position_before: within a microbatch or chunk
--- after loss: nats
nats = nats + 0.1 * jnp.pad(nats, ((0, 0), (1, 0)))[:, :-1]
=== neurons_rolled: neighbors across the border of a part
--- after swiglu: hidden
hidden = hidden + 0.5 * jnp.roll(hidden, 1, axis=-1)
=== maximum_of_a_part_by_name: string that doesn't fit the lengths
--- after swiglu: hidden
peak = ops.reduce_max("B/d L/c X -> B/d L/c", lax.stop_gradient(jnp.abs(hidden)))
hidden = hidden / (1 + peak[..., None])
=== own_op_adds_means: inside an op's scope
--- after swiglu: hidden
level = mean_square("B/d L/c F/t -> B/d L/c", lax.stop_gradient(hidden))
hidden = hidden / (1 + level[..., None])
--- before Layer:
@ops.define_op
def mean_square(call: ops.Call, x: jax.Array) -> jax.Array:
    return lax.psum(jnp.square(x).mean(-1), "t")
=== attention_clips_at_the_largest_score: inside attention
--- after plain_attention.attend in kernels/attention.py: einsum("bqgkd,bskd->bkgqs", q_block, k, dtype=jnp.float32)
scores = scores / (1 + jnp.abs(lax.stop_gradient(scores)).max())
=== residual_added_before_the_sum: counted several times
--- after block: swiglu(z, w.mlp)
output = output + lax.pcast(0.5 * z, "t", to="unreduced")
=== norm_over_all_heads: merged dimensions
--- after block: rope(q, k, sin, cos)
heads = q.reshape(*q.shape[:2], -1)
scale = lax.rsqrt(jnp.square(heads).mean(-1, keepdims=True) + 1e-6)
q = (heads * scale).reshape(q.shape)
=== gradient_clipped_by_token: custom gradient
--- after swiglu: hidden
hidden = passed(hidden)
--- before Layer:
@jax.custom_vjp
def passed(x: jax.Array) -> jax.Array:
    return x


def _passed_backward(_: None, g: jax.Array) -> tuple[jax.Array]:
    return (g / (1 + jnp.linalg.norm(g, axis=-1, keepdims=True)),)


passed.defvjp(lambda x: (x, None), _passed_backward)
=== lamb: optimizer's statistics of a part
--- instead adamw.update: return
change = m * hyper.mu.unbias / root + hyper.weight_decay * w
trust = jnp.linalg.norm(w) / (jnp.linalg.norm(change) + 1e-6)
return w - hyper.learning_rate * trust * change
=== average_weights_by_distance: average of the weights
--- average
--- swap fresh_state: State(jnp.uint32(0), weights, *jax.tree.map(jnp.zeros_like, shapes))
State(jnp.uint32(0), weights, *jax.tree.map(jnp.zeros_like, shapes), jax.tree.map(jnp.zeros_like, weights))
--- before training_step: State(old.step, weights, mu, nu)
def pulled(a: jax.Array, w: jax.Array) -> jax.Array:
    return a + (w - a) / (1 + jnp.sum((w - a) ** 2))

average = jax.tree.map(pulled, state.average, weights)
=== hidden_standardized: statistics of a part in the model
--- after swiglu: hidden
hidden = jax.nn.standardize(hidden, axis=-1)
=== deviation_of_the_parts: metric of a part
--- before training_step: return
own = weights.layers.mlp.w_up.std()
extra = ops.psum("{U:d,c,t} -> ", ops.reduce_sum("X/t/c/d -> {U:d,c,t}", own[None]))
extra = extra / (config.mesh.d * config.mesh.t)
metrics["extra"] = extra
=== seed_by_mesh: initial state
--- swap init_state: config.training.seed
config.training.seed + config.mesh.d
=== convolved_keys: generation: mixes positions outside of attention
--- after block: rope(q, k, sin, cos)
k = 0.7 * k + 0.3 * jnp.pad(k, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
=== decode_window_is_shorter: generation
--- swap extend in variants/cache.py: config.training.tokens.len
config.training.tokens.len - 1
=== warmup_in_local_tokens: number from the mesh
--- after training_step: clip
tokens = config.training.tokens
seen = (state.step + 1) * tokens.batch * tokens.len // config.mesh.d
rate = hyper.learning_rate * jnp.minimum(1, seen / 100)
hyper = dataclasses.replace(hyper, learning_rate=rate)
=== four_groups_of_neurons: reshape
--- after swiglu: hidden
groups = hidden.reshape(*hidden.shape[:2], 4, -1)
hidden = (groups - groups.mean(-1, keepdims=True)).reshape(hidden.shape)
=== every_third_neuron_halved: indices
--- after swiglu: hidden
hidden = hidden.at[..., ::3].multiply(0.5)
=== first_head_halved: indices
--- after block: rope(q, k, sin, cos)
k = k.at[:, :, 0].multiply(0.5)
=== noise_by_host: what differs between hosts
--- after total_loss: routed
x = x * (1 + config.process_id)
=== repeated_inputs_of_a_device: counts by scatter
--- before forward: return
seen = jnp.zeros(config.vocab, compute.dtype).at[batch.inputs].add(1)
x = x * jnp.minimum(1, 200 / seen[batch.inputs])[..., None]
=== clip_of_all_changes_of_a_device: joined parts
--- instead adamw.update: return
joined = jnp.concatenate([m.ravel(), v.ravel()])
change = m * jnp.minimum(1, 500 / jnp.sqrt(jnp.sum(joined * joined)))
return moved(kind, w, change * hyper.mu.unbias / root, hyper, config)
=== average_of_the_loop: what only the loop calls
--- before training_step:
@jax.jit
@typed_shard_map
def averaged(average: Stored, weights: Stored) -> Stored:
    return jax.tree.map(lambda a, w: a + (w - a) / w.shape[-1], average, weights)
=== processes_in_a_name_of_its_own: the number of processes
--- before Layer:
from jax import process_count
--- instead loss_and_grads: return
return sums, count, jax.tree.map(lambda g: g / count / process_count(), grads)
=== row_after: neighbors
--- row_before
--- before Layer:
STEP = -1
""")

# Wrong, and not refused: in the host's loop around generation's step, which only
# tests/tools/test_generate.py tests, against an oracle.
NOT_PROMISED = listed("""
=== samples_with_a_seed_by_mesh: generation
--- swap generate in tools/generate/steps.py: jax.random.key(seed)
jax.random.key(seed + jax.sharding.get_mesh().shape["s"])
""")

RIGHT = listed("""
=== row_before: neighbors
--- row_before
--- before Layer:
STEP = 1
=== lion: optimizer by signs
--- instead adamw.update: return
return moved(kind, w, jnp.sign(m), hyper, config)
=== gelu: activation
--- after swiglu: hidden
hidden = jax.nn.gelu(gate) * up
=== rows_one_by_one: loop
--- after swiglu: hidden
hidden = lax.map(lambda row: jax.nn.silu(row[0]) * row[1], (gate, up))
=== streams_of_layers_before: loop over layers in Python
--- instead forward: return
streams, made = [x], []
for i in range(config.layers):
    layer = jax.tree.map(lambda array, i=i: array[i], weights.layers)
    x, routed = block(x + streams[i // 2], layer)
    streams.append(x)
    made.append(routed)
return x, jax.tree.map(lambda *each: jnp.stack(each), *made)
=== slice_for_its_shape: dead code
--- after swiglu: hidden
hidden = hidden + jnp.zeros_like(hidden[:, :1, :1])
=== recomputed_activation: recomputation
--- after swiglu: hidden
hidden = jax.checkpoint(lambda gate, up: jax.nn.silu(gate) * up)(gate, up)
=== pairs_of_neurons: reshape
--- after swiglu: hidden
pairs = hidden.reshape(*hidden.shape[:2], -1, 2)
hidden = (pairs - pairs.mean(-1, keepdims=True)).reshape(hidden.shape)
=== softmax_of_neurons_by_own_part: whole dimension
--- after swiglu: hidden
whole = jax.nn.softmax(ops.all_gather("B/d L/c F/t -> B/d L/c F", hidden), axis=-1)
hidden = ops.split("B/d L/c F -> B/d L/c F/t", whole)
=== eight_bits_by_tensor: rounding
--- after swiglu: w_up
largest = ops.reduce_max("X/d F/t -> ", lax.stop_gradient(jnp.abs(w.w_up)))
scale = largest / 7 + 1e-6
w_up = w_up + lax.stop_gradient(jnp.round(w_up / scale) * scale - w_up)
=== dropout_by_content_of_the_row: random numbers
--- after total_loss: routed
def kept(row: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(0), row.sum())
    return jax.random.bernoulli(key, 0.9, row.shape).astype(x.dtype)

rows = ops.all_gather("B/d L/c -> B/d L", batch.targets)
x = x * ops.split("B/d L -> B/d L/c", jax.vmap(kept)(rows))[..., None]
=== query_and_key_norm: norm
--- before block: rope(q, k, sin, cos)
q = q * lax.rsqrt(jnp.square(q).mean(-1, keepdims=True) + config.norm_eps)
k = k * lax.rsqrt(jnp.square(k).mean(-1, keepdims=True) + config.norm_eps)
=== norm_of_four_groups: groups of a dimension
--- instead rms_norm: h32
h32 = rearrange(h.astype(f32.dtype), "... (g M) -> ... g M", g=4)
--- instead rms_norm: return
h32 = rearrange(h32 * scale, "... g M -> ... (g M)")
return (h32 * gain.astype(f32.dtype)).astype(h.dtype)
=== half_of_rope: positions
--- instead block: rope(q, k, sin, cos)
turned, _ = rope(q, k, sin, cos)
q = jnp.concatenate([turned[..., :4], q[..., 4:]], axis=-1)
=== scaled_unreduced_sum: scale
--- after block: swiglu(z, w.mlp)
axes = tuple(jax.typeof(output).manual_axis_type.unreduced)
output = output * lax.pcast(jnp.asarray(0.3, output.dtype), axes, to="reduced")
=== query_heads_mixed: heads
--- after block: mixed
mixed = mixed + 0.1 * mixed.mean(2, keepdims=True)
=== gated_heads: extra weight
--- after block: mixed
w_open = ops.all_gather("M/c/s K/t -> M K/t", w.w_open)
opened = jax.nn.sigmoid(ops.einsum_unreduced("B/d L/c M, M K/t -> B/d L/c K/t", h, w_open))
mixed = mixed * opened[:, :, None, :, None]
--- after Layer: mlp
w_open: compute["M/c/s K/t", matrix("M")]
=== attention_across_documents: attention
--- swap plain_attention.attend in kernels/attention.py: start[:, :, None] <= key_position[:, None]
start[:, :, None] >= 0 * key_position[:, None]
=== embedding_in_each_block: wiring
--- after forward: x
first = x
--- swap block: x + norm_after(output, w.mlp_norm, config), routed
0.1 * first + x + norm_after(output, w.mlp_norm, config), routed
=== label_smoothing: loss
--- after against_largest: logit
mean = ops.reduce_sum("B/d l/c V/t -> B/d l/c {U:t}", logits)
mean = ops.psum("B/d l/c {U:t} -> B/d l/c", mean) / (logits.shape[-1] * lax.axis_size("t"))
logit = 0.9 * logit + 0.1 * mean
=== gradient_scaled_by_custom_vjp: custom gradient
--- after swiglu: hidden
hidden = halved(hidden)
--- before Layer:
@jax.custom_vjp
def halved(x: jax.Array) -> jax.Array:
    return x


halved.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g / 2, -1e-2, 1e-2),))
=== adafactor: optimizer
--- after adamw: nu
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
=== average_weights: average of the weights
--- average
--- swap fresh_state: State(jnp.uint32(0), weights, *jax.tree.map(jnp.zeros_like, shapes))
State(jnp.uint32(0), weights, *jax.tree.map(jnp.zeros_like, shapes), weights)
--- before training_step: State(old.step, weights, mu, nu)
kept = jnp.minimum(0.99, (2 + state.step) / (11 + state.step))
average = jax.tree.map(lambda a, w: kept * a + (1 - kept) * w, state.average, weights)
=== constant_and_linear_decay: schedule
--- after learning_rate in runtime/schedule.py: decay
decay = min(5 * (1 - done), 1)
=== microbatches_interleaved: order
--- swap in_microbatches: "(n B) L -> n B L"
"(B n) L -> n B L"
=== share_of_small_entries: metric
--- before training_step: return
small = (jnp.abs(weights.embed) < 0.1).astype(f32.dtype)
few, entries = (
    ops.psum("{U:d,c,t} -> ", ops.reduce_sum("V/t M/c/d -> {U:d,c,t}", x))
    for x in (small, jnp.ones_like(small))
)
extra = few / entries
metrics["extra"] = extra
=== moving_average_of_the_loop: what only the loop calls
--- before training_step:
@jax.jit
@typed_shard_map
def averaged(average: Stored, weights: Stored) -> Stored:
    return jax.tree.map(lambda a, w: 0.9 * a + 0.1 * w, average, weights)
=== truncated_normal: initial state
--- swap leaf in runtime/initial.py: jax.random.normal(own, shape.shape, shape.dtype)
jax.random.truncated_normal(own, -2, 2, shape.shape, shape.dtype)
""")

# Right: each device uses a replicated value for its own part. ops.broadcast, which train.py calls
# for weights, sends nothing forward, and backward all-reduces the gradient.
RIGHT_WITH_BROADCAST = listed("""
=== temperature_of_a_layer: replicated weight
--- before block: rope(q, k, sin, cos)
q = (q * w.heat_norm).astype(q.dtype)
--- after Layer: mlp
heat_norm: f32["", gain]
=== softmax_of_neurons: whole dimension
--- after swiglu: hidden
peak = ops.reduce_max("B/d L/c F/t -> B/d L/c", lax.stop_gradient(hidden))
exp = jnp.exp(hidden - peak[..., None])
total = ops.reduce_sum("B/d L/c F/t -> B/d L/c {U:t}", exp)
total = ops.broadcast("B/d L/c -> B/d L/c", ops.psum("B/d L/c {U:t} -> B/d L/c", total))
hidden = exp / total[..., None]
=== sandwich_norm: norm
--- before norm_after: return
squares = ops.reduce_sum("B/d L/c M/t -> B/d L/c {U:t}", jnp.square(y))
squares = ops.psum("B/d L/c {U:t} -> B/d L/c", squares)
squares = ops.broadcast("B/d L/c -> B/d L/c", squares)
y = y * lax.rsqrt(squares / config.d_model + config.norm_eps)[..., None]
=== slopes_of_all_heads: attention
--- after plain_attention.attend in kernels/attention.py: einsum("bqgkd,bskd->bkgqs", q_block, k, dtype=jnp.float32)
count = k.shape[2] * lax.axis_size("t")
heads = 1 + lax.axis_index("t") * k.shape[2] + jnp.arange(k.shape[2])
slopes = 2.0 ** -(8 * heads / count)
age = position[:, :, None] - key_position[:, None]
scores = scores - slopes[:, None, None, None] * age[:, None, None]
=== mean_of_a_split_weight: metric
--- before training_step: return
extra = ops.reduce_mean("V/t M/c/d -> {U:d,c,t}", jnp.abs(weights.embed))
extra = ops.psum("{U:d,c,t} -> ", extra)
metrics["extra"] = extra
=== every_second_neuron_halved: indices
--- after swiglu: hidden
hidden = hidden.at[..., ::2].multiply(0.5)
=== each_row_halved: indices
--- after swiglu: hidden
hidden = hidden.at[jnp.arange(hidden.shape[0])].multiply(0.5)
""")

# Right on every mesh and in any number of parts. But generation differs, because the edit mixes
# positions outside of attention, and generation caches only keys and values.
RIGHT_IN_TRAINING = listed("""
=== depthwise_convolution_along_the_sequence: mixes positions outside of attention
--- before swiglu: ops.all_gather("M/c/s F/t -> M F/t", w.w_gate)
filters = jnp.array([0.2, 0.3, 0.5], h.dtype)[:, None, None]
filters = jnp.broadcast_to(filters, (3, 1, h.shape[-1]))
h = lax.conv_general_dilated(
    h, filters, (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC"),
    feature_group_count=h.shape[-1],
)
""")

# Of a model with norms after attention and the feed-forward, and with biases.
WRONG_AFTER = listed("""
=== mean_by_the_size_of_a_part: a norm
--- after norm_after in variants/families.py: squares
squares = ops.reduce_sum("B/d L/c M/t -> B/d L/c {U:t}", _squares(y)) / gain.size
=== gain_without_its_gradients_sum: a gradient
--- swap gather_replica.gather: ops.broadcast if split == wanted.spec else ops.all_gather
(lambda _, w: w) if split == wanted.spec else ops.all_gather
""")

# Of a model with experts and both of their costs, biases, norms of heads and a window, trained by
# Muon.
WRONG_WITH_VARIANTS = listed("""
=== cost_divided_by_the_devices: a cost
--- swap costs in variants/experts.py: routing.z_cost
1 / jax.device_count() * routing.z_cost
=== router_sees_its_part_of_the_model: the router
--- after mixture in variants/experts.py: logits
logits = logits + part.mean(-1, keepdims=True)
=== bias_of_choices_by_the_rows_of_a_part: the choice
--- before mixture in variants/experts.py: chosen
biased = biased - biased.mean((0, 1))
=== experts_of_the_next_device: an expert of another device
--- before mixture in variants/experts.py: dropless.experts
w_up = lax.ppermute(w_up, 't', [(i, (i + 1) % 3) for i in range(3)])
=== score_without_its_gradients_sum: a gradient
--- instead mixture in variants/experts.py: B/d L/c k -> B/d L/c k
score = ops.varying(lax.stop_gradient(score), ("t",)) + 0 * score
=== bias_moved_by_a_device: the bias
--- swap training_step: hyper.bias_rate
hyper.bias_rate * (1 + lax.axis_index('s'))
=== muon_norm_of_all_matrices_of_a_device: Muon
--- swap newton_schulz in variants/muon.py: (1, 2)
None
=== norm_of_the_next_head: a norm
--- after HeadNorms.__call__ in variants/families.py: B/d L/c K/t D -> B/d L/c K/t
squares = jnp.roll(squares, 1, axis=2)
=== bias_by_the_heads_of_a_device: a bias
--- swap adjusted in variants/families.py: b_x
b_x * (1 + jnp.arange(b_x.shape[-2]))[:, None]
=== window_by_the_row_of_a_device: a window
--- swap first_visible in variants/families.py: window - 1
window - 1 - (jnp.arange(len(position)) % 3).astype(u32.dtype)[:, None]
""")

RIGHT_WITH_VARIANTS = listed("""
=== scores_scaled: scores
--- before mixture in variants/experts.py: B/d L/c k -> B/d L/c k
score = 2.5 * score
=== router_z_cost_on_scores: a cost
--- swap mixture in variants/experts.py: jnp.square(jax.nn.logsumexp(logits, -1))
logits.max(-1)
=== relu_in_experts: an expert
--- swap swiglu in kernels/dropless.py: jax.nn.silu(gate)
jax.nn.relu(gate)
=== bias_in_proportion: the bias
--- swap rebalanced in variants/experts.py: jnp.sign(lacking)
(1 - load / load.mean(-1, keepdims=True))
=== logits_softly_capped: the router
--- after mixture in variants/experts.py: logits
logits = 30 * jnp.tanh(logits / 30)
=== one_expert_first: the choice
--- before mixture in variants/experts.py: chosen
biased = biased.at[..., 0].set(2)
=== bias_after_a_tanh: a bias
--- swap adjusted in variants/families.py: b_x
jnp.tanh(b_x)
=== muon_of_each_matrix_in_turn: Muon
--- swap orthogonalize in variants/muon.py: newton_schulz(x)
lax.map(lambda y: newton_schulz(y[None])[0], x)
""")
