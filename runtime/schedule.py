"""Computes an update's hyperparameters from the config: the learning rate, which follows a
schedule, and the optimizers' coefficients."""

import math
from typing import Any

import jax
import numpy as np

from shardlib.types import f32, pytree_dataclass, typechecked


@pytree_dataclass
class Average:
    """Coefficients of an exponential moving average at a step: the old average's, the new value's,
    and Adam's bias correction."""

    old: f32[""]
    new: f32[""]
    unbias: f32[""]


@pytree_dataclass
class Hyper:
    """The hyperparameters of an update. They are an argument of the training step, so that runs
    that differ only in them share a compiled program."""

    learning_rate: f32[""]
    weight_decay: f32[""]
    grad_clip: f32[""]
    adam_eps: f32[""]
    adam_eps_root: f32[""]
    mu: Average  # of AdamW
    nu: Average
    momentum: Average  # of Muon
    nesterov: Average  # of the momentum and the gradient
    bias_rate: f32[""]  # of experts


@typechecked
def hyper_at(step: int, training: Any) -> Hyper:
    """Returns the hyperparameters of update `step + 1`. Uses f64: in f32, 1 - 0.9 is 0.10000002."""

    def average(b: float) -> Any:
        return Average(b, 1 - b, 1 / (1 - b ** (step + 1)))

    momentum, after = average(training.muon_momentum), 1 - training.muon_momentum ** (step + 2)
    hyper = Hyper(
        learning_rate=learning_rate(step + 1, training),
        weight_decay=training.weight_decay,
        grad_clip=training.grad_clip,
        adam_eps=training.adam_eps,
        adam_eps_root=training.adam_eps_root,
        mu=average(training.adam_b1),
        nu=average(training.adam_b2),
        momentum=momentum,
        nesterov=Average(momentum.old / after, momentum.new * momentum.unbias, 1),
        bias_rate=training.routing.bias_rate,
    )
    return jax.tree.map(np.float32, hyper)


def decay_start(training: Any) -> int:
    """Returns the step after which the rate may fall: the last if it is constant."""
    if training.schedule == "constant":
        return int(training.steps)
    stable = training.steps_for_lr - training.cooldown_steps
    start = stable if training.schedule == "wsd" else training.warmup_steps
    return int(min(start, training.steps_for_lr))


def learning_rate(step: int, training: Any) -> float:
    """Returns the rate of a step, counted from 1: linear warmup to the peak at `warmup_steps`, then
    a decay to the final fraction at `steps_for_lr`. The decay is a half cosine, linear, linear over
    only the last `cooldown_steps` (warmup-stable-decay: Hu et al. 2024,
    https://arxiv.org/abs/2404.06395, section 4), or none."""
    warmup, start = step / max(training.warmup_steps, 1), decay_start(training)
    done = min(max((step - start) / max(training.steps_for_lr - start, 1), 0), 1)
    falling = {"cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1}
    falling |= dict.fromkeys(("linear", "wsd"), 1 - done)
    final = training.cosine_learning_rate_final_fraction
    decay = final + (1 - final) * falling[training.schedule]
    return training.learning_rate * min(warmup, decay)


def note_of_schedule(training: Any) -> str:
    """Returns a note if the learning rate doesn't reach its peak, if wsd's cooldown isn't over at
    the last step, or if steps have a rate of 0, else ""."""
    steps, end = training.steps, training.steps_for_lr
    rising = min(steps, decay_start(training))
    if training.warmup_steps > rising:
        why = f"training.warmup_steps={training.warmup_steps}, but it rises for only {rising} steps"
        return f"note: the learning rate doesn't reach its peak: {why}"
    until = f"ends at training.steps_for_lr={end}, and the run at training.steps={steps}"
    if training.schedule == "wsd" and steps < end:
        return f"note: the cooldown {until}"
    if training.learning_rate and steps > end and not learning_rate(steps, training):
        return f"note: the learning rate is 0 at the last steps: its decay {until}"
    return ""
