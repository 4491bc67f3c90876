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

With curve=true it trains instead, as `python -m train` does with the same arguments: from the same
initial weights, on the same batches, with the same schedule. Attention then takes a mask, so as not
to cross documents. Writes config.yaml and metrics.jsonl to the run's folder, for tools.plot.
"""

import dataclasses
import itertools
import json
import math
import time
from typing import Any

import jax
import numpy as np

import train
from data.sources import open_batches
from runtime.program import program
from runtime.run import MeshConfig, due
from runtime.schedule import learning_rate
from shardlib.errors import UserError
from shardlib.types import named
from tools import benchmark, huggingface_weights
from tools.arguments import NOT_USED


@dataclasses.dataclass(unsafe_hash=True)
class TorchConfig(train.Config):
    checkpointing: bool = False
    compile: bool = True
    curve: bool = False


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


def adamw(config: TorchConfig, model: Any) -> Any:
    import torch

    training = config.training
    return torch.optim.AdamW(
        model.parameters(), training.learning_rate, (training.adam_b1, training.adam_b2),
        training.adam_eps, training.weight_decay, fused=True,
    )  # fmt: skip


def make_step(config: TorchConfig, model: Any) -> Any:
    """Returns a step for `time_steps`. It changes `model`, and returns an event at its end."""
    import torch

    device, training, optimizer = model.device.type, config.training, adamw(config, model)

    @torch.compile(disable=not config.compile)
    def loss(tokens: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            x = model.get_input_embeddings()(tokens).bfloat16()
            output = model(inputs_embeds=x, labels=tokens, use_cache=False)
            return output.loss / training.microbatches

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


def draw_curve(config: TorchConfig, model: Any) -> None:
    """Trains from train.py's initial weights. Writes a row of metrics for each step."""
    import torch

    device, training, sizes = model.device.type, config.training, train.dimensions(config)
    with jax.set_mesh(train.make_mesh(config, config.mesh.axes)):
        data, held_out = open_batches(config, sizes)
        weights = named(train.init_state(config).weights)
        ours = {f"weights/{name}": np.asarray(x) for name, x in weights.items()}
        initial = {}
        for each in huggingface_weights.tensors(config.model, "llama"):
            values = ours[each.array][each.index]
            initial[each.name] = each.convert(values, each.ours, each.theirs, np.dtype("f4"))
        model.load_state_dict({name: torch.tensor(values) for name, values in initial.items()})
        optimizer, halves = adamw(config, model), config.dtype == "bf16"
        position = torch.arange(training.tokens.len, device=device)

        @torch.compile(disable=not config.compile)
        def nats(inputs: Any, targets: Any, counts: Any, start: Any) -> Any:
            seen = (start[:, None, :, None] <= position) & (position <= position[:, None])
            with torch.autocast(device, torch.bfloat16, enabled=halves):
                x = model.get_input_embeddings()(inputs)
                x = x.bfloat16() if halves else x
                logits = model(inputs_embeds=x, attention_mask=seen, use_cache=False).logits
            logits, targets = logits.float().flatten(0, 1), targets.flatten()
            losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
            return (losses * counts.flatten()).sum()

        def parts(batch: Any, count: int) -> Any:
            fields = batch.inputs, batch.targets, batch.loss_mask, batch.start
            rows = (torch.tensor(np.asarray(x).astype(np.int64), device=device) for x in fields)
            return zip(*(x.chunk(count) for x in rows), strict=True)

        config.paths.folder.mkdir(parents=True)
        (config.paths.folder / "config.yaml").write_text(config.to_yaml())
        for step, batch in data.from_step(0, training.steps):
            since, loss = time.perf_counter(), 0.0
            for part in parts(batch, training.microbatches):
                of_part = nats(*part) / int(np.asarray(batch.loss_mask).sum())
                of_part.backward()
                loss += of_part.item()
            optimizer.param_groups[0]["lr"] = learning_rate(step + 1, training)
            torch.nn.utils.clip_grad_norm_(model.parameters(), training.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
            speed = training.tokens.batch * training.tokens.len / (time.perf_counter() - since)
            row = {"step": step, "loss": loss, "tokens_per_second": speed}
            if held_out and due(training.validation_interval, step, training.steps):
                sums = [0.0, 0.0]
                for _, held in held_out[""].from_step(0, training.validation_batches):
                    for part in parts(held, training.microbatches):
                        with torch.no_grad():
                            sums[0] += nats(*part).item()
                        sums[1] += part[2].sum().item()
                row["validation_loss"] = sums[0] / sums[1]
            with (config.paths.folder / "metrics.jsonl").open("a") as metrics:
                metrics.write(json.dumps(row) + "\n")


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
        if config.curve:
            return draw_curve(config, model)
        batch = torch.randint(size.vocab, (rows, config.training.tokens.len), device=device)
        step, batches = make_step(config, model), itertools.repeat(batch)
        times = benchmark.time_steps(step, batches, None, lambda end: end.synchronize())
    except torch.OutOfMemoryError:
        key = f"training.microbatches={config.training.microbatches}"
        raise UserError(f"out of memory: raise {key}") from None
    peak = (torch.cuda.max_memory_allocated(), "on a device") if cuda else benchmark.peak_memory()
    count, packages = model.num_parameters(), ["torch", "transformers"]
    benchmark.show(config, kind, count, peak, packages, times)


if __name__ == "__main__":
    main()
