"""Converts texts to ids and back, and tells tokenizers apart."""

import array
import contextlib
import functools
import hashlib
import os
import re
from collections import Counter
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np
from jaxtyping import Int64, UInt32

from data.flat_tokens import TokenizerId, checked, decode, encode
from shardlib.errors import UserError

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"


def digest(value: Any) -> str:
    """Returns a short hash of a value's repr."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


# A text that normalizers change.
NORMALIZED = "  \uff21\uff11 \ufb01 e\u0301 \u00c9 12345 don't\r\n\t x  "


def same_vocabulary(one: str, other: str) -> bool:
    """Returns whether two records of `Tokenizer.vocabulary` may be of the same tokenizer. Earlier
    versions recorded only its first word; "" is unknown."""
    return all(x == y for x, y in zip(one.split(), other.split(), strict=False))


class Tokenizer:
    """Converts texts to encoded tokens (see flat_tokens.py) and back.

    `name` is bytes_utf8, a tokenizers JSON file, or a folder or hub repository that transformers
    opens. No special tokens are added, because the dataset's format marks where a document starts.
    `end_token` adds the end-of-text token after each document. The name of a special token within a
    text is tokenized as ordinary text. bytes_utf8 stores each byte as byte + 1, which leaves 0 for
    the start of a document. Raises UserError or OSError if the tokenizer can't be opened, or has no
    end-of-text token to add.
    """

    splits_special = True  # the names of special tokens in a text

    def __init__(self, name: str, end_token: bool = False):
        self.name = name
        self.slow = self._open()
        self.fast: Any = getattr(self.slow, "backend_tokenizer", None)  # if it has one, in Rust
        self.end = [getattr(self.slow, "eos_token_id", None)] if end_token else []
        if None in self.end:
            problem = f"the tokenizer {name} names no end-of-text token, which end_token=true needs"
            cure = "choose one whose tokenizer_config.json has an eos_token, or set end_token=false"
            raise UserError(f"{problem}; {cure}")
        if self.fast:  # called directly: transformers' wrapper costs a third of the speed
            # Our threads call it; its own would idle while units are read or written.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
            self.fast.no_truncation()
            self.fast.no_padding()
            if getattr(self.fast.model, "dropout", None):  # which makes ids random
                self.fast.model.dropout = None
            self.fast.encode_special_tokens = self.splits_special

    def _open(self) -> Any:
        """Returns transformers' tokenizer, or None for bytes."""
        if self.name == "bytes_utf8":
            return None
        import tokenizers
        import transformers  # takes a second to import; bytes_utf8 doesn't need it
        from transformers import PreTrainedTokenizerFast

        try:
            if self.name.endswith(".json"):
                inner = tokenizers.Tokenizer.from_file(self.name)
                return PreTrainedTokenizerFast(tokenizer_object=inner)
            if re.match(r"[./]|.*/.*/", self.name) and not os.path.exists(self.name):
                raise ValueError("there is no such folder, and names on the hub are OWNER/NAME")
            opened = transformers.AutoTokenizer.from_pretrained(self.name, trust_remote_code=False)
            if transformers.utils.has_file(self.name, "tokenizer.json"):
                # A family's class may replace parts of tokenizer.json, which changes ids.
                end, opened = opened.eos_token, PreTrainedTokenizerFast.from_pretrained(self.name)
                if opened.eos_token is None and end in opened.get_vocab():
                    opened.eos_token = end  # only the class names it
            return opened
        except Exception as error:  # tokenizers raises plain Exceptions
            problem = f"the tokenizer {self.name} can't be opened: {error}"
            folder = Path(self.name)
            alone = any(folder.glob("*.model")) and not (folder / "tokenizer.json").exists()
            if alone and not find_spec("sentencepiece"):
                problem = f"the tokenizer {self.name} needs a package: pip install sentencepiece"
            raise UserError(problem.split("\n")[0]) from None

    @checked
    def __call__(
        self, texts: list[str]
    ) -> tuple[UInt32[np.ndarray, " tokens"], Int64[np.ndarray, " documents"]]:
        """Returns the tokens of all documents, end to end, and the length of each in tokens."""
        kind, first = (np.uint8, 1) if self.name == "bytes_utf8" else (np.uint32, 0)
        parts = self._ids(texts)
        lengths = np.array([len(part) for part in parts], np.int64)
        ids = np.add(np.frombuffer(b"".join(parts), kind), np.uint16(first))
        return encode(ids, (np.cumsum(lengths) - lengths)[lengths > 0]), lengths

    def decode(self, given: Sequence[int] | np.ndarray, without_special: bool = False) -> str:
        """Returns the text of ids of a dataset, with or without the names of special tokens."""
        ids = np.array(given, np.uint32)
        if self.name == "bytes_utf8":
            return (ids - 1).astype(np.uint8).tobytes().decode(errors="replace")
        options = {"skip_special_tokens": without_special, "clean_up_tokenization_spaces": False}
        return str(self.slow.decode(ids.tolist(), **options))

    def lost(self, text: str) -> Counter[str]:
        """Counts the characters that a text's tokens don't give back."""
        return Counter(text) - Counter(self.decode(decode(self([text])[0])[0]))

    def mistaken(self) -> list[str]:
        """Lists the special tokens whose names in a text are tokenized as them. A model's own
        vocabulary may have these names, too, as Unigram's does."""
        added = self.slow.added_tokens_decoder.items() if self.slow else ()
        assert not self.end  # which each text would have
        special = {str(x): i for i, x in added if x.special}
        with contextlib.suppress(Exception):  # it has no token for a character, or for unknown ones
            unknown, *given = (decode(self([x])[0])[0] for x in ("\ue000", *special))
            named = zip(special.items(), given, strict=True)
            return [name for (name, i), ids in named if i in ids and i not in unknown]
        return []

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the tokenizer by its definition or, if it is in Python, its vocabulary."""
        if self.name == "bytes_utf8":
            return self.name
        does = self.fast.to_str() if self.fast else sorted(self.slow.get_vocab().items())
        return digest((does, self.end) if self.end else does)

    @functools.cached_property
    def vocabulary(self) -> str:
        """Identifies what the ids of ordinary text stand for, and how some texts are split."""
        words = self.words()
        return f"{digest(sorted(words.items()))} {digest(self.split(self.sample(words)))}"

    def sample(self, ids: Collection[int]) -> list[str]:
        """Returns texts of these ids' words, or of some. A tokenizer with the same words but other
        merges or another normalizer may split them differently."""
        chosen = np.array(sorted(ids)[:: max(1, len(ids) // 4096)], np.uint32)
        return [*map(self.decode, np.array_split(chosen, max(1, len(chosen) // 64))), NORMALIZED]

    def split(self, texts: list[str]) -> list[list[int]]:
        """Returns each text's ids; none if there is no id for a part of it."""
        assert not self.end  # which each text would have
        found = []
        for text in texts:
            found.append(list[int]())
            with contextlib.suppress(Exception):  # tokenizers raises plain Exceptions
                found[-1] = decode(self([text])[0])[0].tolist()
        return found

    def check_unchanged(self, named: TokenizerId) -> Self:
        """Returns itself. Raises UserError if it has changed since it was recorded."""
        if named.vocabulary and not same_vocabulary(named.vocabulary, self.vocabulary):
            problem = f"the tokenizer {self.name} has changed since the data was tokenized with it"
            raise UserError(f"{problem}: restore it, or name a copy of the earlier one")
        return self

    def words(self) -> dict[int, str]:
        """Returns the tokens of ordinary text by their ids."""
        if self.name == "bytes_utf8":
            return {byte + 1: f"<0x{byte:02X}>" for byte in range(256)}
        added = self.slow.added_tokens_decoder
        return {i: token for token, i in self.slow.get_vocab().items() if i not in added}

    def _ids(self, texts: list[str]) -> list[Any]:
        """Returns each text's bytes, or a uint32 array of its ids."""
        if self.name == "bytes_utf8":
            return [text.encode() for text in texts]
        if not self.fast:
            how = {"add_special_tokens": False, "split_special_tokens": self.splits_special}
            lists = self.slow(texts, verbose=False, **how)["input_ids"]
        else:
            encoded = self.fast.encode_batch_fast(texts, add_special_tokens=False)
            lists = (part.ids for part in encoded)
        # Converts one list at a time: Python integers take ten times the memory of their values.
        parts = [array.array("I", part) for part in lists]
        for part in filter(None, parts):  # an empty document stays empty
            part.extend(self.end)
        return parts


open_tokenizer = functools.cache(Tokenizer)  # shared by the threads of a process


def difference(one: TokenizerId, other: TokenizerId) -> str:
    """Says how two tokenizers differ, or returns "" if each id that is ordinary text in both is the
    same text, and both split texts of these alike. Two names also differ if either tokenizer can't
    be opened."""
    known = one.vocabulary and other.vocabulary
    if same_vocabulary(one.vocabulary, other.vocabulary) if known else one.name == other.name:
        return ""
    try:
        a, b = (open_tokenizer(x.name).check_unchanged(x) for x in (one, other))
    except UserError as error:
        return str(error).rstrip(".")
    words, others = a.words(), b.words()
    common = words.keys() & others.keys()
    first = min((i for i in common if words[i] != others[i]), default=None)
    if first is not None:
        return f"id {first} is {words[first]!r} for the first, {others[first]!r} for the second"
    texts = a.sample(common)
    for x, y in zip(a.split(texts), b.split(texts), strict=True):
        # An added token, such as one for tools, may stand for a part of a text.
        if x != y and {*x} <= words.keys() and {*y} <= others.keys():
            return "they split the same text differently"
    return ""


def extends(one: TokenizerId, other: TokenizerId) -> bool:
    """Returns whether a tokenizer has all of another's tokens, and more. False if it has changed or
    can't be opened."""
    with contextlib.suppress(UserError):
        more, fewer = (open_tokenizer(x.name).check_unchanged(x).slow for x in (one, other))
        if more is not None and fewer is not None:
            return bool(more.get_vocab().items() > fewer.get_vocab().items())
    return False


def problem_of_start(used: Tokenizer, start: int) -> str:
    """Says why a tokenizer doesn't suit a model whose documents begin with the id `start`: it puts
    another id first, or it puts none first and `start` is an ordinary word. Else returns ""."""
    slow, word, first = used.slow, used.words().get(start), None
    if slow is not None:
        ids, alone = slow("a")["input_ids"], slow("a", add_special_tokens=False)["input_ids"]
        first = slow.bos_token_id if ids[:1] == alone[:1] else ids[0]
    if first == start or (first is None and word is None):
        return ""
    problem = "isn't the start token of" if word is None else f"is the word {word!r} of"
    own = first is not None and f", whose own is {first}, {slow.convert_ids_to_tokens(first)!r}"
    return f"model.start_token={start} {problem} the tokenizer {used.name}{own or ''}"
