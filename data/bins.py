"""Memory-maps the `.bin` files of nanoGPT and llm.c.

A path names a file, a pattern such as `shards/train_*.bin`, or a folder. Several files are one
dataset, ordered by name. docs/flat_tokens.md describes the files.
"""

import functools
import glob
import os
import re

import numpy as np
from jaxtyping import UInt32

from data.flat_tokens import CHUNK, MAX_ID, FlatTokensError, checked, encode, scan
from data.tokenizer import digest

HEADERS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}  # llm.c's magic numbers and versions

# How files of other kinds begin.
OTHERS = {
    b"\x93NUMPY": "it is NumPy's .npy: write np.load(old).tofile(new)",
    b"LITPKDS": "it is lit-gpt's, with a header and padding: tokenize its text again",
    b"version https://git-lfs": "it is a pointer of Git LFS: get the file with git lfs pull",
}


def bin_files(path: str) -> list[str]:
    """Returns the `.bin` files that a path names, sorted; none if it names a zarr dataset."""
    if os.path.exists(f"{path}/zarr.json"):
        return []
    if os.path.isdir(path):
        return sorted(glob.glob(f"{glob.escape(path)}/*.bin"))
    if not path.endswith(".bin"):
        return []
    found = sorted(glob.glob(path, recursive=True))
    return [path] if os.path.exists(path) else found or [path]


def mapped(file: str, kind: str) -> np.ndarray:
    """Returns a file's ids, of type `kind` unless its header names another. Raises ValueError if
    the file is cut off, empty or Megatron-LM's, or if its ids look like another type."""
    if "://" in file:
        cure = "copy it, or convert a copy with tools.bins to zarr, which may be in a bucket"
        raise ValueError(f".bin files are read from local disks only: {cure}")
    whole, header, begin = os.path.getsize(file), np.fromfile(file, "<i4", 256), 0
    for magic, problem in OTHERS.items():
        if header.tobytes().startswith(magic):
            raise ValueError(problem)
    if os.path.exists(file.removesuffix("bin") + "idx"):
        raise ValueError("it is Megatron-LM's, with an .idx file: convert it with tools.bins")
    if len(header) == 256 and not header[3:].any():  # no text has id 0 506 times in a row
        magic, version, count = header[:3].tolist()
        if (magic, version) not in HEADERS:
            raise ValueError(f"its header has {magic} and {version}, none of {[*HEADERS]}")
        kind, begin = HEADERS[magic, version], header.nbytes
    else:
        low, high = (header.view("<u2")[i::2].max(initial=0) for i in (0, 1))
        # Assumes 32-bit ids below 2^20: their upper halves are below 16.
        other = "uint16" if high >= 16 else kind
        if len(header) == 256:  # a shorter file says too little
            raw = header.view("u1")
            if high == 0 or high < 16 <= low:  # all ids may be small
                other = "uint32"
            if not header[1::2].any():
                other = "int64"
            # 16-bit ids would have few upper bytes, or some large lower bytes.
            if raw.max() < 127 and min(len(np.unique(raw[i::2])) for i in (0, 1)) > 8:
                other = "uint8 or text"
        cure = f"set flat_tokens.bin_dtype={other}"
        if other == "uint8 or text":
            cure = "convert text with tools.huggingface_to_flat_tokens, or write ids as uint16"
        elif other == "int64":
            new = "np.fromfile(old, np.int64).astype(np.uint32).tofile(new)"
            cure = f"write them as uint32, by {new}, and set flat_tokens.bin_dtype=uint32"
        if other != kind:
            raise ValueError(f"its ids look like {other}: {cure}")
        count = -(-whole // np.dtype(kind).itemsize)
    size, width = whole - begin, np.dtype(kind).itemsize
    if size != count * width or not count:
        raise ValueError(f"{size:,} bytes aren't {count:,} ids of {width} bytes: was it cut off?")
    return np.asarray(np.memmap(file, kind, "r", begin))


# In the name of a file.
FOR_VALIDATION = r"(?<![a-z])(e?val(id\w*|uation)?|tests?|dev|held_?out|holdout)(?![a-z])"


def check_one_split(path: str, files: list[str]) -> None:
    """Raises FlatTokensError if some of these files are for training, and others for validation."""
    others = [file for name in files if "train" not in (file := os.path.basename(name))]
    if len(others) < len(files) and re.search(FOR_VALIDATION, str(others)):
        raise FlatTokensError(f"{path} has files for validation, too: choose 'x/*train*.bin'")


class Bins:
    """The ids of `.bin` files, where a document starts after each `end_token`. A loader packs rows
    from it as from FlatTokens, by attributes that both have.

    Raises FlatTokensError for a file that can't be read or is malformed. No file records its
    largest id, so `read_encoded` raises FlatTokensError for an id of `vocab` or more.
    """

    bytes_per_token = 0.0  # unknown
    validate = scan

    def __init__(self, path: str, end_token: int | None, kind: str, vocab: int = MAX_ID + 1):
        self.name, self.max_token_id = path, vocab - 1
        self.end_token = -1 if end_token is None else end_token
        self.parts, self.firsts, self.files = list[np.ndarray](), [0], list[str]()
        for file in bin_files(path):
            try:
                self.parts.append(ids := mapped(file, kind))
            except (OSError, ValueError) as error:
                problem = getattr(error, "strerror", None) or error
                raise FlatTokensError(f"{file} can't be read: {problem}") from None
            self.firsts.append(self.firsts[-1] + len(ids))
            self.files.append(f"{os.path.basename(file)}, {len(ids):,} ids of {ids.dtype}")
        check_one_split(path, self.files)
        self.token_count, self.rows_from = self.firsts[-1], digest(self.files)

    @functools.cached_property
    def ended(self) -> bool:
        """True if no end token is given, or if a document ends with it."""
        blocks = (ids[i : i + CHUNK] for ids in self.parts for i in range(0, len(ids), CHUNK))
        return self.end_token < 0 or any(self.end_token in block for block in blocks)

    @checked
    def read_encoded(self, start: int, stop: int) -> UInt32[np.ndarray, " {stop-start}"]:
        before = max(start - 1, 0)  # a document may end there
        first, last = np.searchsorted(self.firsts, (before + 1, stop)) - (1, 0)
        parts = zip(self.firsts[first:last], self.parts[first:last], strict=True)
        ids = np.concatenate([ids[max(before - at, 0) : stop - at] for at, ids in parts])
        if ids.max() > self.max_token_id:
            token = int(np.argmax(ids > self.max_token_id))
            problem = f"token {before + token} is {ids[token]}; model.vocab={self.max_token_id + 1}"
            raise FlatTokensError(f"{self.name}: {problem} must be larger")
        starts = np.flatnonzero(ids[:-1] == self.end_token) + 1 + before - start
        return encode(ids[start - before :], np.append(starts, [0] * (start == 0)).astype(np.intp))


def check_end_token(several: list[Bins]) -> None:
    """Raises FlatTokensError if no document of any of them ends with their end token."""
    if several and not any(bins.ended for bins in several):
        names = " and ".join(bins.name for bins in several)
        cure = "choose the id that ends documents, or leave the end token out"
        raise FlatTokensError(f"no id in {names} is end_token={several[0].end_token}: {cure}")
