"""Times a config's training step in PyTorch on one device, to compare with tools.benchmark.

    python -m benchmarks.pytorch --config-name=c4_a100x1_84m training.microbatches=4

Needs PyTorch, unlike everything else here: pip install torch. Prints the rows of tools.benchmark
that apply. Writes no files. The model is `transformers`' LlamaForCausalLM
with the config's shapes, in the fastest common setup that computes the same step:

- Weights, gradients and moments are f32; torch.autocast runs matmuls in bf16, as train.py does. The
  embeddings are cast to bf16, so that the residual stream is bf16, as in train.py. With autocast
  alone it would be f32, which doubles its memory traffic.
- SDPA with is_causal. Without a mask PyTorch can choose the FlashAttention or the cuDNN kernel.
- torch.compile, in its default mode, of model and loss as one graph. Fused AdamW, with gradients
  clipped by their global norm. Nothing is recomputed in the backward pass unless
  checkpointing=true, which checkpoints each layer.

All steps use the same random tokens, with each row a document. The config's dataset, mesh, learning
rate schedule and adam_eps_root are ignored.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax

import train
from runtime.program import program
from runtime.run import MeshConfig
from shardlib.errors import UserError
from tools import benchmark, huggingface_weights
from tools.arguments import NOT_USED


@dataclasses.dataclass(unsafe_hash=True)
class TorchConfig(train.Config):
    checkpointing: bool = False
    compile: bool = True


def make_model(config: TorchConfig) -> Any:
    """Returns the `transformers` equivalent of train.py's model, in f32."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    theirs = huggingface_weights.described(config.model, config.training.tokens.len, "llama")
    model = LlamaForCausalLM(LlamaConfig(**theirs))
    # With "sdpa", transformers makes a B x L x L mask under torch.compile, as it can't tell there
    # that a row is one document. With a name that it doesn't know, it makes none.
    AttentionInterface.register("causal_sdpa", AttentionInterface()["sdpa"])
    model.set_attn_implementation("causal_sdpa")
    ours = huggingface_weights.entries(config.model).values()
    if model.num_parameters() != sum(math.prod(array["shape"]) for array in ours):
        raise UserError("transformers' LlamaForCausalLM has other weights than the config's model")
    if config.checkpointing:
        model.gradient_checkpointing_enable()
    return model


def make_step(config: TorchConfig, model: Any) -> Any:
    """Returns a stateless step for `time_steps`, which returns an event that marks its end."""
    import torch

    device, training = model.device.type, config.training
    optimizer = torch.optim.AdamW(
        model.parameters(), training.learning_rate, (training.adam_b1, training.adam_b2),
        training.adam_eps, training.weight_decay, fused=True,
    )  # fmt: skip

    @torch.compile(disable=not config.compile)
    def loss(tokens: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            x = model.get_input_embeddings()(tokens).bfloat16()
            return (
                model(inputs_embeds=x, labels=tokens, use_cache=False).loss / training.microbatches
            )

    def step(_: None, batch: Any) -> tuple[None, Any]:
        for tokens in batch.chunk(training.microbatches):
            loss(tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.grad_clip)
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
    jax.config.update("jax_platforms", "cpu")  # leave the GPU to PyTorch
    config = dataclasses.replace(config, mesh=MeshConfig(1, 1))
    size, rows, cuda = config.model, config.training.tokens.batch, torch.cuda.is_available()
    device, kind = ("cuda", torch.cuda.get_device_name()) if cuda else ("cpu", "cpu")
    if size.d_model % (size.n_q_per_kv * size.n_kv):
        raise UserError("LlamaConfig needs model.d_model to be a multiple of the query heads")
    try:
        model = make_model(config).to(device)
        batch = torch.randint(size.vocab, (rows, config.training.tokens.len), device=device)
        step, batches = make_step(config, model), itertools.repeat(batch)
        times = benchmark.time_steps(step, batches, None, lambda end: end.synchronize())
    except torch.OutOfMemoryError:
        raise UserError(
            f"out of memory: raise training.microbatches={config.training.microbatches}"
        ) from None
    peak = (torch.cuda.max_memory_allocated(), "on a device") if cuda else benchmark.peak_memory()
    count, packages = model.num_parameters(), ["torch", "transformers"]
    benchmark.show(config, kind, count, peak, packages, times)


if __name__ == "__main__":
    main()
