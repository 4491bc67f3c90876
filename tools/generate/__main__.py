"""Generates text from a checkpoint's model, or measures how well the model predicts a dataset.

    python -m tools.generate runs/stdlib --prompt 'import os' --tokens 300
    python -m tools.generate runs/stdlib --prompts prompts.txt --samples 4
    python -m tools.generate runs/stdlib --evaluate stdlib.zarr

The model is the one in the checkpoint's config. Only the weights are read.

Text. The model gets its start token and the prompt, then generates one token per step with a cache
of keys and values. A prompt that already begins with the start token, as a special token, gets no
second one. A token attends to at most as many tokens as a row had in training, so a text may be
longer than a row. A text ends after --tokens, or at an end-of-text id: the tokenizer's, or one in a
config.json or generation_config.json beside the tokenizer or of the imported model. A model learns
to emit one from datasets made with end_token=true. The tokenizer bytes_utf8 has no end-of-text id.

Prompts. --prompts FILE continues each line of a file, --batch lines at a time. A text doesn't
depend on the other prompts: it is the one that --prompt would give. A repeated line gets further
samples, as with --samples. The names of special tokens in a prompt are parsed.

Sampling. --temperature divides the logits. Then --top-k keeps the likeliest tokens, and --top-p
the likeliest of these, up to this probability in total.

Mesh. The weights are cast to --dtype and gathered over d once, so each device holds 1/t: raise --t
if the model is too large for one device, and --d to generate many samples. t must divide the number
of key-value heads (model.n_kv), model.d_ff, model.vocab and the number of experts; d * t must
divide model.d_model. Any such mesh will do, whatever mesh the model was trained on. If d doesn't
divide the batch, it is padded. The same seed gives the same text on any mesh, up to rounding.

Evaluation. Packs the validation split's tokens, in order, into rows of the training's length.
Attention doesn't cross documents. "Nats per token" is the mean loss over all tokens. "Bits per
byte" is the summed loss / ln 2, divided by the number of UTF-8 bytes of the decoded text. The model
is told where documents start, and predicts where they end only in datasets made with
end_token=true: elsewhere boundaries cost no bits. As in training, the first tokens of a row don't
see the row before, so longer rows get lower losses. --length sets another length of the rows.
"""

import argparse
import collections
import itertools
import math
import pathlib
import sys
from collections.abc import Iterator

import jax
import numpy as np
from tqdm import tqdm

from data import flat_tokens
from data.loader import TokenBatch, rows_of
from data.sources import check_same_tokenizer
from data.tokenizer import open_tokenizer, same_vocabulary
from runtime.config import within
from runtime.errors import user_errors
from shardlib.errors import UserError
from shardlib.types import COMPUTE
from tools import arguments
from tools.generate.model import Model, Text, check_ids
from tools.generate.steps import Sampling, continued, padded, round_up, scores


def evaluate(
    model: Model,
    codec: Text | None,
    data: flat_tokens.FlatTokens,
    length: int,
    batches: int | None,
    rows: int | None = None,
) -> str:
    """Returns a line on how well the model predicts a split, or its first `batches`, in batches of
    `rows` of `length`; by default they have about as many tokens as in training. Raises UserError
    if the model lacks an id of the data."""
    config, tokens = model.config, model.config.training.tokens
    check_ids(data.name, data.max_token_id, config.model)
    length = min(length, round_up(data.token_count))
    rows = rows or max(1, tokens.batch * tokens.len // length)
    rows = padded(min(rows, -(-data.token_count // length)))
    size, nats = rows * length, 0.0
    for first in tqdm(range(0, data.token_count, size)[:batches], unit=" batches", disable=None):
        last = min(first + size, data.token_count)
        encoded, fill = data.read_encoded(max(first - 1, 0), last), first + size - last
        encoded = np.pad(encoded, (first == 0, fill), constant_values=flat_tokens.FILL)
        ids = flat_tokens.decode(rows_of(encoded, length))
        batch = TokenBatch.of(*ids, config.model.start_token)
        likelihoods = np.asarray(scores(model.weights, batch, config.model)[0], np.float64)
        nats -= likelihoods[batch.loss_mask].sum()
    bits = "bits per byte: name a --tokenizer to compute them"
    used = flat_tokens.tokenizer_of(data.path)
    if used and used.vocabulary and not data.bytes_per_token:
        codec, bits = None, "no bits per byte, as its tokenizer loses a part of a text"
    # In parts larger than rows: characters that are cut at the ends of parts are miscounted.
    parts = (data.read(i, min(i + 2**20, last)) for i in range(0, last, 2**20))
    if codec and (size_of_text := sum(codec.count_bytes(*part) for part in parts)):
        bits = f"{nats / math.log(2) / size_of_text:.4f} bits per byte"
    loss = nats / last
    perplexity = math.inf if loss > 709 else math.exp(loss)  # exp raises above it
    found = f"{loss:.4f} nats per token, perplexity {perplexity:.4g}, {bits}"
    return f"{data.name}, {last:,} tokens: {found}"


def write(args: argparse.Namespace, model: Model, codec: Text) -> None:
    """Prints the texts, a single one as it is generated. Raises UserError or OSError if the prompts
    can't be read, or if the model lacks one of their ids."""
    texts, shown = [args.prompt or ""], 0
    if args.prompts:
        whole = pathlib.Path(args.prompts).read_bytes().decode("utf-8-sig", "surrogateescape")
        texts = [x.removesuffix("\r") for x in whole.removesuffix("\n").split("\n")]
    texts = [text for text in texts for _ in range(args.samples)]
    prompts = [codec.prompt(text, model.config) for text in texts]
    counts = collections.defaultdict[str, Iterator[int]](itertools.count)
    numbers = [next(counts[text]) for text in texts]

    def show(new: list[int]) -> bool:
        nonlocal shown
        if len(texts) == 1:  # without an incomplete character, which the next ids may change
            text = codec.decode(prompts[0][1:] + new).rstrip("\N{REPLACEMENT CHARACTER}")
            print(text[shown:], end="", flush=True)
            shown = max(shown, len(text))
        return False

    how = Sampling(args.temperature, args.top_k, args.top_p, codec.ids, codec.ends)
    given = prompts, numbers, args.tokens, args.batch or 16, how, show, args.seed
    made = continued(model, *given)
    for number, (prompt, new) in enumerate(zip(prompts, made, strict=True)):
        if len(texts) > 1:
            line, sample = divmod(number, args.samples)
            print(f"--- prompt {line + 1}, sample {sample + 1}")
        print(codec.decode(prompt[1:] + new)[shown:])  # without the start token


def run(args: argparse.Namespace) -> None:
    """Runs the program. Raises UserError or OSError for a user's mistake."""
    model = Model(args.checkpoint, args.d, args.t, args.dtype)
    if not (args.dtype or args.evaluate) and jax.default_backend() == "cpu":
        model.dtype = "f32"  # else CPUs would widen all weights at every token
    checkpoint, named = model.checkpoints.newest, args.tokenizer
    with model.computing():
        if args.evaluate:
            if used := flat_tokens.tokenizer_of(args.evaluate):
                if not named:
                    check_same_tokenizer(checkpoint, used, f"--tokenizer={used.name}")
                opened = open_tokenizer(named or used.name)
                other = named not in (None, used.name)
                if other and not same_vocabulary(used.vocabulary, opened.vocabulary):
                    raise UserError(f"{args.evaluate} was tokenized with {used.name}, not {named}")
                named = opened.check_unchanged(used).name
            codec = Text(named) if named else None
            data = flat_tokens.FlatTokens(args.evaluate, "validation")
            length = args.length or model.config.training.tokens.len
            print(evaluate(model, codec, data, length, args.batches, args.batch))
        else:
            write(args, model, model.tokenizer(named))
    print(f"checkpoint: {checkpoint.path}", file=sys.stderr)


def main() -> None:
    parser = arguments.parser("tools.generate", __doc__)
    add = parser.add_argument
    add("checkpoint", help="a checkpoint, or a folder or bucket whose newest one is used")
    add("--d", type=within(int, 1), default=1, help="devices that share the batch")
    add("--t", type=within(int, 1), default=1, help="devices that share the weights")
    add("--dtype", choices=COMPUTE, help="default: the run's, but f32 for texts on CPUs")
    add("--tokenizer", help="bytes_utf8 or transformers'; default: the one that the dataset names")
    count, number, part = within(int, 1, 10**6), within(int, 0), within(float, 0, 1)
    add(
        "--batch", type=count, help="texts or rows at a time; default: 16, or the training's tokens"
    )
    add = parser.add_mutually_exclusive_group().add_argument
    add("--prompt", type=str, help="beginning of the text; default: the start of a document")
    add("--prompts", metavar="FILE", help="generate from each line of a file")
    add("--evaluate", metavar="DATASET", help="print the loss on its validation split instead")
    add = parser.add_argument_group("texts").add_argument
    add("--tokens", type=count, default=128, help="tokens to generate; default: %(default)s")
    add("--samples", type=count, default=1, help="texts for each prompt; default: %(default)s")
    heat = within(float, 0, math.inf)
    add("--temperature", type=heat, default=0.8, help="default: %(default)s; 0: greedy")
    add("--top-k", type=count, help="sample from this many of the likeliest tokens; default: all")
    add("--top-p", type=part, default=1.0, help="sample from this much probability")
    add("--seed", type=number, default=0, help="seed of the samples; default: %(default)s")
    add = parser.add_argument_group("evaluation").add_argument
    add("--length", type=count, help="rows of this many tokens; default: the training's")
    add("--batches", type=count, help="evaluate this many batches of the split; default: all")
    args = parser.parse_args()
    if (args.length or args.batches) and not args.evaluate:
        parser.error("--length and --batches need --evaluate")
    of_texts = "tokens", "samples", "temperature", "top_k", "top_p", "seed"
    if args.evaluate and any(getattr(args, x) != parser.get_default(x) for x in of_texts):
        given = ", ".join(f"--{x.replace('_', '-')}" for x in of_texts)
        parser.error(f"--evaluate generates no text: leave out {given}")
    with user_errors():
        run(args)


if __name__ == "__main__":
    main()
