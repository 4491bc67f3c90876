"""Text for tools.generate: prompts, and where a text ends. Arrays and models are in
tools/generate.py."""

import json
import pathlib
from collections.abc import Sequence

import numpy as np

from data import flat_tokens
from data.text import Tokenizer
from shardlib.errors import UserError


def prompts_in(path: str) -> dict[str, str]:
    """Returns the prompts in a file by the names of their lines: JSON strings if the file's name
    ends in .jsonl, else plain text. Raises UserError or OSError if it can't be read."""
    try:
        text = pathlib.Path(path).read_text("utf-8-sig")  # without a byte order mark
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text") from None
    if not text:
        raise UserError(f"{path} has no prompts")
    lines = text.removesuffix("\n").split("\n")
    prompts = {f"{path}, line {number}": line for number, line in enumerate(lines, 1)}
    for name, line in prompts.items() if path.endswith(".jsonl") else ():
        try:
            prompts[name] = json.loads(line)
            prompts[name].encode()
        except (ValueError, RecursionError, AttributeError):  # half a surrogate pair is no text
            raise UserError(f"{name} is not a JSON string") from None
    return prompts


class Text:
    """Converts between text and ids, with the tokenizer that the dataset was made with."""

    def __init__(self, name: str):
        self.tokenizer = Tokenizer(name)
        self.is_bytes = name == "bytes_utf8"
        # A vocabulary may have gaps, so that ids are beyond its length.
        last = 256 if self.is_bytes else max(self.tokenizer.slow.get_vocab().values())
        self.ids = range(int(self.is_bytes), last + 1)
        ends = [] if self.is_bytes else [self.tokenizer.slow.eos_token_id]
        settings = pathlib.Path(name, "generation_config.json")
        if settings.is_file():
            try:
                more = json.loads(settings.read_text()).get("eos_token_id")
            except (ValueError, AttributeError):
                raise UserError(f"{settings} is not a JSON object") from None
            ends += more if isinstance(more, list) else [more]
        self.ends = {end for end in ends if isinstance(end, int)}  # ids that end a text
        added = {} if self.is_bytes else self.tokenizer.slow.added_tokens_decoder
        self.special = {i for i, token in added.items() if token.special}

    def parse_special_tokens(self) -> None:
        """Makes `encode` turn the names of special tokens into these tokens."""
        if self.is_bytes:
            raise UserError("--special-tokens: the tokenizer bytes_utf8 has none")
        if self.tokenizer.fast:  # one written in Python does so anyway
            self.tokenizer.fast.encode_special_tokens = False

    def encode(self, prompt: str) -> list[int]:
        stored, _ = self.tokenizer([prompt])
        return flat_tokens.decode(stored)[0].tolist()

    def started(self, ids: list[int], start: int) -> list[int]:
        """Returns ids after the start token, unless they begin with it as a special token."""
        return ids if ids[:1] == [start] and start in self.special else [start, *ids]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.tokenizer.decode(np.array(ids, np.uint32))

    def count_bytes(self, ids: np.ndarray, is_start: np.ndarray) -> int:
        """Counts the UTF-8 bytes of the decoded documents, without special tokens. If tokens aren't
        bytes, a character cut off at either end counts as the three bytes of a replacement
        character."""
        if self.is_bytes:
            return len(ids)
        documents = np.split(ids, np.flatnonzero(is_start))
        parts = (np.asarray(document, np.uint32) for document in documents)
        texts = (self.tokenizer.decode(part, without_special=True) for part in parts)
        return sum(len(text.encode()) for text in texts)


class Continued:
    """A prompt and the new ids that follow it, up to an end-of-text id."""

    def __init__(self, codec: Text, prompt: list[int], sample: int):
        self.codec, self.prompt, self.sample = codec, prompt, sample
        self.new: list[int] = []
        self.ended = False
        self.shown = 0  # characters

    def add(self, new: int) -> None:
        """Adds an id, unless the text has ended or ends here."""
        self.ended = self.ended or new in self.codec.ends
        if not self.ended:
            self.new.append(new)

    def news(self) -> str:
        """Returns the part of the text that earlier calls didn't return. Until the text has ended,
        leaves out an incomplete character, which the next ids may change."""
        text, before = self.codec.decode(self.prompt + self.new), self.shown
        if not self.ended:
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        self.shown = max(before, len(text))
        return text[before:]
