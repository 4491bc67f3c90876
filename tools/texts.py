"""Text for tools.generate: prompts, chat templates, and where a text ends. Arrays and models are in
tools/generate.py."""

import json
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from data import flat_tokens
from data.text import Tokenizer
from shardlib.errors import UserError


def kept_by_import(checkpoint: str, cloned_from: str) -> str | None:
    """Returns the folder in which tools.huggingface_weights kept the tokenizer and settings of the
    imported model that a checkpoint is, or that its run started from; None if there is none."""
    for place in (os.path.dirname(checkpoint), cloned_from, os.path.dirname(cloned_from)):
        if os.path.isfile(folder := os.path.join(place, "huggingface", "config.json")):
            return os.path.dirname(folder)
    return None


def prompts_in(path: str) -> dict[str, str]:
    """Returns the prompts in a file by the names of their lines: JSON strings if the file's name
    ends in .jsonl, else plain text. Raises UserError or OSError if it can't be read."""
    try:
        text = pathlib.Path(path).read_text("utf-8")
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
        self.ids = range(1, 257) if self.is_bytes else range(len(self.tokenizer.slow))
        ends = [] if self.is_bytes else [self.tokenizer.slow.eos_token_id]
        settings = pathlib.Path(name, "generation_config.json")
        if settings.is_file():
            try:
                more = json.loads(settings.read_text()).get("eos_token_id")
            except (ValueError, AttributeError):
                raise UserError(f"{settings} is not a JSON object") from None
            ends += more if isinstance(more, list) else [more]
        self.ends = {end for end in ends if isinstance(end, int)}  # ids that end a text

    def parse_special_tokens(self) -> None:
        """Makes `encode` turn the names of special tokens into these tokens."""
        if self.is_bytes:
            raise UserError("--special-tokens: the tokenizer bytes_utf8 has none")
        if self.tokenizer.fast:  # one written in Python does so anyway
            self.tokenizer.fast.encode_special_tokens = False

    def start_chat(self) -> None:
        """Prepares for `chat`: a text then also ends where the template ends an answer. Raises
        UserError if there is no template."""
        if self.is_bytes or not self.tokenizer.slow.chat_template:
            raise UserError(
                f"--chat: the tokenizer {self.tokenizer.name} has no chat template; name a "
                "--tokenizer that has one, or write a --prompt for --special-tokens"
            )
        self.parse_special_tokens()
        roles = {"user": "question", "assistant": "answer"}
        example = [{"role": role, "content": content} for role, content in roles.items()]
        after = self.encode(self._render(example).rpartition("answer")[2].strip())
        self.ends |= {*after[:1]} & self.tokenizer.slow.added_tokens_decoder.keys()

    def chat(self, messages: list[dict[str, str]], start_token: int) -> list[int]:
        """Returns the prompt for the next answer in a conversation, without a start token, which
        generation puts in front."""
        ids = self.encode(self._render(messages, add_generation_prompt=True))
        return ids[1:] if ids[:1] == [self.tokenizer.slow.bos_token_id] == [start_token] else ids

    def _render(self, messages: list[dict[str, str]], **options: bool) -> str:
        try:
            slow = self.tokenizer.slow
            return str(slow.apply_chat_template(messages, tokenize=False, **options))
        except Exception as error:  # a template is a program, and may raise anything
            name = self.tokenizer.name
            raise UserError(f"--chat: the chat template of {name} fails: {error}") from None

    def encode(self, prompt: str) -> list[int]:
        import pyarrow

        stored, _ = self.tokenizer(pyarrow.chunked_array([[prompt]]))
        return flat_tokens.decode(stored)[0].tolist()

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

    def __init__(self, codec: Text, prompt: list[int], sample: int, hides_prompt: bool):
        self.codec, self.prompt, self.sample = codec, prompt, sample
        self.new: list[int] = []
        self.ended = False
        self.begin = len(codec.decode(prompt))  # of what follows, in characters
        self.shown = self.begin if hides_prompt else 0

    def add(self, new: int) -> None:
        """Adds an id, unless the text has ended or ends here."""
        self.ended = self.ended or new in self.codec.ends
        if not self.ended:
            self.new.append(new)

    def read(self) -> str:
        """Returns the text. Until it has ended, leaves out an incomplete character, which the next
        ids may change."""
        text = self.codec.decode(self.prompt + self.new)
        return text if self.ended else text.rstrip("\N{REPLACEMENT CHARACTER}")

    def news(self) -> str:
        """Returns the part of the text that earlier calls didn't return."""
        text, before = self.read(), self.shown
        self.shown = max(before, len(text))
        return text[before:]
