"""Scores a checkpoint's model on tasks of EleutherAI's lm-evaluation-harness.

    python -m tools.lm_eval runs/stdlib/checkpoints --tasks lambada_openai,hellaswag --batch 32
    python -m tools.lm_eval runs/imported --tokenizer llama_folder --tasks gsm8k --mesh d=4,t=2
    python -m tools.lm_eval runs/stdlib/checkpoints --tasks mine --include-path folder_of_yaml_files

It needs `pip install lm-eval`, not PyTorch. lm-eval downloads the tasks' datasets. In Python:

    from tools.lm_eval import CheckpointLM
    results = lm_eval.simple_evaluate(CheckpointLM("runs/stdlib/checkpoints"), tasks=["hellaswag"])

Once this module is imported, lm-eval also knows the model as "shardlight", with CheckpointLM's
arguments as its model_args.

The model sees the ids that lm-eval's own model `hf` gives the exported folder:
- A context begins with the model's start token. With `hf` this depends on the tokenizer: compare
  with add_bos_token=True, and with prefix_token_id if the tokenizer's BOS isn't the start token.
- A text that is scored as a whole (perplexity) comes after one start token, which isn't scored.
  With `hf` compare with add_bos_token=False: a tokenizer that adds BOS makes it score a second BOS.
- The names of special tokens in a text are parsed, and special tokens are left out of answers.
- What doesn't fit into a row of the training's length is cut off on the left, start token included.
  As in `hf`, an answer and the context before it share a row, which must be longer than the answer.

Log-probabilities are over the whole vocabulary, in f32. An answer is greedy unless the task samples
(do_sample); a sample depends on its place among all requests, not on the batch or the mesh. Chat
templates aren't applied. The options --mesh, --dtype and --tokenizer are those of tools.generate.
Each device holds its part of the f32 weights, and for tasks with answers tools.generate's copy too.
"""

import argparse
import contextlib
import functools
import json
import math
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from tqdm import tqdm

import train
from data.flat_tokens import NO_TOKEN
from data.loader import TokenBatch
from runtime.config import within
from runtime.errors import user_errors
from shardlib import devices, ops
from shardlib.errors import UserError
from shardlib.types import (
    bool_,
    compute,
    computing_in,
    f32,
    typechecked,
    typed_shard_map,
    u32,
)
from tools import generate
from tools.texts import Continued

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
except ModuleNotFoundError as error:  # `scores` doesn't need it, and `run` says how to get it
    if error.name != "lm_eval":
        raise
    TemplateLM, register_model = object, lambda _: lambda made: made


@functools.partial(jax.jit, static_argnames="config")
@typed_shard_map
def scores(
    weights: train.Stored, batch: TokenBatch, config: train.ModelConfig
) -> tuple[f32["B/d L/c"], bool_["B/d L/c"]]:
    """Each target's log-probability, and whether no id is likelier. The vocabulary stays split, as
    in train.total_loss, and logits exist for PREFILL positions at a time."""
    replica = train.gather_replica(train.cast(weights))
    unembedding = train.output_weights(replica)

    @typechecked
    def score(
        x: compute["B/d l/c M/t"], targets: u32["B/d l/c"]
    ) -> tuple[f32["B/d l/c"], bool_["B/d l/c"]]:
        logits = train.unembed(unembedding, x, config)
        logits = logits - ops.reduce_max("B/d l/c V/t -> B/d l/c", logits)[:, :, None]
        sum_exp = ops.reduce_sum("B/d l/c V/t -> B/d l/c {U:t}", jnp.exp(logits))
        sum_exp = ops.psum("B/d l/c {U:t} -> B/d l/c", sum_exp)
        logit = ops.index_unreduced("B/d l/c [V/t], B/d l/c -> B/d l/c {U:t}", logits, targets)
        logit = ops.psum("B/d l/c {U:t} -> B/d l/c", logit)
        return logit - jnp.log(sum_exp), logit == 0

    parts = max(1, batch.targets.shape[1] // generate.PREFILL)
    x, _ = train.forward(replica, batch, config)
    whole = x, batch.targets
    split = [rearrange(x, "B (parts l) ... -> parts B l ...", parts=parts) for x in whole]
    nats, best = lax.map(lambda part: score(*part), split)
    join = "parts B l -> B (parts l)"
    return rearrange(nats, join), rearrange(best, join)


@register_model("shardlight")
class CheckpointLM(TemplateLM):  # type: ignore[misc]
    """The model of a checkpoint, for lm-eval. Raises UserError or CheckpointError if it or its
    tokenizer can't be opened, and UserError for a request that it can't answer."""

    prefix_token_id = eot_token_id = 0  # the start token, see below; lm-eval needs no other

    def __init__(
        self,
        checkpoint: str,
        mesh: train.MeshConfig | None = None,
        dtype: str | None = None,
        tokenizer: str | None = None,
        batch_size: int = 16,
    ):
        super().__init__()
        axes = generate.replicas(mesh or train.MeshConfig(d=1, t=1)).axes
        assert axes["c"] == 1, "rows aren't split here"
        self.mesh, self.batch_size = devices.make_mesh(axes), batch_size
        with jax.set_mesh(self.mesh):
            self.checkpoints, self.config = generate.open_checkpoint(checkpoint)
            path = self.checkpoints.newest.path
            self.codec = generate.open_tokenizer(tokenizer, self.config, path)
            self.weights = self.checkpoints.restore("weights")
        self.special: set[int] = set()
        if not self.codec.is_bytes:
            self.codec.parse_special_tokens()
            added = self.codec.tokenizer.slow.added_tokens_decoder
            self.special = {i for i, token in added.items() if token.special}
        self.dtype, self.room = dtype or self.config.dtype, self.config.training.tokens.len
        self.prefix_token_id = self.eot_token_id = self.config.model.start_token

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        with jax.set_mesh(self.mesh), computing_in(self.dtype):
            yield

    @functools.cached_property
    def gathered(self) -> Any:
        return generate.lay_out(self.weights)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        ids, start = self.codec.encode(string), self.prefix_token_id
        generate.check_ids(f"the text {string[:40]!r}", max(ids, default=0), self.config)
        return ids if add_special_tokens is False or ids[:1] == [start] else [start, *ids]

    def batches(self, rows: list[list[int]], doing: str) -> Iterator[tuple[list[int], int]]:
        """Yields indices of rows, the longest first, and the number of rows to compute at once."""
        size = generate.padded(min(self.batch_size, max(1, len(rows))))
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        for first in tqdm(range(0, len(rows), size), desc=doing, unit=" batches", disable=None):
            yield order[first : first + size], size

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Scores (name, context, answer). A row's last token is no input, so there is one more."""
        rows = cut([context + answer for _, context, answer in requests], self.room + 1)
        results = [(0.0, False)] * len(rows)
        for name, _, answer in requests:
            if not 0 < len(answer) <= self.room:
                problem = f"{len(answer)} tokens to score, but a row has 1 to {self.room}"
                raise UserError(f"{problem}: ...{str(name)[-80:]}")
        with self.computing():
            for part, size in self.batches(rows, "scoring"):
                length = 1 + generate.round_up(len(rows[part[0]]) - 1)
                ids = np.full((size, length), NO_TOKEN, np.uint32)
                for row, i in enumerate(part):
                    ids[row, : len(rows[i])] = rows[i]
                batch = TokenBatch.of(ids, np.zeros(ids.shape, np.bool_), self.prefix_token_id)
                nats, best = map(np.asarray, scores(self.weights, batch, self.config.model))
                for row, i in enumerate(part):
                    end = len(rows[i]) - 1
                    at = row, slice(end - len(requests[i][2]), end)
                    results[i] = float(nats[at].sum()), bool(best[at].all())
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        windows, totals = [], [0.0] * len(requests)
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            found = get_rolling_token_windows(ids, self.prefix_token_id, self.room, context_len=1)
            windows += [(i, *make_disjoint_window(window)) for window in found]
        scored = self._loglikelihood_tokens(windows)
        for (i, *_), (nats, _) in zip(windows, scored, strict=True):
            totals[i] += nats
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        results, groups = [""] * len(requests), dict[str, list[int]]()
        for i, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1]), []).append(i)
        for options, indices in groups.items():
            how, tokens, stops = self.sampling(json.loads(options))
            prompts = cut(
                [self.tok_encode(requests[i].args[0]) for i in indices], self.room - tokens
            )
            with self.computing():
                for part, size in self.batches(prompts, "generating"):
                    texts = [Continued(self.codec, [], indices[i]) for i in part]
                    these, numbers = [prompts[i] for i in part], [text.sample for text in texts]
                    args = these, numbers, tokens, size, 0, how, self.config
                    for _ in generate.extended(generate.generate(self.gathered, *args), texts):
                        for text in texts:  # a stop string may name a special token
                            new = self.codec.decode(text.new)
                            text.ended = text.ended or any(stop in new for stop in stops)
                    for text in texts:
                        kept = [token for token in text.new if token not in self.special]
                        answer = self.codec.decode(kept)
                        ends = [at for stop in stops if (at := answer.find(stop)) >= 0]
                        results[text.sample] = answer[: min(ends, default=None)]
        return results

    def sampling(self, options: dict[str, Any]) -> tuple[generate.Sampling, int, list[str]]:
        """Reads a task's generation_kwargs: how to sample, how many tokens, and stop strings."""
        given: dict[str, Any] = dict(normalize_gen_kwargs(options))
        heat, samples = given.pop("temperature", 1.0), given.pop("do_sample")
        tokens, stops = given.pop("max_gen_toks"), [stop for stop in given.pop("until") if stop]
        top_k, top_p = given.pop("top_k", None), given.pop("top_p", 1)
        if given.pop("num_beams", 1) != 1 or given:
            raise UserError(f"generation_kwargs: tools.generate can't do all of {options}")
        if tokens >= self.room:
            raise UserError(
                f"max_gen_toks is {tokens}, but a row of the training has {self.room} tokens for "
                "an answer and its context: set it in the task's generation_kwargs"
            )
        how = generate.Sampling(heat if samples else 0, top_k or None, top_p, self.codec.ids)
        return how, tokens, stops


def cut(rows: list[list[int]], room: int) -> list[list[int]]:
    """Cuts rows on the left, and says so."""
    if long := sum(len(row) > room for row in rows):
        note = f"note: {long} of {len(rows)} texts are longer than a row in training, and cut"
        print(f"{note} on the left", file=sys.stderr)
    return [row[-room:] for row in rows]


def run(args: argparse.Namespace) -> None:
    """Runs the program. Raises UserError or OSError for a user's mistake."""
    if TemplateLM is object:
        raise UserError("this needs EleutherAI's lm-evaluation-harness: pip install lm-eval")
    tasks, manager = args.tasks.split(","), TaskManager(include_path=args.include_path)
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise UserError(f"lm-eval has no task {unknown[0]}: `lm-eval ls tasks` lists all")
    devices.have_cpu_devices(math.prod(args.mesh.axes.values()))
    model = CheckpointLM(args.checkpoint, args.mesh, args.dtype, args.tokenizer, args.batch)
    settings = {"num_fewshot": args.num_fewshot, "limit": args.limit, "log_samples": False}
    results = simple_evaluate(model, tasks=tasks, task_manager=manager, **settings)
    for part in "results", "groups":
        if results.get(part):
            print(make_table(results, part))
    print(f"checkpoint: {model.checkpoints.newest.path}", file=sys.stderr)


def main() -> None:
    parser = generate.parser_of("tools.lm_eval", __doc__, "the run's")
    add, count = parser.add_argument, within(int, 1)
    add("--tasks", required=True, metavar="TASK,TASK", help="names of tasks or groups, or patterns")
    add("--include-path", metavar="FOLDER", help="also find tasks in the YAML files here")
    add("--num-fewshot", type=within(int, 0), help="examples in a context; default: a task's")
    add("--limit", type=count, help="evaluate this many documents of a task; default: all")
    add("--batch", type=count, default=16, help="texts at a time; default: %(default)s")
    with user_errors(), contextlib.suppress(KeyboardInterrupt):
        run(parser.parse_args())


if __name__ == "__main__":
    main()
