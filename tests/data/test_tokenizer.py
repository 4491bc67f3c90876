"""Texts as tokens: the end token, special tokens, and what a tokenizer is known by."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from data import tokenizer
from data.flat_tokens import TokenizerId, decode
from shardlib.errors import UserError
from tests import golden

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_OF_TEXT, _, END_OF_MESSAGE = range(3)  # ids


def trained_tokenizer(texts, special, first=""):
    """A tokenizer of the kind that GPT-2, Llama 3 and Qwen have. The special tokens come first. It
    begins each text with the one named `first`."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    inner.train_from_iterator(texts, trainer)
    if first:
        known = [(first, special.index(first))]
        inner.post_processor = TemplateProcessing(f"{first} $A", special_tokens=known)
    return inner


def write_tokenizer(folder, **named):
    """Writes a tokenizer. Returns its path."""
    inner = trained_tokenizer(["what is the sum of two and two? it is four"] * 3, SPECIAL)
    PreTrainedTokenizerFast(tokenizer_object=inner, **named).save_pretrained(folder)
    return str(folder)


def test_a_tokenizers_code_is_not_run(tmp_path):
    path, ran = write_tokenizer(tmp_path / "some"), tmp_path / "ran"
    of_its_own = {"auto_map": {"AutoTokenizer": ["code.Own", "code.Own"]}, "tokenizer_class": "Own"}
    (tmp_path / "some/tokenizer_config.json").write_text(json.dumps(of_its_own))
    (tmp_path / "some/code.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(UserError, match="contains custom code"):
        tokenizer.Tokenizer(path)
    assert not ran.exists()


def tokenized(opened, documents):
    """Returns the ids of each document."""
    flat, lengths = opened(documents)
    ids, is_start = decode(flat)
    ends = np.cumsum(lengths)
    assert np.flatnonzero(is_start).tolist() == (ends - lengths)[lengths > 0].tolist()
    return np.split(ids, ends[:-1])


def test_the_end_token_ends_what_is_not_empty(tmp_path):
    path = write_tokenizer(tmp_path, eos_token=SPECIAL[0])
    opened = tokenizer.Tokenizer(path, end_token=True)
    ids, nothing = tokenized(opened, ["<|endoftext|>", ""])
    assert ids[-1] == END_OF_TEXT and END_OF_TEXT not in ids[:-1]
    assert not len(nothing)
    plain = tokenizer.Tokenizer(path)
    (ids,) = tokenized(plain, ["hello<|endoftext|>"])
    assert min(ids) > END_OF_MESSAGE, "the name of a special token in a text is text"


def test_a_model_starts_texts_as_its_tokenizer_does_or_with_no_word(tmp_path):
    """The ids that are right, of the first three, which are special, and 3, which is a word."""
    for name, first in ("bare", ""), ("first", SPECIAL[2]):
        trained_tokenizer(["two and two"], SPECIAL, first).save(str(tmp_path / f"{name}.json"))
    named = write_tokenizer(tmp_path / "named", bos_token=SPECIAL[1], eos_token=SPECIAL[0])
    ends = write_tokenizer(tmp_path / "ends", eos_token=SPECIAL[0])
    right = {"bytes_utf8": [0, 257], tmp_path / "bare.json": [0, 1, 2], named: [1]}
    right |= {tmp_path / "first.json": [2], ends: [0, 1, 2]}
    for name, starts in right.items():
        opened = tokenizer.Tokenizer(str(name))
        found = [i for i in (0, 1, 2, 3, 257) if not tokenizer.problem_of_start(opened, i)]
        beyond = [257] if name == "bytes_utf8" else []
        assert found == [*dict.fromkeys([*starts, *beyond])]
    assert tokenizer.problem_of_start(tokenizer.Tokenizer(named), 3) == (
        f"model.start_token=3 is the word '!' of the tokenizer {named}, whose own is 1, "
        "'<|im_start|>'"
    )


@pytest.mark.parametrize("family", ["Qwen2", "GPT2"])
def test_ids_are_those_of_tokenizer_json_whatever_class_the_folder_names(tmp_path, family):
    """transformers' classes of these families split numbers and words by rules of their own."""
    inner = trained_tokenizer(["1024 and 2048 and 4096"] * 9, SPECIAL)
    split = pre_tokenizers.Split("4", "isolated")
    bytelevel = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, bytelevel])
    inner.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": f"{family}Tokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family.lower()}))
    opened = tokenizer.Tokenizer(str(tmp_path))
    document = "2048 and 1024"
    (ids,) = tokenized(opened, [document])
    assert ids.tolist() == inner.encode(document).ids
    assert opened.decode(ids) == document
    if family == "GPT2":  # of which only the class names it, as on the hub
        assert opened.slow.eos_token_id == END_OF_TEXT


def test_the_digest_tells_what_a_document_becomes(tmp_path):
    path = write_tokenizer(tmp_path / "a", eos_token=SPECIAL[0])
    plain, ended = (tokenizer.Tokenizer(path, end_token=end).digest for end in (False, True))
    other = write_tokenizer(tmp_path / "b", eos_token=SPECIAL[2])
    assert tokenizer.Tokenizer(other).digest == plain, "without it the end token doesn't matter"
    assert len({plain, ended, tokenizer.Tokenizer(other, end_token=True).digest}) == 3


def test_a_document_has_the_same_ids_each_time(tmp_path):
    """Even if the tokenizer was trained with dropout."""
    inner = trained_tokenizer(["what is the sum of two and two?"] * 3, [])
    inner.model.dropout = 0.5
    inner.save(str(tmp_path / "x.json"))
    opened = tokenizer.Tokenizer(str(tmp_path / "x.json"))
    assert len({bytes(opened(["what is the sum of two and two?"])[0]) for _ in range(20)}) == 1


def test_tokenizers_under_one_name(tmp_path):
    """One that was trained anew is another, one with another special token is not."""
    name, recorded = str(tmp_path / "x.json"), []
    for texts, special in (["two"], SPECIAL), (["two"], ["<a>", *SPECIAL[1:]]), (["sum"], SPECIAL):
        trained_tokenizer(texts * 3, special).save(name)
        recorded.append(TokenizerId(name, tokenizer.Tokenizer(name).vocabulary))
    first, renamed, last = recorded
    assert renamed == first
    assert not tokenizer.difference(first, first)
    assert not tokenizer.difference(first, TokenizerId(name))
    assert f"{name} has changed since" in tokenizer.difference(first, last)
    tokenizer.Tokenizer(name).check_unchanged(last)
    with pytest.raises(UserError, match="has changed since the data was tokenized with it"):
        tokenizer.Tokenizer(name).check_unchanged(first)


@pytest.mark.parametrize("part, value", [("normalizer", {"type": "Lowercase"}), ("merges", [])])
def test_tokenizers_of_the_same_words_that_split_text_differently(part, value, tmp_path):
    file, other = tmp_path / "x.json", tmp_path / "other.json"
    trained_tokenizer(["the sum of two and two"] * 3, SPECIAL).save(str(file))
    known = json.loads(file.read_text())
    (known["model"] if part == "merges" else known)[part] = value
    other.write_text(json.dumps(known))
    names = str(file), str(other)
    recorded, changed = (TokenizerId(x, tokenizer.Tokenizer(x).vocabulary) for x in names)
    assert tokenizer.difference(recorded, changed) == "they split the same text differently"
    file.write_text(other.read_text())
    with pytest.raises(UserError, match="has changed since the data was tokenized with it"):
        tokenizer.Tokenizer(str(file)).check_unchanged(recorded)


def test_an_added_token_makes_no_other_tokenizer(tmp_path):
    """Even if it stands for ordinary text."""
    inner = trained_tokenizer(["the sum of two and two"] * 3, SPECIAL)
    inner.save(str(tmp_path / "x.json"))
    inner.add_tokens(["sum", "  ", "don't"])
    inner.save(str(tmp_path / "more.json"))
    names = str(tmp_path / "x.json"), str(tmp_path / "more.json")
    one, other = (TokenizerId(x, tokenizer.Tokenizer(x).vocabulary) for x in names)
    assert not tokenizer.difference(one, other)
    words = tokenizer.digest(sorted(tokenizer.Tokenizer(names[0]).words().items()))
    earlier = TokenizerId(names[0], words)  # as earlier versions recorded it
    assert not tokenizer.difference(earlier, other)
    tokenizer.Tokenizer(names[0]).check_unchanged(earlier)


def test_a_tokenizer_may_lack_ids_for_other_texts(tmp_path):
    inner = Tokenizer(models.WordLevel({x: i for i, x in enumerate("ACGT")}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.save(name := str(tmp_path / "x.json"))
    opened = tokenizer.Tokenizer(name)
    opened.check_unchanged(TokenizerId(name, opened.vocabulary))
    (ids,) = tokenized(opened, ["GATT"])
    assert ids.tolist() == [2, 0, 3, 3]


def test_an_end_token_that_is_not_named(tmp_path):
    case, folder = "tokenizer: an end token that isn't named", (str(tmp_path), "FOLDER")
    with golden.raises("datasets.txt", case, UserError, folder):
        tokenizer.Tokenizer(write_tokenizer(tmp_path), end_token=True)
