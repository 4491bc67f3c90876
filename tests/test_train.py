"""Tests train.py against the oracle and optax, on every mesh, and from its command line."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import train
from checks import preflight
from checks.jaxprs import equations
from configs.sizes import dimensions
from data.flat_tokens import FlatTokens
from kernels.attention import balanced
from runtime.checkpoint import named
from runtime.initial import initial_weights
from runtime.run import Run
from runtime.schedule import learning_rate, note_of_schedule
from shardlib.errors import UserError
from shardlib.mesh import abstract_mesh
from shardlib.types import computing_in, make_shapes, make_shardings, type_tree, typed_shard_map
from tests import helpers, oracle
from tests.helpers import assert_close, mesh, plain, slow_but_for, small_config, token_batch
from tools.audit.ledger import ledger
from variants import muon


def random_rows(seed=0, length=12):
    """Targets and is_start, [8, length], for documents of random lengths."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(1, 48, (8, length)).astype(np.uint32)
    is_start = rng.random((8, length)) < 0.2
    is_start[:4, 0] = True  # the other rows may continue a document
    targets[7, 3 * length // 4 :] = 0
    return targets, is_start


def loss_and_grads(module, config, targets, is_start, on, change=lambda weights: weights):
    """The module's loss, other sums and gradients, computed on a mesh, as numpy trees."""

    stored, total = module.Stored, module.f32[""]

    @jax.jit
    @typed_shard_map
    def run(weights: stored, batch: module.TokenBatch) -> tuple[total, module.Sums, stored]:
        sums, count, grads = module.loss_and_grads(weights, batch, config)
        return sums["loss"] / count, sums, grads

    with jax.set_mesh(on):
        weights = change(helpers.random_weights(module, config))
        order = balanced(targets.shape[1], on.shape["c"])
        batch = token_batch(module.TokenBatch, targets, is_start)
        batch = jax.tree.map(lambda x: x[:, order], batch)
        batch = jax.device_put(batch, make_shardings(module.TokenBatch))
        loss, sums, grads = jax.device_get(run(weights, batch))
        return float(loss), sums, plain(grads, config.model.norms_after)


@functools.cache
def expected(length=12, *overrides):
    """The oracle's loss, each layer's tokens that chose an expert, and gradients, at the weights
    that `loss_and_grads` uses."""
    config = small_config(*overrides)
    targets, is_start = random_rows(length=length)
    with jax.set_mesh(mesh(1, 1)):
        weights = plain(helpers.random_weights(train, config), config.model.norms_after)
    experts = config.model.experts and (config.model.experts, config.training.routing)
    given = targets, is_start, 100, 0, config.model.sliding_window, experts
    objective = jax.value_and_grad(oracle.objective, has_aux=True)
    (loss, others), grads = objective(weights, *given)
    loss, loads, _ = others or (loss, None, None)
    return jax.device_get((loss, loads, grads))


def assert_agree(actual, wanted, rtol=1e-6, tolerance=1e-5):
    """Compares what `loss_and_grads` returns with what `expected` returns."""
    (loss, sums, grads), (expected_loss, loads, expected_grads) = actual, wanted
    np.testing.assert_allclose(loss, expected_loss, rtol=rtol)
    if loads is not None:
        np.testing.assert_array_equal(sums["load"], loads)
    assert grads.keys() == expected_grads.keys()
    assert_close(grads, expected_grads, tolerance)


CHUNKS, MICROBATCHES = ["training.loss_chunks=4"], ["training.microbatches=2"]
UNROLLED = ["training.unroll=2"]
# (d, t, r, c), and settings that split the batch or the logits into parts, or unroll the layers.
LAYOUTS = [((1, 1), []), ((2, 4), []), ((8, 1), CHUNKS), ((1, 8), MICROBATCHES)]
LAYOUTS += [((4, 2, 2), CHUNKS + MICROBATCHES), ((2, 2, 1, 2), MICROBATCHES), ((2, 1, 2, 4), [])]
LAYOUTS += [((8, 1), UNROLLED), ((2, 2, 1, 2), MICROBATCHES + UNROLLED)]


@pytest.mark.parametrize("layout", slow_but_for([LAYOUTS[1], LAYOUTS[-1]], LAYOUTS), ids=str)
def test_loss_and_gradients_agree_with_the_oracle_on_every_layout(in_f32, layout):
    """The last row is padded, so that parts have different numbers of targets."""
    axes, parts = layout
    config, rows = small_config("training.tokens.len=48", *parts), random_rows(length=48)
    assert_agree(loss_and_grads(in_f32, config, *rows, mesh(*axes)), expected(48))


def test_cpus_run_the_layers_in_a_loop_unless_the_config_unrolls_them():
    """The audit and the checks trace a loop, whatever the config says."""
    unrolled, traced = [], set()
    for unroll in "null", "1", "2", "3", "9":
        config = small_config("model.layers=3", f"training.unroll={unroll}")
        with jax.set_mesh(mesh(4, 2)):
            shapes = make_shapes(train.step_arguments(config), dimensions(config))
            made = train.training_step.trace(*shapes, config).jaxpr.jaxpr
        scans = [e.params for e, *_ in equations(made) if e.primitive.name == "scan"]
        unrolled.append({x["unroll"] for x in scans if x["length"] == 3})
        traced.add(str(preflight.trace_step(train, config, abstract_mesh(config.mesh.axes))))
    assert unrolled == [{1}, {1}, {2}, {3}, {3}]
    assert len(traced) == 1


@pytest.mark.parametrize("more", [[], ["model.experts={count: 8, per_token: 2, d_ff: 24}"]])
def test_other_platforms_unroll_layers_without_experts_up_to_a_number(more):
    """These are the defaults; training.unroll overrides them."""
    for platform, most in ("gpu", 32), ("tpu", 8), ("cpu", 1):
        for layers in most, most + 1:
            config = small_config(f"model.layers={layers}", *more)
            wanted = layers if layers == most and not more else 1
            assert config.layers_at_a_time(platform) == wanted


# What configs may add to the model or leave out of it.
VARIANTS = {
    "Qwen2": ["model.qkv_bias=true", "model.tied_embeddings=true"],
    "Qwen3": ["model.qk_norm=head"],
    "OLMo 2": ["model.qk_norm=all", "model.norms_after=true"],
    "a window": ["model.sliding_window=5"],
}


@pytest.mark.parametrize("variant", slow_but_for(["OLMo 2"], list(VARIANTS)))
def test_loss_and_gradients_of_variants_agree_with_the_oracle(in_f32, variant):
    config, wanted = small_config(*VARIANTS[variant]), expected(12, *VARIANTS[variant])
    on = mesh(2, 2, 2, 2)  # split along each axis
    assert_agree(loss_and_grads(in_f32, config, *random_rows(), on), wanted)
    assert not np.allclose(wanted[0], expected()[0], rtol=1e-3), "the variant does nothing"


def test_what_a_config_leaves_out_costs_nothing():
    """No array, no moment, no line of the audit."""
    config = small_config()
    one = abstract_mesh(config.mesh.axes)
    with jax.sharding.use_abstract_mesh(one):
        state = make_shapes(train.state_type(config), train.dimensions(config))
    names = "attention_norm w_q w_k w_v w_o mlp_norm w_gate w_up w_down"
    assert plain(state.weights)["layers"].keys() == {*names.split()}

    def ops_of(*overrides):
        jaxpr = preflight.trace_step(train, small_config(*overrides), one)
        return {transfer.op for transfer in ledger(jaxpr, config.mesh.axes).transfers}

    added = ops_of("model.qkv_bias=true") - ops_of()
    assert added == {
        "broadcast(layers Q K/t D -> layers Q K/t D)",
        "broadcast(layers K/t D -> layers K/t D)",
    }


def test_bf16_is_close():
    actual = loss_and_grads(train, small_config(), *random_rows(), mesh(4, 2))
    assert_agree(actual, expected(), 3e-3, 5e-2)


@pytest.mark.long
def test_bf16_gradients_stay_close_with_many_tokens():
    """Sums over thousands of tokens must not run in bf16. Compares all gradients with the same
    source in f32; one token, and so one row of the embedding, is used most of the time."""
    config = small_config("training.tokens={batch: 32, len: 256}")
    rng = np.random.default_rng(0)
    targets = rng.integers(1, 48, (32, 256)).astype(np.uint32)
    targets[rng.random(targets.shape) < 0.8] = 7
    is_start = rng.random(targets.shape) < 0.02
    arguments = train, config, targets, is_start, mesh(1, 1)
    loss, _, grads = loss_and_grads(*arguments)
    with computing_in("f32"):
        exact_loss, _, exact_grads = loss_and_grads(*arguments)
    np.testing.assert_allclose(loss, exact_loss, rtol=1e-3)
    # Compares norms, as rounding is noise: at most 0.02 if sums run in f32, 0.5 if they don't.
    for actual, exact in zip(jax.tree.leaves(grads), jax.tree.leaves(exact_grads), strict=True):
        assert np.linalg.norm(actual - exact) < 3e-2 * np.linalg.norm(exact)


def optax_schedule(hyper):
    """The schedule of a TrainingConfig, by optax."""
    peak, warmup = hyper.learning_rate, hyper.warmup_steps
    final = peak * hyper.cosine_learning_rate_final_fraction
    end = max(hyper.steps_for_lr, warmup + 1)
    if hyper.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(0, peak, warmup, end, final)
    parts, boundaries = [optax.linear_schedule(0, peak, warmup)], [warmup]
    if hyper.schedule != "linear":
        parts.append(optax.constant_schedule(peak))
    if hyper.schedule == "wsd":
        end, warmup = hyper.steps_for_lr, hyper.steps_for_lr - hyper.cooldown_steps
        boundaries.append(warmup)
    if hyper.schedule != "constant":
        parts.append(optax.linear_schedule(peak, final, end - warmup))
    return optax.join_schedules(parts, boundaries)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("final, steps, warmup", [(0.1, 100, 10), (0, 100, 0), (0.1, 100, 100)])
def test_the_schedule_agrees_with_optax_to_its_end_and_beyond(schedule, final, steps, warmup):
    if schedule == "wsd" and steps == warmup:
        steps += 20
    config = small_config(
        f"training.schedule={schedule}", f"training.steps_for_lr={steps}",
        f"training.warmup_steps={warmup}", "training.cooldown_steps=20",
        f"training.cosine_learning_rate_final_fraction={final}",
    )  # fmt: skip
    rates = [learning_rate(step, config.training) for step in range(1, 150)]
    wanted = jax.vmap(optax_schedule(config.training))(jnp.arange(1, 150))
    np.testing.assert_allclose(rates, wanted, rtol=1e-5, atol=1e-9)


def test_a_warmup_longer_than_the_decay_ends_with_it():
    """At the schedule's end, the rate is the final fraction, and it stays there."""
    for schedule, warmup, rising in ("cosine", 200, 100), ("wsd", 90, 80):
        training = small_config(
            f"training.schedule={schedule}", f"training.warmup_steps={warmup}",
            "training.cooldown_steps=20", "training.steps_for_lr=100", "training.steps=250",
            "training.cosine_learning_rate_final_fraction=0.1",
        ).training  # fmt: skip
        rates = [learning_rate(step, training) / training.learning_rate for step in range(250)]
        assert rates[rising] == max(rates[: rising + 1]) and max(rates) < 0.95
        assert rates[101:] == pytest.approx([0.1] * 149)
        assert note_of_schedule(training).endswith(f"but it rises for only {rising} steps")
    constant = "training.schedule=constant", "training.steps=250", "training.steps_for_lr=50"
    assert not note_of_schedule(small_config("training.warmup_steps=200", *constant).training)


@pytest.mark.parametrize(
    "schedule, steps, final, note",
    [
        ("wsd", 99, 0, "the cooldown ends at training.steps_for_lr=100, and the run at training."),
        ("wsd", 100, 0, ""),
        ("cosine", 101, 0, "the learning rate is 0 at the last steps: its decay ends at training."),
        ("linear", 101, 0.1, ""),
        ("cosine", 99, 0, ""),
    ],
)
def test_a_schedule_that_ends_elsewhere_is_noted_if_it_may_be_a_mistake(
    schedule, steps, final, note
):
    training = small_config(
        f"training.schedule={schedule}", f"training.steps={steps}", "training.steps_for_lr=100",
        "training.cooldown_steps=20", f"training.cosine_learning_rate_final_fraction={final}",
    ).training  # fmt: skip
    assert note_of_schedule(training).startswith(f"note: {note}" if note else "")
    assert bool(note_of_schedule(training)) == bool(note)


def test_muon_needs_a_matrix():
    kinds = train.state_type(small_config()).weights
    with pytest.raises(UserError, match="no weight has a layout in MATRICES"):
        muon.note(muon.of_adamw(kinds))


@pytest.mark.parametrize(
    "given, settings",
    {
        "training.cooldown_steps=5": "training.schedule=cosine",
        "training.routing.z_cost=0.1": "model.experts=null",
        "flat_tokens.validation={a: b.zarr}": (
            "training.validation_interval=0 and training.validation_at_start=false"
        ),
        "hang_ends=false": "hang_timeout_seconds=0.0",
    }.items(),
)
def test_a_setting_without_effect_is_noted(given, settings):
    assert not [*small_config("training.schedule=constant").notes()]
    (note,) = small_config(given).notes()
    assert note.startswith(f"note: {given.partition('=')[0]}")
    assert note.endswith(f" has no effect with {settings}")


def test_validation_reads_the_validation_split():
    config = small_config("training.validation_interval=1", "model.vocab=1280")
    with jax.set_mesh(mesh(4, 2)):
        loader = train.open_batches(config, train.dimensions(config))[1][""]
    dataset = FlatTokens(config.flat_tokens.filespec, "validation")
    text = dataset.read(0, dataset.token_count)[0].tobytes()
    rows = [row for step in range(3) for row in loader.rows(step, range(8))[0][:, 1:]]
    assert all(row.tobytes() in text for row in rows)


def given(*batches):
    """A loader of these batches."""
    return SimpleNamespace(from_step=lambda first, last: enumerate(batches[first:last]))


@pytest.mark.parametrize("rows", [8, 16])
def test_validation_is_the_mean_over_targets_not_over_batches(rows, in_f32):
    """The last rows are almost all padding, as where short documents aren't packed."""
    config = small_config(f"training.validation_batches={32 // rows}")
    config.training.tokens.batch, config.training.microbatches = rows, rows // 8
    rng = np.random.default_rng(0)
    targets = rng.integers(1, config.model.vocab, (32, config.training.tokens.len))
    targets[8:, 3:], targets[24:], is_start = 0, 0, np.zeros(targets.shape, bool)
    with jax.set_mesh(mesh(4, 2)):
        weights = in_f32.init_state(config).weights
        parts = [targets[i : i + rows] for i in range(0, 32, rows)]
        batches = [token_batch(train.TokenBatch, x, is_start[: len(x)]) for x in parts]
        actual = in_f32.validate(config, weights, given(*batches))
        weights = plain(jax.device_get(weights))
    np.testing.assert_allclose(actual, oracle.mean_loss(weights, targets, is_start, 100), rtol=1e-6)


def test_a_validation_has_the_rows_of_a_microbatch_in_memory():
    taken = []
    for microbatches in 1, 4:
        config = small_config("training.tokens.batch=64", f"training.microbatches={microbatches}")
        hint = train.state_type(config).weights, type_tree(train.TokenBatch)
        with jax.set_mesh(mesh(4, 2)):
            shapes = helpers.placed_shapes(hint, train.dimensions(config))
            compiled = train.validation_step.lower(*shapes, config).compile()
        taken.append(compiled.memory_analysis().temp_size_in_bytes)
    assert taken[1] < taken[0] / 2


def test_a_validation_without_targets_has_no_loss():
    config, (targets, is_start) = small_config("training.validation_batches=1"), random_rows()
    batch = token_batch(train.TokenBatch, 0 * targets, is_start)
    with jax.set_mesh(mesh(4, 2)):
        weights = train.init_state(config).weights
        assert np.isnan(train.validate(config, weights, given(batch)))


def test_a_signal_is_obeyed_between_the_batches_of_a_validation():
    config, asked = small_config("training.validation_batches=4"), iter([False, True])
    batch = token_batch(train.TokenBatch, *random_rows())
    with jax.set_mesh(mesh(4, 2)):
        weights, seen = train.init_state(config).weights, given(*[batch] * 4)
        assert train.validate(config, weights, seen, lambda: next(asked)) is None
    assert next(asked, "both were asked") == "both were asked"


@pytest.mark.slow
def test_the_step_reuses_the_states_memory(in_f32):
    config = small_config()
    with jax.set_mesh(mesh(4, 2)):
        state = in_f32.init_state(config)
        batch = token_batch(in_f32.TokenBatch, *random_rows(), 0)
        helpers.take_step(in_f32, state, batch, config)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_metrics_are_read_a_step_late(monkeypatch, tmp_path):
    """Step n is running before the metrics of step n-1 are read. A validation begins after its
    step's metrics are read, so that its time doesn't count for the step."""
    events = []

    class Number(float):
        ndim = 0  # as JAX's arrays have it, without being read

        def __float__(self):
            events.append(f"read {self.real:.0f}")
            return self.real

    def step_once(state, batch, hyper):
        events.append(f"start {batch}")
        others = {"learning_rate": 0.0, "grad_norm": 0.0, "skipped": 0}
        return state, {"loss": Number(batch), **others}

    class Batch(int):
        def note_of_padding(self):
            return ""

    numbers = SimpleNamespace(
        waited=0.0, position=None, bytes_per_token=None, epochs=lambda _: "",
        from_step=lambda *ends: ((n, Batch(n)) for n in range(*ends)),
    )  # fmt: skip
    monkeypatch.setattr(Run, "compile", lambda *_: step_once)
    monkeypatch.setattr(train, "validate", lambda *_: events.append("validate") or 0.0)
    settings = "training.steps=4", "training.validation_interval=2"
    config = small_config(*settings, f"paths.root_working_dir={tmp_path}")
    with jax.set_mesh(mesh(4, 2)):
        train.train(config, numbers, {"": numbers}, str)
    assert events[:6] == ["start 0", "start 1", "read 0", "read 1", "validate", "start 2"]
    assert events[6:] == ["start 3", "read 2", "read 3", "validate"]


def optimizer_of(config, weights):
    """The config's optimizer, by optax. Its Muon also does the rest, by another Adam, so that takes
    another transformation. In `weights`, those of Muon are what has more than two dimensions in a
    layer, and all others whose name says so."""
    hyper, schedule = config.training, optax_schedule(config.training)

    def label(path, x):
        name = path[-1].key
        matrix = path[0].key == "layers" and name[:2] in ("w_", "e_") and name != "w_router"
        return "matrix" if matrix and hyper.optimizer == "muon" else name

    def decays(name):
        kinds = {"gains": name.endswith("norm"), "biases": name.startswith("b_")}
        kinds["embeddings"] = name == "embed"
        return not any(kinds[kind] for kind in hyper.no_decay)

    def matrices(tree):
        """Rows and columns among the dimensions, after those of layers and experts."""

        def numbers(path, x):
            rows = 2 if path[-1].key.startswith("e_") else 1
            columns = tuple(range(rows + 1, x.ndim))
            return optax.contrib.MuonDimensionNumbers((rows,), columns)

        return jax.tree_util.tree_map_with_path(numbers, tree)

    labels = jax.tree_util.tree_map_with_path(label, weights)
    given = hyper.adam_b1, hyper.adam_b2, hyper.adam_eps, hyper.adam_eps_root
    adam = functools.partial(optax.adamw, lambda count: schedule(count + 1), *given)
    names = {*jax.tree.leaves(labels)}
    adams = {x: adam(weight_decay=hyper.weight_decay if decays(x) else 0) for x in names}
    muon = optax.contrib.muon(
        lambda count: schedule(count + 1), beta=hyper.muon_momentum, consistent_rms=0.2,
        weight_decay=hyper.weight_decay, muon_weight_dimension_numbers=matrices,
    )  # fmt: skip
    each = optax.partition(adams | {"matrix": muon}, labels)
    return optax.chain(optax.clip_by_global_norm(hyper.grad_clip), each)


MUON = ["training.optimizer=muon", "training.grad_clip=0.5"]
OPTIMIZERS = {  # (d, t, r, c), and settings
    "adamw": ((4, 2), ["training.grad_clip=0.5"]),
    "adamw, gains and more not decayed, nothing clipped": ((4, 2), [
        "training.no_decay=[gains,biases,embeddings]", "model.qkv_bias=true",
        "training.weight_decay=2", "training.grad_clip=1e9",
    ]),
    "muon, experts": ((4, 2, 2), [
        *MUON, "model.experts={count: 4, per_token: 2, d_ff: 24}", "mesh={d: 4, t: 2, r: 2}",
        "training.routing.bias_rate=0",
    ]),
    "muon, odd layers, biases": ((2, 2, 1, 2), [
        *MUON, "model.layers=3", "training.muon_momentum=0.8", "model.qkv_bias=true",
        "training.no_decay=[biases]", "training.schedule=wsd", "training.cooldown_steps=97",
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but_for(["adamw"], list(OPTIMIZERS)))
def test_the_optimizer_agrees_with_optax(in_f32, name):
    """Four steps from gradients of the oracle lead to the same weights."""
    axes, settings = OPTIMIZERS[name]
    config = small_config("training.warmup_steps=3", *settings)
    rows = [random_rows(seed) for seed in range(4)]
    schedule = optax_schedule(config.training)
    experts = config.model.experts and (config.model.experts, config.training.routing)

    def loss(weights, targets, is_start):
        return oracle.objective(weights, targets, is_start, 100, experts=experts)[0]

    with jax.set_mesh(mesh(*axes)):
        state = in_f32.init_state(config)
        wanted = plain(jax.device_get(state.weights))
        optimizer = optimizer_of(config, wanted)
        optimizer_state = optimizer.init(wanted)
        order = balanced(12, axes[3] if len(axes) > 3 else 1)
        for step, (targets, is_start) in enumerate(rows):
            grads = jax.grad(lambda w, t=targets, s=is_start: loss(w, t, s))(wanted)
            updates, optimizer_state = optimizer.update(grads, optimizer_state, wanted)
            wanted = optax.apply_updates(wanted, updates)
            batch = token_batch(in_f32.TokenBatch, targets, is_start, 0)
            batch = jax.tree.map(lambda x: x[:, order], batch)
            state, metrics = helpers.take_step(in_f32, state, batch, config)
            np.testing.assert_allclose(metrics["learning_rate"], schedule(step + 1), rtol=1e-5)
            np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-4)
        assert int(state.step) == len(rows)
        assert_close(plain(jax.device_get(state.weights)), jax.device_get(wanted), 1e-4)


def test_a_weight_is_drawn_by_its_name():
    """Another weight beside it changes none of its bits."""
    changes = "qk_norm=null", "qk_norm=head", "qkv_bias=true", "tied_embeddings=true"
    configs = [small_config(f"model.{change}") for change in changes]
    with jax.set_mesh(mesh(1, 1)):
        drawn = [named(jax.device_get(train.init_state(config).weights)) for config in configs]
    for other in drawn[1:]:
        assert other.keys() != drawn[0].keys()
        common = other.keys() & drawn[0].keys()
        assert len(common) >= 9 and all(np.array_equal(other[x], drawn[0][x]) for x in common)
    values = [x.ravel()[:32].tobytes() for name, x in drawn[0].items() if "norm" not in name]
    assert len({*values}) == len(values), "each is another draw"


def test_weights_of_one_name_are_drawn_by_more_of_their_paths():
    kinds, sizes = type_tree(tuple[train.MLP, train.MLP]), {"M": 8, "F": 8, "layers": 1}
    with jax.set_mesh(mesh(1, 1)):
        two = initial_weights(kinds, sizes, 0)
    assert len({np.asarray(x).tobytes() for x in jax.tree.leaves(two)}) == 6
