"""Training steps to compile for TPUs: model sizes, meshes, slices and edits of train.py."""

import re
from typing import NamedTuple

from runtime.config import ROOT
from tests import mutations
from tests.helpers import compose_config

SAVES = r"(gate|up) = save_for_backward\((.*)\)\n"


def nothing_saved(source):
    """Recomputes everything in a layer."""
    return re.sub(r"save_for_backward\((?=\S)", "(", source)


def feed_forward_again(source):
    """Recomputes the two largest arrays of a layer."""
    return re.sub(SAVES, r"\1 = \2\n", source)


def feed_forward_offloaded(source):
    """Saves the same two arrays in the host's memory."""
    return re.sub(SAVES, r"\1 = save_for_backward(\2, offload=True)\n", source)


CHUNKED = "training.loss_chunks=4"
MICROBATCHES = "training.microbatches=4"


class Program(NamedTuple):
    topology: str
    model: str
    d: int
    t: int
    batch: int
    length: int
    edits: tuple = ()  # of the source, by a function, or of the config
    r: int = 1
    c: int = 1
    slices: int = 1

    def __str__(self):
        edits = "".join(f", {getattr(edit, '__name__', edit)}" for edit in self.edits)
        sizes = zip(("r", "c", "slices"), self[-3:], strict=True)
        others = "".join(f", {name}={size}" for name, size in sizes if size > 1)
        return f"{self.model} on {self.topology}, {self.d} x {self.t}, {self.batch}{edits}{others}"

    def build(self):
        """The config, and the edited train.py as a module."""
        source = (ROOT / "train.py").read_text()
        for edit in self.edits:
            source = source if isinstance(edit, str) else edit(source)
        module = mutations.load(source)
        config = compose_config(
            "pretrain", f"model={self.model}",
            f"mesh={{d: {self.d}, t: {self.t}, r: {self.r}, c: {self.c}}}",
            f"training.tokens={{batch: {self.batch}, len: {self.length}}}",
            "training.loss_chunks=8", "paths.model_name=x", "flat_tokens.filespec=x",
            "training.unroll=1",  # compiles four times as fast
            *(edit for edit in self.edits if isinstance(edit, str)), schema=module.Config,
        )  # fmt: skip
        return config, module


N, C, M = nothing_saved, CHUNKED, MICROBATCHES

STEPS = [
    Program("v5e:2x4", "84m", 8, 1, 64, 1024),
    Program("v5e:2x4", "84m", 4, 2, 64, 1024),
    Program("v5e:2x4", "84m", 8, 1, 64, 1024, (N,)),
    Program("v5e:2x4", "84m", 8, 1, 64, 1024, (C,)),
    Program("v5e:2x4", "84m", 8, 1, 64, 1024, (M,)),
    Program("v5e:2x4", "84m", 8, 1, 64, 1024, (N, C)),
    Program("v5e:2x4", "270m", 8, 1, 32, 1024),
    Program("v5e:2x4", "270m", 2, 4, 32, 1024),
    Program("v5e:2x4", "270m", 8, 1, 64, 1024, (C,)),
    Program("v5e:2x4", "270m", 4, 2, 64, 1024, (C, M)),
    Program("v5e:4x4", "270m", 16, 1, 64, 1024, (N,)),
    Program("v5e:4x4", "540m", 16, 1, 32, 1024),
    Program("v5e:4x4", "540m", 8, 2, 32, 1024, (C,)),
    Program("v5e:4x4", "540m", 4, 4, 64, 1024, (N, C)),
    Program("v5p:2x2x2", "84m", 8, 1, 256, 1024),
    Program("v5p:2x2x2", "270m", 8, 1, 256, 1024),
    Program("v5p:2x2x2", "270m", 4, 2, 256, 1024, (C,)),
    Program("v5p:2x2x2", "540m", 8, 1, 128, 1024),
    Program("v5p:2x2x2", "540m", 8, 1, 128, 1024, (N,)),
    Program("v5p:2x2x2", "540m", 4, 2, 128, 1024, (C, M)),
    Program("v5p:2x2x2", "1b", 8, 1, 64, 1024),
    Program("v5p:2x2x4", "1b", 16, 1, 256, 1024, (C,)),
    Program("v5p:2x2x4", "1b", 4, 4, 128, 1024, (N, M)),
    Program("v5p:2x2x4", "1b", 8, 2, 64, 2048, (N, C)),
    Program("v6e:2x4", "270m", 8, 1, 128, 1024, (N,)),
    Program("v6e:2x4", "540m", 8, 1, 64, 1024, (C,)),
    Program("v6e:2x4", "84m", 2, 4, 64, 1024, (N, C)),
    Program("v5p:2x2x2", "84m", 8, 1, 128, 1024, (N, C)),
    Program("v5p:2x2x2", "270m", 2, 4, 64, 1024, (N,)),
    Program("v5p:2x2x2", "540m", 4, 2, 64, 2048),
    Program("v5e:2x4", "84m", 2, 4, 64, 1024, (N,)),
    Program("v5e:2x4", "270m", 8, 1, 64, 1024, (N, C)),
    Program("v5e:4x4", "540m", 2, 8, 32, 1024, (C,)),
    Program("v4:2x2x2", "84m", 8, 1, 128, 1024, (N,)),
    Program("v4:2x2x2", "540m", 8, 1, 64, 1024),
    Program("v4:2x2x2", "270m", 4, 2, 64, 1024, (N, C)),
    Program("v4:2x2x2", "84m", 4, 2, 128, 1024),
    Program("v6e:2x4", "84m", 4, 2, 128, 1024),
    Program("v6e:2x4", "270m", 2, 4, 64, 1024, (N,)),
    Program("v6e:2x4", "540m", 8, 1, 64, 1024),
    Program("v5e:2x4", "540m", 4, 2, 32, 1024, (N,)),
    Program("v5e:2x4", "84m", 2, 4, 64, 1024, (M,)),
    Program("v5p:2x2x2", "1b", 4, 2, 64, 1024),
    Program("v5p:2x2x2", "84m", 2, 4, 128, 1024),
    Program("v5p:2x2x4", "270m", 8, 2, 256, 1024, (C,)),
    Program("v5e:2x4", "270m", 8, 1, 64, 1024, (feed_forward_again, C)),
    Program("v5p:2x2x2", "540m", 8, 1, 128, 1024, (feed_forward_again,)),
    Program("v6e:2x4", "540m", 4, 2, 64, 1024, (feed_forward_again, C)),
]
WITH_LONGER_ROWS = [
    Program("v5e:4x4", "270m", 16, 1, 128, 1024, (C,)),
    Program("v5e:16x16", "1b", 256, 1, 1024, 2048, (C,)),
    Program("v5p:2x2x4", "2b", 16, 1, 32, 4096, (C,)),
    Program("v5p:2x2x2", "1b", 8, 1, 16, 8192, (C,)),
    Program("v6e:2x4", "270m", 4, 2, 32, 2048, (C,)),
    Program("v4:2x2x2", "84m", 4, 2, 64, 2048),
]
# With the mesh axes r and c, and on two slices.
LAYOUTS = [
    Program("v5e:2x4", "84m", 8, 1, 64, 1024, r=2),
    Program("v5p:2x2x2", "540m", 2, 1, 16, 8192, (C,), c=4),
    Program("v5p:2x2x4", "1b", 4, 1, 8, 16384, c=4),
    Program("v4:2x2x2", "270m", 4, 1, 8, 4096, (C,), r=2, c=2),
    Program("v6e:2x4", "270m", 16, 1, 128, 1024, (C,), r=2, slices=2),
    Program("v5e:2x4", "540m", 8, 2, 64, 1024, (C, M), r=2, slices=2),
]

# Whose peak is in the loss.
VOCABULARY = "model.vocab=131072"
WITH_LARGE_VOCABULARY = [
    Program("v6e:2x4", "84m", 2, 4, 64, 1024, (VOCABULARY,)),
    Program("v5p:2x2x2", "270m", 2, 4, 64, 1024, (VOCABULARY, M)),
]

EXPERTS = "model.experts={count: 16, per_token: 4, d_ff: 1024}", "model.d_ff=0"
WITH_EXPERTS = [
    Program("v5p:2x2x2", "84m", 4, 2, 64, 1024, EXPERTS),
    Program("v5p:2x2x2", "84m", 8, 1, 64, 1024, EXPERTS),
]

UNROLLED = "training.unroll=null"
WITH_UNROLLED_LAYERS = [
    Program("v5e:2x4", "84m", 8, 1, 64, 1024, (UNROLLED,)),
    Program("v5e:2x4", "84m", 4, 2, 64, 1024, (UNROLLED,)),
    Program("v5e:4x4", "270m", 16, 1, 128, 1024, (UNROLLED,)),
]
