"""Trains other codebases' recipes on the batches of a config, to compare what they learn.

    python -m benchmarks.recipes --config-name=local_python_stdlib recipe=nanogpt \\
        flat_tokens.filespec=stdlib.zarr training.learning_rate=1e-3

Needs PyTorch: pip install torch. Runs on a CPU in f32, and writes no files. Ends with a line of
JSON, whose loss is that of the validation split's first batches, as in train.py, in nats per token.

- recipe=nanogpt is the character model of nanoGPT's README for CPUs: GPT-2 with 4 layers of 4 heads
  and 128 dimensions, without dropout, but with transformers' biases; AdamW with betas of 0.9 and
  0.99, a decay of 0.1 for matrices and embeddings alone, and a cosine to a tenth of the rate.
- recipe=llama is transformers' LlamaForCausalLM with the config's shapes and transformers' initial
  weights; torch's AdamW with the config's betas, decay and schedule.

Both clip gradients and warm up like the config. In both a token sees earlier documents of its row.
"""

import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Annotated, Any

import jax
import numpy as np

import train
from benchmarks import pytorch
from data.sources import open_batches
from runtime.config import OneOf
from runtime.program import program
from runtime.run import make_mesh
from shardlib.errors import UserError


@dataclasses.dataclass(unsafe_hash=True)
class RecipeConfig(pytorch.TorchConfig):
    recipe: Annotated[str, OneOf("llama nanogpt")] = "llama"


def make_nanogpt(config: RecipeConfig) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    options: dict[str, Any] = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    options |= dict.fromkeys(("bos_token_id", "eos_token_id"))
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=config.model.vocab, n_positions=config.training.tokens.len,
        n_layer=4, n_head=4, n_embd=128, **options,
    ))  # fmt: skip


def run(config: RecipeConfig, data: Any, held_out: Any) -> dict[str, Any]:
    import torch

    hyper, nanogpt = config.training, config.recipe == "nanogpt"
    if nanogpt:
        cosine = {"schedule": "cosine", "cosine_learning_rate_final_fraction": 0.1}
        hyper = hyper.changed({"adam_b1": 0.9, "adam_b2": 0.99} | cosine)
    torch.manual_seed(hyper.seed)
    model = make_nanogpt(config) if nanogpt else pytorch.make_model(config)
    groups = [
        {"params": x, "weight_decay": 0.0 if nanogpt and x.ndim < 2 else hyper.weight_decay}
        for x in model.parameters()
    ]
    betas = hyper.adam_b1, hyper.adam_b2
    optimizer = torch.optim.AdamW(groups, hyper.learning_rate, betas, hyper.adam_eps)

    def losses(batches: Any, steps: int) -> Iterator[Any]:
        for _, batch in batches.from_step(0, steps):
            inputs, targets, mask = (
                torch.from_numpy(np.array(x).astype(int))
                for x in (batch.inputs, batch.targets, batch.loss_mask)
            )
            logits = model(input_ids=inputs, use_cache=False).logits
            nats = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction="none"
            )
            yield (nats * mask.flatten()).sum() / mask.sum()

    start = time.perf_counter()
    for step, loss in enumerate(losses(data, hyper.steps)):
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(step + 1, hyper)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), hyper.grad_clip)
        optimizer.step()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        validation = [float(loss) for loss in losses(held_out, hyper.validation_batches)]
    return {
        "recipe": config.recipe,
        "learning_rate": hyper.learning_rate,
        "seed": hyper.seed,
        "steps": hyper.steps,
        "parameters": model.num_parameters(),
        "validation_loss": sum(validation) / len(validation),
        "seconds": round(seconds, 1),
    }


@program(RecipeConfig, "configs", {"paths": {"model_name": "none"}})
def main(config: RecipeConfig) -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UserError(f"this needs PyTorch ({error}): pip install torch") from None
    config = dataclasses.replace(config, mesh=train.MeshConfig(1, 1), simulate_devices=True)
    mesh, sizes = make_mesh(config, config.mesh.axes), train.dimensions(config)
    with jax.set_mesh(mesh):
        data, held_out = open_batches(config, sizes)
        if not held_out:
            raise UserError("this needs training.validation_interval above 0")
        print(json.dumps(run(config, data, held_out)))


if __name__ == "__main__":
    main()
