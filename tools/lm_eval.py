"""Scores a checkpoint's model on tasks of EleutherAI's lm-evaluation-harness.

    python -m tools.lm_eval --model_args checkpoint=runs/stdlib --tasks lambada_openai
    python -m tools.lm_eval --model_args checkpoint=runs/imported,d=4,t=2 --tasks gsm8k --limit 50
    python -m tools.lm_eval --model_args checkpoint=runs/x --tasks mine --include_path yaml_folder

It needs `pip install lm-eval`, not PyTorch, and takes the options of `lm-eval run`, which downloads
the tasks' datasets. --model_args are those of CheckpointLM: d, t, dtype and tokenizer are the
options of tools.generate, and weights are held as there. In Python:

    from tools.lm_eval import CheckpointLM
    results = lm_eval.simple_evaluate(CheckpointLM("runs/stdlib"), tasks=["hellaswag"])

Once this module is imported, lm-eval also knows the model as "shardlight".

The model sees the ids that lm-eval's own model `hf` gives the exported folder:
- A context begins with the model's start token. With `hf` this depends on the tokenizer: compare
  with add_bos_token=True, and with prefix_token_id if the tokenizer's BOS isn't the start token.
- A text that is scored as a whole (perplexity) comes after one start token, which isn't scored.
  With `hf` compare with add_bos_token=False: a tokenizer that adds BOS makes it score a second BOS.
- The names of special tokens in a text are parsed, and special tokens are left out of answers.
- A text longer than a row of the training is cut off on the left, start token included.
  As in `hf`, an answer and the context before it share a row, which must be longer than the answer.

Log-probabilities are over the whole vocabulary, in f32. An answer is greedy unless the task samples
(do_sample); a sample depends on its place among all requests, not on the batch or the mesh. Chat
templates aren't applied.
"""

import json
import os
import sys
from typing import Any

import numpy as np
from tqdm import tqdm

from data.flat_tokens import NO_TOKEN
from data.loader import TokenBatch
from runtime.errors import user_errors
from shardlib.errors import UserError
from shardlib.types import COMPUTE
from tools.generate import model as models
from tools.generate import steps
from tools.tables import grouped

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:  # `main` says how to get it
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
        batch_size: int | str = 16,
        device: str = "",  # ignored: lm-eval passes PyTorch's
        **others: Any,
    ):
        super().__init__()
        if unknown := [f"{name}={value}" for name, value in others.items() if value is not None]:
            known = "checkpoint, d, t, dtype and tokenizer"
            raise UserError(f"{', '.join(unknown)}: --model_args has {known} alone")
        if not isinstance(checkpoint, str):
            raise UserError(f"checkpoint={checkpoint} was read as a number: write ./ before it")
        if not all(type(n) is int and n > 0 for n in (d, t)):
            raise UserError(f"d={d},t={t}: they must be numbers of devices")
        if not str(batch_size).isdecimal() or not int(batch_size):
            raise UserError(f"--batch_size={batch_size}: it must be a number of texts")
        if dtype not in (None, *COMPUTE):
            raise UserError(f"dtype={dtype}: choose from {', '.join(COMPUTE)}")
        self.model = models.Model(os.path.expanduser(checkpoint), d, t, dtype)
        self.codec = self.model.tokenizer(os.path.expanduser(tokenizer or ""))
        self.batch_size = int(batch_size)
        self.seed = np.random.randint(2**31)  # lm-eval's --seed has seeded NumPy
        self.room = self.model.config.training.tokens.len
        self.eot_token_id = self.model.config.model.start_token

    @property
    def tokenizer_name(self) -> str:
        raise UserError("chat templates aren't applied: leave out --apply_chat_template")

    def set_cache_hook(self, cache_hook: Any) -> None:
        raise UserError("--use_cache: answers would be taken for any checkpoint's. Leave it out")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        encode = self.codec.encode if add_special_tokens is False else self.codec.prompt
        return encode(string, self.model.config)

    def cut(self, rows: list[list[int]], room: int) -> list[list[int]]:
        """Cuts rows on the left to fit, and says how many."""
        if long := sum(len(row) > room for row in rows):
            note = f"note: {long} of {len(rows)} texts are longer than a row in training, and cut"
            print(f"{note} on the left", file=sys.stderr)
        return [row[-room:] for row in rows]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Scores (name, context, answer). A row's last token is only a target, so one more fits."""
        results = [(0.0, False)] * len(requests)
        for name, _, answer in requests:
            if not 0 < len(answer) <= self.room:
                problem = f"{len(answer)} tokens to score, but a row has 1 to {self.room}"
                raise UserError(f"{problem}: ...{str(name)[-80:]}")
        rows = self.cut([context + answer for _, context, answer in requests], self.room + 1)
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))  # few lengths are compiled
        with self.model.computing():
            size = steps.padded(min(self.batch_size, max(1, len(rows))))
            for first in tqdm(range(0, len(rows), size), unit=" batches", disable=None):
                part = order[first : first + size]
                length = 1 + steps.round_up(len(rows[part[0]]) - 1)
                ids = np.full((size, length), NO_TOKEN, np.uint32)
                for row, i in enumerate(part):
                    ids[row, : len(rows[i])] = rows[i]
                batch = TokenBatch.of(ids, np.zeros(ids.shape, np.bool_), self.eot_token_id)
                found = steps.scores(self.model.weights, batch, self.model.config.model)
                nats, best = map(np.asarray, found)
                for row, i in enumerate(part):
                    end = len(rows[i]) - 1
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
        results = [""] * len(requests)
        groups = grouped(range(len(requests)), lambda i: json.dumps(requests[i].args[1]))
        for options, indices in groups.items():
            how, tokens, stops = self.sampling(json.loads(options))
            prompts = [self.tok_encode(requests[i].args[0]) for i in indices]
            prompts = self.cut(prompts, self.room - tokens)

            def ended(ids: list[int], stops: list[str] = stops) -> bool:
                text = self.codec.decode(ids)  # a stop string may name a special token
                return any(stop in text for stop in stops)

            with self.model.computing():
                given = prompts, indices, tokens, self.batch_size, how, ended, self.seed
                texts = steps.continued(self.model, *given)
                for i, ids in zip(indices, tqdm(texts, total=len(indices)), strict=True):
                    answer = self.codec.decode(ids, without_special=True)
                    cut = (answer.partition(stop)[0] for stop in stops)
                    results[i] = min(cut, key=len, default=answer)
        return results

    def sampling(self, options: dict[str, Any]) -> tuple[steps.Sampling, int, list[str]]:
        """Reads a task's generation_kwargs: how to sample, how many tokens, and stop strings."""
        given: dict[str, Any] = dict(normalize_gen_kwargs(options))
        heat, samples = given.pop("temperature", 1.0), given.pop("do_sample")
        tokens, stops = given.pop("max_gen_toks"), [stop for stop in given.pop("until") if stop]
        top_k, top_p = given.pop("top_k", None), given.pop("top_p", 1)
        if given.pop("num_beams", 1) != 1 or given:
            raise UserError(f"generation_kwargs: tools.generate can't do all of {options}")
        if not (type(top_p) in (int, float) and type(top_k) in (int, type(None))):
            raise UserError(f"generation_kwargs: top_k={top_k}, top_p={top_p} aren't numbers")
        if not 0 < tokens < self.room:
            room = f"a row of the training has {self.room} tokens for an answer and its context"
            cure = "set it in the task's generation_kwargs"
            raise UserError(f"max_gen_toks is {tokens}, but {room}: {cure}")
        ids = self.codec.ids, self.codec.ends
        how = steps.Sampling(heat if samples else 0, top_k or None, top_p, *ids)
        return how, tokens, stops


def main() -> None:
    with user_errors():
        if TemplateLM is object:
            raise UserError("this needs EleutherAI's lm-evaluation-harness: pip install lm-eval")
        sys.argv[1:1] = ["run", "--model=shardlight", "--batch_size=16"]
        cli_evaluate()


if __name__ == "__main__":
    main()
