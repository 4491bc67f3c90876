"""Derives the sizes of dimensions, and the model's FLOPs, from a config."""

import functools
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
    seen = min(config.model.sliding_window or size["L"], size["L"])  # tokens, at most
    pairs = size["B"] * seen * (2 * size["L"] - seen)
    return 6 * weights * size["B"] * size["L"], 6 * size["layers"] * heads * pairs
