"""The converter, through `datasets` and `transformers`, on local files."""

import json
import subprocess
import sys

import numpy as np
import pytest

from data.flat_tokens import FlatTokens
from tests.helpers import ROOT
from tools.huggingface_to_flat_tokens import python_stdlib


def convert(*overrides):
    command = [sys.executable, "-m", "tools.huggingface_to_flat_tokens", *overrides]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def documents(path, split):
    dataset = FlatTokens(str(path), split)
    dataset.validate()
    ids, _ = dataset.read(0, dataset.token_count)
    return [part.tolist() for part in np.split(ids, dataset.seq_starts[1:-1].astype(int))]


TEXTS = [f"document {i}! naïve ☃ {'x' * i}\nend" for i in range(10)]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in [*TEXTS, ""]))
    return path


def arguments(jsonl, output):
    return [
        "--config-name=python_stdlib",
        "load_dataset.path=json",
        f"load_dataset.data_files={jsonl}",
        "~load_dataset.sample_by",
        "column=body",
        "validation_share=0.2",
        f"output={output}",
    ]


def test_bytes_of_each_document(jsonl, tmp_path):
    done = convert(*arguments(jsonl, tmp_path / "x.zarr"))
    assert done.returncode == 0, done.stderr
    decoded = {
        split: [bytes(i - 1 for i in ids).decode() for ids in documents(tmp_path / "x.zarr", split)]
        for split in ("train", "validation")
    }
    assert decoded["validation"] == [TEXTS[4], TEXTS[9]]
    assert decoded["train"] == [text for i, text in enumerate(TEXTS) if i not in (4, 9)]
    assert "left out: 1 empty documents" in done.stdout


@pytest.mark.parametrize("special", [["<unused>", "<s>"], []], ids=["id 0 free", "id 0 in use"])
def test_a_tokenizer_that_transformers_opens(jsonl, tmp_path, special):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[1] if special else None
    ).save_pretrained(tmp_path / "tokenizer")
    wanted = [*arguments(jsonl, tmp_path / "x.zarr"), f"tokenizer={tmp_path / 'tokenizer'}"]
    offset = 0 if special else 1
    if offset:
        done = convert(*wanted)
        assert "set id_offset=1" in done.stderr and done.stderr.count("error:") == 1
    done = convert(*wanted, f"id_offset={offset}")  # replaces what the failed try left
    assert done.returncode == 0, done.stderr
    found = documents(tmp_path / "x.zarr", "train") + documents(tmp_path / "x.zarr", "validation")
    found = [[i - offset for i in ids] for ids in found]
    assert sorted(tokenizer.decode(ids) for ids in found) == sorted(TEXTS)
    assert not special or all(1 not in ids for ids in found), "no special tokens"
    assert sum(map(len, found)) < sum(len(text.encode()) for text in TEXTS)


def test_a_missing_output_and_an_existing_one(jsonl, tmp_path):
    wanted = arguments(jsonl, tmp_path / "x.zarr")
    assert convert(*wanted).returncode == 0
    before = documents(tmp_path / "x.zarr", "train")
    for overrides, message in (wanted, "has a split train already"), (wanted[:-1], "output"):
        done = convert(*overrides)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
        assert message in done.stderr
    assert documents(tmp_path / "x.zarr", "train") == before


MISTAKES = {
    "column=nothing": "the columns are body: str",
    "validation_share=2": "validation_share=2",
    "train_split=missing": "missing",
    "+load_dataset.nonsense=1": "nonsense",
    "+speed=fast": "speed",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_message_and_leaves_nothing(jsonl, tmp_path, mistake):
    done = convert(*arguments(jsonl, tmp_path / "x.zarr"), mistake)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert MISTAKES[mistake] in done.stderr
    assert not (tmp_path / "x.zarr").exists()


def test_the_standard_library_is_its_sources_without_tests():
    files = python_stdlib()
    assert files == sorted(files)
    assert 500 < len(files) < 1500
    assert any(file.endswith("/argparse.py") for file in files)
    assert not any("/test/" in file or "site-packages" in file for file in files)
