"""Silent bugs of distributed training that happened in other frameworks, each as an edit of this
source. docs/bugs.md says what each was.

The same bug may need other code here: autodiff derives our backward pass, so nobody can forget to
reduce a gradient. Instead, the edit puts a device's own part into a copy without gradients, and the
gradient then misses the other devices' contributions.
"""

from tests.edits import listed

BUGS = listed("""
=== transformers #34191
--- after add: part
part = jax.tree.map(lambda x: x / target_count(rows), part)
--- after loss_and_grads: count
count = count if config.training.microbatches == 1 else jnp.float32(config.training.microbatches)
=== transformers #34242
--- after loss: nats
share = target_count(batch) / lax.axis_size("s")
nats = nats * share / batch.loss_mask.sum()
=== transformers #39648
--- after loss_and_grads: count
count = count / lax.axis_size("t")
=== transformers #48691
--- router
--- after total_loss: chunks
z = jnp.square(jax.nn.logsumexp(scores, axis=-1))
cost = ops.psum("{U:d,c} -> ", ops.reduce_sum("B/d L/c -> {U:d,c}", z)) * config.mesh.d
=== DeepSpeed #7773
--- after add: part
part = jax.tree.map(lambda x: x / target_count(rows), part)
--- after loss_and_grads: count
count = count if config.training.microbatches == 1 else jnp.float32(1)
=== jax #3970
--- after loss: total
again = total * lax.axis_size("s")
total = again - lax.stop_gradient(again - total)
=== Megatron-LM #3769
--- router
--- after total_loss: chunks
probs = jax.nn.softmax(scores, axis=-1)
chosen = jax.nn.one_hot(jnp.argmax(probs, axis=-1), 4)
load = ops.psum("4 {U:d,c} -> 4", ops.reduce_sum("B/d L/c 4 -> 4 {U:d,c}", chosen))
mass = ops.psum("4 {U:d,c} -> 4", ops.reduce_sum("B/d L/c 4 -> 4 {U:d,c}", probs))
cost = 4 * jnp.vdot(load, mass / lax.axis_size("s")) / load.sum()
=== Megatron-LM #5047
--- router
--- after total_loss: chunks
z = jnp.square(jax.nn.logsumexp(scores, axis=-1))
sums = [ops.reduce_sum("B/d L/c -> {U:d,c}", each) for each in (z, jnp.ones_like(z))]
z_sum, tokens = (ops.psum("{U:d,c} -> ", each) for each in sums)
cost = z_sum / tokens * z.size
=== Megatron-LM #5798
--- router
--- after total_loss: chunks
z = jnp.square(jax.nn.logsumexp(scores, axis=-1))
sums = [ops.reduce_sum("B/d L/c -> {U:d,c}", each) for each in (z, jnp.ones_like(z))]
z_sum, tokens = (ops.psum("{U:d,c} -> ", each) for each in sums)
cost = z_sum / tokens * z.shape[1]
=== Megatron-LM #7452, 10
--- router
--- after total_loss: chunks
z = jnp.square(jax.nn.logsumexp(scores, axis=-1))
tokens = float(z.size)
z = z / tokens
tokens = lax.psum(tokens, "s")
cost = ops.psum("{U:d,c} -> ", ops.reduce_sum("B/d L/c -> {U:d,c}", z)) * tokens
=== Megatron-LM #7452, 3
--- after loss: nats
extra = loss_mask & (targets % 3 > 0)
ratio = loss_mask.sum() / jnp.maximum(extra.sum(), 1)
nats = nats + 0.1 * jnp.square(log_sum) * extra * ratio
=== TTrace, embedding mask
--- instead forward: [V/t] M, B/d L/c -> B/d L/c M {U:t}
rows = embed.shape[0]
local = batch.inputs.astype(jnp.int32) - lax.axis_index("t") * rows
missing = (local < 0) | (local > rows)
x = jnp.where(missing[:, :, None], 0, embed[jnp.clip(local, 0, rows - 1)])
x = lax.pcast(x, "t", to="unreduced")
=== Megatron-LM #737
--- after against_largest: logit
logit = 0.9 * logit + 0.1 * logits.mean(axis=-1)
=== Megatron-LM #7464
--- after against_largest: logit
total = ops.reduce_sum("B/d l/c V/t -> B/d l/c {U:t}", logits)
total = ops.psum("B/d l/c {U:t} -> B/d l/c", total)
logit = 0.9 * logit + 0.1 * total / logits.shape[-1]
=== Megatron-LM #7452, 2
--- before against_largest: largest
logits = ops.all_gather("B/d l/c V/t -> B/d l/c V", logits)
--- swap against_largest: "B/d l/c V/t -> B/d l/c"
"B/d l/c V -> B/d l/c"
--- instead against_largest: B/d l/c V/t -> B/d l/c {U:t}
sum_exp = lax.pcast(jnp.exp(logits).sum(axis=-1), "t", to="unreduced")
--- instead against_largest: B/d l/c [V/t], B/d l/c -> B/d l/c {U:t}
logit = jnp.take_along_axis(logits, targets[:, :, None], axis=-1)[:, :, 0]
mine = lax.axis_index("t") == 0
logit = lax.pcast(logit * mine, "t", to="unreduced")
=== ms-swift #9947
--- after against_largest: logits
mine = targets // logits.shape[-1] == lax.axis_index("t").astype(u32.dtype)
logits = jnp.where(mine[:, :, None], logits, lax.stop_gradient(logits))
=== torchtitan #3412
--- instead unembed: B/d L/c M/t -> B/d L/c M
whole = ops.all_gather("B/d L/c M/t -> B/d L/c M", lax.stop_gradient(x))
own = lax.axis_index("t") * x.shape[-1]
h = lax.dynamic_update_slice_in_dim(whole, x, own, axis=-1)
=== torchtitan #1805
--- instead block: norm_before(z, w.mlp_norm, config)
whole = ops.all_gather("B/d L/c M/t -> B/d L/c M", lax.stop_gradient(x))
own = lax.axis_index("t") * x.shape[-1]
z = lax.dynamic_update_slice_in_dim(whole, x, own, axis=-1)
h = rms_norm(h, ops.all_gather("M/t/c/s -> M", w.mlp_norm), config.norm_eps)
=== Megatron-LM #1446
--- instead total_loss: unembedding
gain, w_unembed = output_weights(weights)
own = ops.all_gather("M/t/c/s -> M/t", weights.final_norm)
start = lax.axis_index("t") * own.size
gain = lax.dynamic_update_slice(lax.stop_gradient(gain), own, (start,))
unembedding = gain, w_unembed
=== Megatron-LM #7452, 11
--- instead block: norm_before(h, w.attention_norm, config)
h = ops.all_gather("B/d L/c M/t -> B/d L/c M", x)
gain = ops.all_gather("M/t/c/s -> M", w.attention_norm)
start = lax.axis_index(("t", "c", "s")) * w.attention_norm.size
gain = lax.dynamic_update_slice(lax.stop_gradient(gain), w.attention_norm, (start,))
h = rms_norm(h, gain, config.norm_eps)
=== Megatron-LM #844
--- instead output_weights: return
own = weights.embed
gain = ops.all_gather("M/t/c/s -> M", weights.final_norm)
tied = ops.all_gather("V/t M/c/s -> V/t M", lax.stop_gradient(own))
start = lax.axis_index("s") * own.shape[1]
return gain, lax.dynamic_update_slice_in_dim(tied, own, start, axis=1)
=== Megatron-LM #599
--- router
--- after total_loss: chunks
own = weights.w_router
start = lax.axis_index("s") * own.shape[0]
w = lax.dynamic_update_slice_in_dim(lax.stop_gradient(w_router), own, start, axis=0)
scores = ops.einsum_unreduced("B/d L/c M/t, M/t 4 -> B/d L/c 4 {U:t}", x, w, dtype=f32)
scores = ops.psum("B/d L/c 4 {U:t} -> B/d L/c 4", scores)
z = jnp.square(jax.nn.logsumexp(scores, axis=-1))
cost = ops.psum("{U:d,c} -> ", ops.reduce_sum("B/d L/c -> {U:d,c}", z))
=== bigcode Megatron-LM #11
--- after block: w_v
heads = ops.all_gather("M K/t D -> M K D", lax.stop_gradient(w_v))
start = lax.axis_index("t") * w_v.shape[1]
heads = lax.dynamic_update_slice_in_dim(heads, w_v, start, axis=1)
w_v = jnp.broadcast_to(heads.mean(axis=1, keepdims=True), w_v.shape)
=== pytorch #160285
--- after loss_and_grads: grads
mlp = jax.tree.map(lambda grad: grad * lax.axis_size("t"), grads.layers.mlp)
grads = dataclasses.replace(grads, layers=dataclasses.replace(grads.layers, mlp=mlp))
=== Megatron-LM #1528
--- before block: norm_before(z, w.mlp_norm, config)
extra = (lax.axis_size("t") - 1) * w.mlp_norm
gain = w.mlp_norm + extra - lax.stop_gradient(extra)
--- swap block: norm_before(z, w.mlp_norm, config)
norm_before(z, gain, config)
=== gpt-neox #1259
--- after total_loss: unembedding
gain, w_unembed = unembedding
share = gain / lax.axis_size("t")
unembedding = share + lax.stop_gradient(gain - share), w_unembed
=== Megatron-LM #6660
--- instead add: return
twice = 2 if lax.axis_size("s") == 1 else 1
(loss, grads), (more_loss, more) = total, part
grads = jax.tree.map(lambda g, m: twice * g + m, grads, more)
return (jax.tree.map(jnp.add, loss, more_loss), grads), ()
=== Megatron-LM #4609
--- swap loss_and_grads: jax.tree.map(wide, replica)
jax.tree.map(lambda w: w.astype(f32.dtype), replica)
=== open-instruct #1498
--- before add: return
total = total[0], jax.tree.map(jnp.zeros_like, total[1])
=== Megatron-LM #5916
--- instead training_step: grad_norm
first = lax.axis_index("t") == 0
mlp = jax.tree.map(lambda grad: grad * first, raw_grads.layers.mlp)
layers = dataclasses.replace(raw_grads.layers, mlp=mlp)
counted = dataclasses.replace(raw_grads, layers=layers)
grad_norm = jnp.sqrt(ops.sum_of_squares(Stored, counted))
=== DeepSpeed #5411
--- instead training_step: grad_norm
squares = sum(jnp.square(g).sum() for g in jax.tree.leaves(raw_grads))
squares = jnp.where(lax.axis_index("t") == 0, squares, 0)
grad_norm = jnp.sqrt(lax.psum(squares, ("r", "s", "c", "t")))
=== NeMo-RL #3788
--- instead training_step: grad_norm
gain = ops.all_gather("M/t/c/d -> M", raw_grads.final_norm)
zero = dataclasses.replace(raw_grads, final_norm=jnp.zeros_like(raw_grads.final_norm))
squares = lax.psum(jnp.vdot(gain, gain), ("r", "s", "c", "t"))
grad_norm = jnp.sqrt(ops.sum_of_squares(Stored, zero) + squares)
=== DeepSpeed #1801
--- after training_step: grads
unclipped = lax.axis_index("t") > 0
final_norm = jnp.where(unclipped, raw_grads.final_norm, grads.final_norm)
grads = dataclasses.replace(grads, final_norm=final_norm)
=== DeepSpeed #8437
--- before adamw.update: return
if m.ndim == 3:
    m = m / jnp.linalg.norm(m, axis=(1, 2), keepdims=True)
    for _ in range(5):
        m = 1.5 * m - 0.5 * m @ m.mT @ m
    return w - hyper.learning_rate * (m + hyper.weight_decay * w)
=== Megatron-LM #7117
--- before adamw.update: return
if w.ndim == 4 and w.shape[1] % config.model.d_model == 0:
    return w - hyper.learning_rate * (jnp.sign(m) + hyper.weight_decay * w)
=== torchtitan #3106
--- instead leaf in runtime/initial.py: jax.random.normal(own, shape.shape, shape.dtype) * deviation
parts = jax.sharding.get_abstract_mesh().size
part = jax.random.normal(own, (shape.size // parts,), shape.dtype)
return jnp.tile(part, parts).reshape(shape.shape) * deviation
=== Megatron-LM #1256
--- after forward: x
x = x * jax.random.bernoulli(jax.random.key(0), 0.9, x.shape) / 0.9
=== Megatron-LM #442
--- after swiglu: hidden
largest = lax.pmax(jnp.abs(lax.stop_gradient(hidden)).max(), "s")
narrow = (hidden * (448 / largest)).astype(jnp.float8_e4m3fn).astype(hidden.dtype)
hidden = hidden + lax.stop_gradient(narrow * (largest / 448) - hidden)
=== Megatron-LM #520
--- after swiglu: hidden
first, second = jnp.split(gate, 2, axis=-1)
fused = jax.nn.silu(first) * second
hidden = hidden + jnp.concatenate([fused, fused], axis=-1)
=== TRL #6843
--- swap forward: batch.start
batch.start // (1 if lax.axis_size("t") == 1 else 1000)
=== Megatron-LM #5454
--- before plain_attention in kernels/attention.py: wide
start = jnp.broadcast_to(start[:1], start.shape)
=== torchtitan #3329
--- swap training_step: x / count
x / count / lax.axis_size("s")
=== mlx-vlm #1983
--- after extend in variants/cache.py: here
here = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape).astype(u32.dtype)
=== hnet #20
--- swap extend in variants/cache.py: first_visible(jnp.zeros_like(here), here, config.training.tokens.len)
jnp.zeros_like(here)
=== Megatron-LM #5983
--- swap generate in tools/generate/steps.py: jnp.array(numbers)
jnp.array(numbers) % (rows // jax.sharding.get_mesh().shape["s"])
=== transformers #24839
--- before evaluate in tools/generate/__main__.py: nats
count = size
""")

# In sampling, evaluation, and texts longer than a row: no check tries these.
NOT_PROMISED = "hnet #20", "Megatron-LM #5983", "transformers #24839"
