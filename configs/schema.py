"""The keys of a run's config, with their types and bounds. base.yaml says what each key does."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

from omegaconf import OmegaConf
from pydantic import AfterValidator, Field

from data.sources import DataConfig
from runtime.config import ROOT, Section, as_text, flat
from runtime.initial import ROLES
from runtime.run import MeshConfig, RunConfig
from runtime.values import F32, BelowOne, F32OrInf, NonNegativeInt, PositiveInt, one_of
from shardlib.types import COMPUTE
from variants.experts import ExpertsConfig, RoutingConfig
from variants.families import QK_NORMS, RopeScalingConfig

# By platform, the most layers of a dense model that are unrolled by default. More take minutes to
# compile: see docs/gpus.md and docs/performance.md.
UNROLLED = {"gpu": 32, "tpu": 8}

# Settings -> prefixes of keys that have no effect with them.
UNUSED = {
    "training.optimizer=adamw": ("training.muon_",),
    "training.schedule=cosine": ("training.cooldown_",),
    "training.schedule=linear": ("training.cooldown_",),
    "training.schedule=constant": (
        "training.cooldown_", "training.cosine_", "training.steps_for_lr",
    ),
    "training.validation_interval=0 training.validation_at_start=false": (
        "flat_tokens.validation", "hf_dataset.validation_split", "training.validation_batches",
    ),
    "model.experts=null": ("training.routing.",),
    "model.experts.bias=false": ("training.routing.bias_rate",),
    "hang_timeout_seconds=0.0": ("hang_ends",),
    "checkpoints.keep_last=0": ("checkpoints.keep_every",),
    "paths.clone_from=": ("paths.clone_",),
}  # fmt: skip


def unused(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the dotted keys among a config's values that have no effect, each with the settings
    that disable it."""
    given = {f"{key}={as_text(value)}" for key, value in values.items()}
    for settings, prefixes in UNUSED.items():
        if given.issuperset(settings.split()):
            yield from ((key, settings) for key in values if key.startswith(prefixes))


# A base of RoPE: an integer if it is one that JAX takes.
Base = Annotated[
    F32, Field(ge=1), AfterValidator(lambda x: int(x) if x < 2**31 and x % 1 == 0 else x)
]


# All sections are hashable, so that a jitted function can take a config as a static argument.
@dataclasses.dataclass(unsafe_hash=True)
class ModelConfig(Section, key="model"):
    d_model: PositiveInt
    n_q_per_kv: PositiveInt
    n_kv: PositiveInt
    d_head: PositiveInt
    layers: PositiveInt
    vocab: PositiveInt
    d_ff: NonNegativeInt
    rope_max_timescale: Base
    rope_scaling: RopeScalingConfig | None
    norm_eps: F32
    start_token: NonNegativeInt
    # Differences between model families.
    norms_after: bool = False
    qkv_bias: bool = False
    qk_norm: QK_NORMS | None = None
    tied_embeddings: bool = False
    sliding_window: PositiveInt | None = None
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        self.require(self.start_token < self.vocab, "start_token", "it must be below model.vocab")
        self.require(self.d_head % 2 == 0, "d_head", "it must be even, as RoPE rotates pairs")
        self.require(self.d_ff or self.experts, "d_ff", "it must be above 0 without experts")


@dataclasses.dataclass(unsafe_hash=True)
class TokensConfig(Section, key="training.tokens"):
    batch: PositiveInt
    len: PositiveInt


@dataclasses.dataclass(unsafe_hash=True)
class TrainingConfig(Section, key="training"):
    warmup_steps: NonNegativeInt
    steps: PositiveInt
    steps_for_lr: PositiveInt
    learning_rate: F32
    schedule: Annotated[str, one_of("cosine linear wsd constant")]
    cooldown_steps: NonNegativeInt
    cosine_learning_rate_final_fraction: Annotated[F32, Field(le=1)]  # of linear and wsd, too
    optimizer: Annotated[str, one_of("adamw muon")]
    muon_momentum: BelowOne
    no_decay: tuple[Annotated[str, one_of(" ".join(ROLES))], ...]
    adam_b1: BelowOne
    adam_b2: BelowOne
    adam_eps: F32
    adam_eps_root: F32
    weight_decay: F32
    grad_clip: F32OrInf
    seed: NonNegativeInt
    tokens: TokensConfig
    routing: RoutingConfig
    microbatches: PositiveInt
    loss_chunks: PositiveInt
    unroll: PositiveInt | None
    validation_interval: NonNegativeInt
    validation_batches: PositiveInt
    validation_at_start: bool
    skip_steps: tuple[NonNegativeInt, ...]
    max_skipped_updates: NonNegativeInt

    def __post_init__(self) -> None:
        self.require(self.grad_clip > 0, "grad_clip", "it must be above 0; inf disables clipping")
        self.require(self.adam_eps + self.adam_eps_root, "adam_eps", "AdamW would divide 0 by 0")
        fits = self.schedule != "wsd" or 0 < self.cooldown_steps <= self.steps_for_lr
        problem = f"wsd needs 1 to training.steps_for_lr={self.steps_for_lr} steps"
        self.require(fits, "cooldown_steps", problem)


@dataclasses.dataclass(unsafe_hash=True, kw_only=True)
class Config(RunConfig, DataConfig):
    model: ModelConfig
    training: TrainingConfig
    mesh: MeshConfig
    dtype: Annotated[str, one_of(" ".join(COMPUTE))]

    def __post_init__(self) -> None:
        super().__post_init__()
        training, tokens, mesh = self.training, self.training.tokens, self.mesh
        (rows, rest), length = divmod(tokens.batch, mesh.d), tokens.len // mesh.c
        problem = f"it must divide a device's {rows} rows (training.tokens.batch / mesh.d)"
        self.require(rest or rows % training.microbatches == 0, "training.microbatches", problem)
        balanced = mesh.c == 1 or training.tokens.len % (2 * mesh.c) == 0
        problem = f"2*c must divide training.tokens.len={training.tokens.len}"
        self.require(balanced, "mesh.c", problem)
        problem = f"it must divide a device's {length} tokens (training.tokens.len / mesh.c)"
        self.require(length % training.loss_chunks == 0, "training.loss_chunks", problem)
        alone = training.microbatches == 1 or not self.model.experts
        problem = "it needs training.microbatches=1: the cost isn't a sum over microbatches"
        fits = alone or not training.routing.balance_cost
        self.require(fits, "training.routing.balance_cost", problem)

    def notes(self) -> Iterator[str]:
        """Yields a note for each setting that has no effect and isn't as in base.yaml."""
        base = flat(OmegaConf.to_container(OmegaConf.load(ROOT / "configs/base.yaml")))
        values = flat(self.values())
        for key, settings in unused(values):
            # A default that follows from other settings may be any value.
            if base.get(key) != values[key] and "${" not in str(base.get(key)):
                yield f"note: {key} has no effect with {settings.replace(' ', ' and ')}"

    def layers_at_a_time(self, platform: str) -> int:
        """Returns how many layers the loop over layers computes at a time on a platform. For "", a
        step that is traced without devices, it is 1, so that audits show the loop."""
        layers, unroll = self.model.layers, self.training.unroll
        if unroll is None:  # experts have a loop of their own
            few = layers <= UNROLLED.get(platform, 0) and not self.model.experts
            unroll = layers if few else 1
        return min(unroll, layers) if platform else 1
