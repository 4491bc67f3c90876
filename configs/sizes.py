"""Derives the sizes of dimensions, and the model's FLOPs, from a config."""

import functools
from fractions import Fraction
from typing import Any

from configs.schema import Config

# The config key with the size of each dimension in the type strings.
DIMENSIONS = {
    "B": "training.tokens.batch",
    "L": "training.tokens.len",
    "M": "model.d_model",
    "Q": "model.n_q_per_kv",
    "K": "model.n_kv",
    "D": "model.d_head",
    "F": "model.d_ff",
    "V": "model.vocab",
    "E": "model.experts.count",
    "G": "model.experts.d_ff",
    "layers": "model.layers",
}


def dimensions(config: Config) -> dict[str, int]:
    """The size of each dimension that the model has."""

    def value(key: str) -> Any:
        return functools.reduce(lambda x, name: x and getattr(x, name), key.split("."), config)

    return {name: size for name, key in DIMENSIONS.items() if (size := value(key))}


def share_seen(config: Config) -> Fraction:
    """The share of a row's scores, one for each query and key, that causality and the window leave
    visible: half without a window."""
    length = config.training.tokens.len
    seen = min(config.model.sliding_window or length, length)  # tokens, at most
    return Fraction(seen * (2 * length - seen), 2 * length**2)


def step_flops(config: Config) -> tuple[int, int]:
    """Matmul FLOPs of a step, forward and backward, without recomputation: (weight matmuls, causal
    attention). Per token, 6 FLOPs for each weight of a matmul, and 6 * L * Q * K * D a layer for
    attention's two products, fewer with a window. Chowdhery et al. 2022,
    https://arxiv.org/abs/2204.02311, appendix B."""
    size = dimensions(config)
    heads = size["Q"] * size["K"] * size["D"]
    per_layer = size["M"] * (2 * heads + 2 * size["K"] * size["D"] + 3 * size.get("F", 0))
    if each := config.model.experts:
        per_layer += size["M"] * (each.count + 3 * each.d_ff * each.per_token)
    weights = size["layers"] * per_layer + size["V"] * size["M"]
    tokens = size["B"] * size["L"]
    attention = 12 * size["layers"] * heads * tokens * size["L"] * share_seen(config)
    return 6 * weights * tokens, int(attention)
