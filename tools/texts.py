"""Text for tools.generate. Arrays and models are in tools/generate.py."""

import os
from collections.abc import Sequence

import numpy as np

from data import flat_tokens
from data.text import Tokenizer


class Text:
    """Converts between text and ids, with the tokenizer that the dataset was made with. The names
    of special tokens are parsed. Raises UserError or OSError if it can't be opened."""

    def __init__(self, name: str):
        self.tokenizer = Tokenizer(name)
        self.ids, self.ends, self.special = range(1, 257), set[int](), set[int]()
        if (slow := self.tokenizer.slow) is None:  # bytes
            return
        from transformers import GenerationConfig  # takes a second to import

        self.ids, ends = range(1 + max(slow.get_vocab().values())), [slow.eos_token_id]
        if os.path.isfile(f"{name}/generation_config.json"):
            more = GenerationConfig.from_pretrained(name).eos_token_id
            ends += more if isinstance(more, list) else [more]
        self.ends = {end for end in ends if isinstance(end, int)}  # ids that end a text
        self.special = {i for i, token in slow.added_tokens_decoder.items() if token.special}
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
        if self.tokenizer.slow is None:
            return len(ids)
        documents = np.split(ids, np.flatnonzero(is_start))
        parts = (np.asarray(document, np.uint32) for document in documents)
        texts = (self.tokenizer.decode(part, without_special=True) for part in parts)
        return sum(len(text.encode()) for text in texts)
