"""Times a config's training step in PyTorch, on one device: a peer for tools.benchmark.

    python -m benchmarks.pytorch --config-name=c4_a100x1_84m training.microbatches=4

Needs PyTorch, which nothing else here does: pip install torch. Prints the rows of tools.benchmark
that apply, and one line of JSON; writes nothing. The model is `transformers`' LlamaForCausalLM of
the config's shapes, and it runs in the fastest usual way that makes the same step:

- Weights, gradients and moments are in f32, and torch.autocast makes products in bf16, as ours are.
  Embeddings are cast to bf16, and so the residual stream is, as ours is: autocast alone would leave
  it in f32, twice the bytes to move.
- SDPA, causal by its flag. Without a mask, PyTorch can take FlashAttention's kernel, or cuDNN's.
- torch.compile of model and loss in one piece, in its default mode; fused AdamW, clipped by the
  global norm. Nothing is computed again in the backward pass unless checkpointing=true, and then
  each layer is.

All steps are on the same random tokens, each row a document. What the config says of dataset and
mesh, the learning rate's schedule and adam_eps_root don't matter here, and are ignored.
"""

import dataclasses
import itertools
from typing import Any

import jax

import train
from runtime.program import program
from shardlib.devices import abstract_mesh
from shardlib.errors import UserError
from shardlib.types import make_shapes
from tools import benchmark
from tools.audit import NOT_USED


@dataclasses.dataclass(unsafe_hash=True)
class TorchConfig(train.Config):
    checkpointing: bool = False
    compile: bool = True


def make_model(config: TorchConfig) -> Any:
    """Our model, as `transformers` has it, in f32."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    size = config.model
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=size.vocab, hidden_size=size.d_model, intermediate_size=size.d_ff,
        num_hidden_layers=size.layers, num_attention_heads=size.n_q_per_kv * size.n_kv,
        num_key_value_heads=size.n_kv, head_dim=size.d_head, rms_norm_eps=size.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": float(size.rope_max_timescale)},
        max_position_embeddings=config.training.tokens.len, tie_word_embeddings=False,
    ))  # fmt: skip
    # For "sdpa" itself, transformers makes a mask of B x L x L under torch.compile, as it can't see
    # there that a row is one document; for a name that it doesn't know, it makes none.
    AttentionInterface.register("causal_sdpa", AttentionInterface()["sdpa"])
    model.set_attn_implementation("causal_sdpa")
    with jax.sharding.use_abstract_mesh(abstract_mesh({"d": 1, "t": 1})):
        ours = jax.tree.leaves(make_shapes(train.Weights, train.dimensions(config)))
    assert model.num_parameters() == sum(leaf.size for leaf in ours), "another model than ours"
    if config.checkpointing:
        model.gradient_checkpointing_enable()
    return model


def make_step(config: TorchConfig, model: Any) -> Any:
    """Makes a step for `time_steps`: it has no state, and returns the event of its end."""
    import torch

    device, hyper = model.device.type, config.training
    optimizer = torch.optim.AdamW(
        model.parameters(), hyper.learning_rate, (hyper.adam_b1, hyper.adam_b2), hyper.adam_eps,
        hyper.weight_decay, fused=True,
    )  # fmt: skip

    @torch.compile(disable=not config.compile)
    def loss(tokens: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            x = model.get_input_embeddings()(tokens).bfloat16()
            return model(inputs_embeds=x, labels=tokens, use_cache=False).loss / hyper.microbatches

    def step(_: None, batch: Any) -> tuple[None, Any]:
        for tokens in batch.chunk(hyper.microbatches):
            loss(tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), hyper.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        end = torch.get_device_module(device).Event()
        end.record()
        return None, end

    return step


@program(TorchConfig, "configs", NOT_USED)
def main(config: TorchConfig) -> None:
    try:
        import torch
    except ImportError as error:
        raise UserError(f"this needs PyTorch ({error}): pip install torch") from None
    jax.config.update("jax_platforms", "cpu")  # the GPU is PyTorch's
    config = dataclasses.replace(config, mesh=train.MeshConfig(1, 1))
    size, rows, cuda = config.model, config.training.tokens.batch, torch.cuda.is_available()
    device, kind = ("cuda", torch.cuda.get_device_name()) if cuda else ("cpu", "cpu")
    if size.d_model % (size.n_q_per_kv * size.n_kv):
        raise UserError("LlamaConfig wants model.d_model to be a multiple of its query heads")
    try:
        model = make_model(config).to(device)
        batch = torch.randint(size.vocab, (rows, config.training.tokens.len), device=device)
        step, batches = make_step(config, model), itertools.repeat(batch)
        steps, _ = benchmark.time_steps(step, batches, None, lambda end: end.synchronize())
    except torch.OutOfMemoryError:
        raise UserError(
            f"out of memory: raise training.microbatches={config.training.microbatches}"
        ) from None
    peak = (torch.cuda.max_memory_allocated(), "on a device") if cuda else benchmark.peak_memory()
    count, packages = model.num_parameters(), ["torch", "transformers"]
    benchmark.show(config, kind, count, peak, packages, steps)


if __name__ == "__main__":
    main()
