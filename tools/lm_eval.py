"""Scores a checkpoint's model on tasks of EleutherAI's lm-evaluation-harness.

    python -m tools.lm_eval runs/stdlib/checkpoints --tasks lambada_openai,hellaswag --batch 32
    python -m tools.lm_eval runs/imported --tokenizer llama_folder --tasks gsm8k --d 4 --t 2
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
templates aren't applied. The options --d, --t, --dtype and --tokenizer are those of tools.generate,
and weights are held as there.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from data.flat_tokens import NO_TOKEN
from data.loader import TokenBatch
from runtime.config import within
from runtime.errors import user_errors
from shardlib import devices
from shardlib.errors import UserError
from shardlib.types import computing_in
from tools import generate

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
except ModuleNotFoundError as error:  # `run` says how to get it
    if error.name != "lm_eval":
        raise
    TemplateLM, register_model = object, lambda _: lambda made: made


@register_model("shardlight")
class CheckpointLM(TemplateLM):  # type: ignore[misc]
    """The model of a checkpoint, for lm-eval. Raises UserError or CheckpointError if it or its
    tokenizer can't be opened, and UserError for a request that it can't answer."""

    eot_token_id = 0  # the start token, see below; lm-eval needs no other

    def __init__(
        self,
        checkpoint: str,
        d: int = 1,
        t: int = 1,
        dtype: str | None = None,
        tokenizer: str | None = None,
        batch_size: int = 16,
    ):
        super().__init__()
        self.mesh, self.batch_size = generate.make_mesh(d, t), batch_size
        with jax.set_mesh(self.mesh):
            checkpoints, self.config = generate.open_checkpoint(checkpoint)
            self.path, self.dtype = checkpoints.newest.path, dtype or self.config.dtype
            self.codec = generate.open_tokenizer(tokenizer, checkpoints.newest)
            with computing_in(self.dtype):
                self.weights = generate.lay_out(checkpoints.restore("weights"))
        self.room = self.config.training.tokens.len
        self.eot_token_id = self.config.model.start_token

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        with jax.set_mesh(self.mesh), computing_in(self.dtype):
            yield

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        ids, start = self.codec.encode(string), self.eot_token_id
        generate.check_ids(f"the text {string[:40]!r}", max(ids, default=0), self.config)
        return ids if add_special_tokens is False else self.codec.started(ids, start)

    def batches(self, rows: list[list[int]], room: int) -> Iterator[tuple[list[int], Any, int]]:
        """Yields indices of rows, the longest first, these rows, cut on the left to fit, and the
        number of rows to compute at once."""
        if long := sum(len(row) > room for row in rows):
            note = f"note: {long} of {len(rows)} texts are longer than a row in training, and cut"
            print(f"{note} on the left", file=sys.stderr)
        size = generate.padded(min(self.batch_size, max(1, len(rows))))
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        for first in tqdm(range(0, len(rows), size), unit=" batches", disable=None):
            part = order[first : first + size]
            yield part, [rows[i][-room:] for i in part], size

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Scores (name, context, answer). A row's last token is no input, so there is one more."""
        results = [(0.0, False)] * len(requests)
        for name, _, answer in requests:
            if not 0 < len(answer) <= self.room:
                problem = f"{len(answer)} tokens to score, but a row has 1 to {self.room}"
                raise UserError(f"{problem}: ...{str(name)[-80:]}")
        with self.computing():
            rows = [context + answer for _, context, answer in requests]
            for part, these, size in self.batches(rows, self.room + 1):
                length = 1 + generate.round_up(len(these[0]) - 1)
                ids = np.full((size, length), NO_TOKEN, np.uint32)
                for row, tokens in enumerate(these):
                    ids[row, : len(tokens)] = tokens
                batch = TokenBatch.of(ids, np.zeros(ids.shape, np.bool_), self.eot_token_id)
                nats, best = map(
                    np.asarray, generate.scores(self.weights, batch, self.config.model)
                )
                for row, i in enumerate(part):
                    end = len(these[row]) - 1
                    at = row, slice(end - len(requests[i][2]), end)
                    results[i] = float(nats[at].sum()), bool(best[at].all())
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        windows, totals = [], [0.0] * len(requests)
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            found = get_rolling_token_windows(ids, self.eot_token_id, self.room, context_len=1)
            windows += [(i, *make_disjoint_window(window)) for window in found]
        for (i, *_), (nats, _) in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            totals[i] += nats
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        results, groups = [""] * len(requests), dict[str, list[int]]()
        for i, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1]), []).append(i)
        for options, indices in groups.items():
            how, tokens, stops = self.sampling(json.loads(options))
            prompts = [self.tok_encode(requests[i].args[0]) for i in indices]
            longest = min(max(map(len, prompts)), self.room - tokens)
            with self.computing():
                for part, these, size in self.batches(prompts, self.room - tokens):
                    numbers = [indices[i] for i in part]
                    args = these, numbers, tokens, size, 0, how, self.config, longest
                    steps = generate.generate(self.weights, *args)
                    texts: list[list[int]] = [[] for _ in part]
                    running = set(range(len(part)))
                    for _ in generate.extended(steps, texts, running, self.codec.ends):
                        for row in [*running]:  # a stop string may name a special token
                            text = self.codec.decode(texts[row])
                            if any(stop in text for stop in stops):
                                running.remove(row)
                    for number, ids in zip(numbers, texts, strict=True):
                        kept = [token for token in ids if token not in self.codec.special]
                        answer = self.codec.decode(kept)
                        cut = (answer.partition(stop)[0] for stop in stops)
                        results[number] = min(cut, key=len, default=answer)
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


def run(args: argparse.Namespace) -> None:
    """Runs the program. Raises UserError or OSError for a user's mistake."""
    if TemplateLM is object:
        raise UserError("this needs EleutherAI's lm-evaluation-harness: pip install lm-eval")
    tasks, manager = args.tasks.split(","), TaskManager(include_path=args.include_path)
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise UserError(f"lm-eval has no task {unknown[0]}: `lm-eval ls tasks` lists all")
    devices.have_cpu_devices(args.d * args.t)
    named = args.dtype, args.tokenizer, args.batch
    model = CheckpointLM(args.checkpoint, args.d, args.t, *named)
    settings = {"num_fewshot": args.num_fewshot, "limit": args.limit, "log_samples": False}
    results = lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, **settings)
    for part in "results", "groups":
        if results.get(part):
            print(make_table(results, part))
    print(f"checkpoint: {model.path}", file=sys.stderr)


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
