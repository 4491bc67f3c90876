"""Makes a dataset of real text without a network: sources and documentation of this Python's
installed packages, in random order, tokenized by a BPE trained on them.

    python -m benchmarks.packages packages.zarr
    python -m train --config-name=packages_a100x1_84m flat_tokens.filespec=packages.zarr \
        paths.model_name=84m

Writes packages.zarr, and the tokenizer to packages.json.
"""

import hashlib
import itertools
import pathlib
import sysconfig

import tokenizers

from runtime.config import within
from runtime.errors import user_errors
from tools import arguments
from tools.huggingface_to_flat_tokens import ConvertConfig, convert

VOCAB = 32768
SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt"}
FROM, TO = 100, 300_000  # bytes in a file: larger ones are tables
SAMPLE = 3_000  # files, from which the tokenizer is learned


def texts(root: pathlib.Path) -> list[str]:
    """Returns the files of text below a folder, in the order of their hashes, each text once."""
    files: dict[bytes, str] = {}
    for file in sorted(root.rglob("*")):
        if file.suffix in SUFFIXES and file.is_file() and FROM <= file.stat().st_size <= TO:
            content = file.read_bytes()
            try:
                content.decode()
            except UnicodeDecodeError:
                continue
            files.setdefault(hashlib.sha256(content).digest(), str(file))
    return [file for _, file in sorted(files.items())]


def main() -> None:
    parser = arguments.parser("benchmarks.packages", __doc__)
    parser.add_argument("output", help="the dataset to write; must not exist")
    parser.add_argument("--max-tokens", type=within(int, 1), default=50_000_000)
    parser.add_argument(
        "--root", default=sysconfig.get_path("purelib"), help="a folder of packages"
    )
    with user_errors():
        args = parser.parse_args()
        files = texts(pathlib.Path(args.root))
        tokenizer = str(pathlib.Path(args.output).with_suffix(".json"))
        bpe = tokenizers.ByteLevelBPETokenizer()
        sample = map(pathlib.Path.read_text, map(pathlib.Path, itertools.islice(files, SAMPLE)))
        bpe.train_from_iterator(sample, VOCAB, special_tokens=["<unk>", "<s>"])  # <s> has id 1
        bpe.save(tokenizer)
        load = {"path": "text", "data_files": files, "sample_by": "document"}
        convert(ConvertConfig(
            load_dataset=load, column="text", tokenizer=tokenizer, output=args.output,
            train_split="train", validation_split=None, validation_share=0.01,
            max_tokens=args.max_tokens,
        ))  # fmt: skip


if __name__ == "__main__":
    main()
