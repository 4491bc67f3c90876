"""Checks each term by arithmetic on lengths alone. tests/test_tpu.py and tests/test_gpu_compile.py
check the sum against compilers."""

import pytest

import train
from checks import preflight
from runtime import chips
from shardlib.mesh import abstract_mesh
from tests import mutations, tpu_programs
from tests.helpers import ROOT, compose_config, slow_but_for
from tools.audit import memory
from tools.audit.ledger import ledger

B, L, M, F, V, LAYERS, K, Q, D = 32, 1024, 256, 1024, 4096, 3, 4, 2, 64
E, G, CHOICES = 8, 128, 2
MODEL = [
    f"model={{d_model: {M}, d_ff: {F}, vocab: {V}, layers: {LAYERS}, n_kv: {K}}}",
    f"model={{n_q_per_kv: {Q}, d_head: {D}}}",
]
EXPERTS = f"model.experts={{count: {E}, per_token: {CHOICES}, d_ff: {G}}}", "model.d_ff=0"
KERNELS = "v5p"  # runs kernels on all of these meshes


def held(*options, module=train, chip=KERNELS):
    """The terms of a config with these options, as the audit computes them."""
    names = "paths.model_name=x", "flat_tokens.filespec=x"
    tokens = f"training.tokens={{batch: {B}, len: {L}}}", "training.loss_chunks=16"
    config = compose_config("pretrain", *names, *MODEL, *tokens, *options, schema=module.Config)
    axes, kind = config.mesh.axes, chips.CHIPS[chip].kind
    jaxpr = preflight.trace_step(module, config, abstract_mesh(axes))
    return memory.held(config, jaxpr, ledger(jaxpr, axes), kind)


# Of weights, split over all axes.
ATTENTION = M * D * (2 * Q * K + 2 * K)
DENSE = ATTENTION + 3 * M * F
GAINS = (2 * LAYERS + 1) * M
MESHES = [(1, 1, 1, 1), (8, 1, 1, 1), (4, 2, 1, 1), (4, 1, 2, 1), (2, 1, 1, 2), (8, 2, 2, 2)]
CASES = [(*mesh, parts) for mesh in MESHES for parts in (1, 2)]


@pytest.mark.parametrize("case", slow_but_for([CASES[0], CASES[-1]], CASES), ids=str)
def test_each_term(case):
    d, r, t, c, parts = case
    terms = held(f"mesh={{d: {d}, r: {r}, t: {t}, c: {c}}}", f"training.microbatches={parts}")
    weights = LAYERS * DENSE + 2 * V * M + GAINS
    of_device, of_replica = weights // (d * t * c), weights // (d // r * t * c)
    tokens = B * L // (d * c)  # of a device
    assert terms["weights"] == 4 * of_device and terms["moments"] == 2 * 4 * of_device
    # Inputs, targets, positions and starts of documents have four bytes, the mask has one. There
    # are twelve scalars: the count of steps, and AdamW's rate, decay, clip, eps and averages.
    assert terms["batch"] == 17 * tokens + 4 * 12
    assert terms["weights of the replica"] == 2 * of_replica
    assert terms["gradients"] == (2 if parts == 1 else 6) * of_replica
    # Forward and backward, less the gains' small parts.
    assert terms["gathered weights"] == 2 * 2 * (DENSE // t + 2 * M // t)
    assert terms["arrays of a layer"] == 3 * 2 * tokens // parts * F // t
    # x before attention and before the feed-forward; q, their mix, k, v; gate and up.
    rows = tokens // parts
    layer = 2 * rows * (2 * M + (2 * Q * K + 2 * K) * D + 2 * F) // t
    outside = 4 * V * M // t + 2 * rows * M // t + 2 * 4 * rows * D  # of the loss; RoPE's sin, cos
    # The softmax's sums, inputs' places, and keys' positions, which are whole along c.
    small = 4 * rows * Q * K // t * LAYERS + 4 * rows + 4 * M + 4 * rows * c
    assert terms[memory.SAVED] == LAYERS * layer + outside + small
    assert list(terms)[:3] == list(memory.ARGUMENTS)


@pytest.mark.parametrize("d, t, c, parts", [(8, 1, 1, 1), (2, 2, 2, 2)])
def test_a_gpus_kernel_has_a_mask_of_its_queries_by_all_keys(d, t, c, parts):
    settings = f"mesh={{d: {d}, t: {t}, c: {c}}}", f"training.microbatches={parts}"
    assert held(*settings, chip="h100")["mask of documents"] == 2 * B * L * L // (d * c * parts)
    without = held(*settings), held(*settings, "model.d_head=136", chip="h100")
    assert not any("mask of documents" in terms for terms in without), "on TPUs, or plain"


@pytest.mark.parametrize(("chip", "each"), [("v5p", 4), ("h100", 4 + 2)])
def test_logits_are_held_where_they_need_more_than_a_layer(chip, each):
    """On a GPU so is their gradient."""
    mesh = "mesh={d: 4, t: 2}"
    chunks = [held(mesh, f"training.loss_chunks={n}", chip=chip) for n in (1, 2, 16)]
    tokens = B * L // 4
    whole = each * tokens * V // 2
    assert [terms.get(memory.LOGITS) for terms in chunks] == [whole, whole // 2, None]
    assert chunks[0]["gathered weights"] == 2 * V * M // 2, "the unembedding"
    assert memory.ARRAYS not in chunks[0] and memory.ARRAYS in chunks[2]


def test_what_is_recomputed_is_held_and_then_two_arrays_suffice():
    source = (ROOT / "train.py").read_text()
    module = mutations.load(tpu_programs.nothing_saved(source))
    terms = held("mesh={d: 4, t: 2}", module=module)
    tokens = B * L // 4
    turned = (Q * K + K) * D // 2  # RoPE's matmul
    recomputed = 2 * F // 2 + (Q * K + 2 * K) * D // 2 + turned + M
    assert terms[memory.ARRAYS] == 2 * tokens * (recomputed + 2 * F // 2)
    few = held("mesh={d: 4, t: 2}")[memory.SAVED]
    assert terms[memory.SAVED] < few / 3


def test_scores_are_held_where_no_kernel_computes_them():
    """Looks at heads that are too large for a kernel. Scores of a chunk of 512 queries are f32."""
    mesh = "mesh={d: 4, t: 1, c: 2}"
    scores = 4 * (B // 4) * Q * K * 512 * L
    with_kernel, without = held(mesh), held(mesh, "model.d_head=136")
    assert without[memory.ARRAYS] == pytest.approx(3 * scores)
    assert with_kernel[memory.ARRAYS] == 3 * 2 * B // 4 * L // 2 * F


def test_matrices_that_muon_optimizes_have_no_second_moment():
    terms = held("mesh={d: 4, t: 2}", "training.optimizer=muon")
    others = 2 * V * M + GAINS
    assert terms["moments"] == 4 * (LAYERS * DENSE + 2 * others) // 8


def test_experts():
    terms = held("mesh={d: 4, t: 2}", *EXPERTS, chip="h100")
    router = M * E
    layer = ATTENTION + 3 * E * M * G + router
    weights = LAYERS * layer + 2 * V * M + GAINS
    biases = 4 * LAYERS * E  # on each device, in f32
    assert terms["weights"] == 4 * weights // 8 + biases
    assert terms["weights of the replica"] == 2 * weights // 8 + biases
    gathered = 2 * (layer + 2 * M) // 2 + 4 * E
    assert terms["gathered weights"] == 2 * gathered
    # Copies of the tokens, one for each choice, in blocks that each have one expert's.
    copies = 2 * B // 4 * L * CHOICES * M
    assert 3 * copies <= terms[memory.ARRAYS] < 1.5 * 3 * copies


def test_in_f32_only_a_gather_over_replicas_copies_the_weights():
    options = "dtype=f32", "model.vocab=65536", "training.loss_chunks=1"
    terms = held("mesh={d: 4, t: 2}", *options, chip="h100")
    assert (terms["weights of the replica"], terms["gradients"]) == (0, terms["weights"])
    replicas = held("mesh={d: 4, t: 2, r: 2}", *options, chip="h100")
    assert replicas["weights of the replica"] == replicas["gradients"] > replicas["weights"]
    assert terms[memory.LOGITS] == 4 * B * L // 4 * 65536 // 2, "their gradient overwrites them"
