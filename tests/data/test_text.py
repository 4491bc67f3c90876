"""Chats as text: what is a target, by templates of several kinds, and what is refused."""

import numpy as np
import pyarrow
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from data import text
from data.flat_tokens import NOT_A_TARGET, decode
from shardlib.errors import UserError
from tests import golden

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_OF_TEXT, _, END_OF_MESSAGE = range(3)  # ids


def trained_tokenizer(texts, special):
    """A tokenizer of the kind that GPT-2, Llama 3 and Qwen have. The special tokens come first."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    inner.train_from_iterator(texts, trainer)
    return inner


def write_tokenizer(folder, template=CHATML, **named):
    """Writes a tokenizer with a chat template. Returns its path."""
    texts = ["user assistant system", "what is the sum of two and two? it is four"]
    inner = trained_tokenizer(texts * 3, SPECIAL)
    inner.post_processor = processors.ByteLevel(trim_offsets=True)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template, **named)
    wrapped.save_pretrained(folder)
    return str(folder)


def chat(*contents, roles=("user", "assistant")):
    return [
        {"role": roles[i % len(roles)], "content": content} for i, content in enumerate(contents)
    ]


def tokenized(opened, documents):
    """Returns, for each document, its ids and whether each one is a target."""
    flat, lengths = opened(pyarrow.chunked_array([documents]))
    ids, is_start = decode(flat)
    ends = np.cumsum(lengths)
    assert np.flatnonzero(is_start).tolist() == (ends - lengths)[lengths > 0].tolist()
    parts = np.split(ids, ends[:-1])
    return [(part % NOT_A_TARGET, part < NOT_A_TARGET) for part in parts]


def texts(opened, document):
    """Returns the text of a document, and that of its targets alone."""
    ((ids, is_target),) = tokenized(opened, [document])
    return opened.decode(ids), opened.decode(ids[is_target])


def test_the_replies_are_the_targets(tmp_path):
    opened = text.Tokenizer(write_tokenizer(tmp_path), chat=True)
    first = chat("what is two and two?", "four", "naïve ☃", "☃☃ \n\n")
    whole, targets = texts(opened, first)
    assert whole == (
        "<|im_start|>user\nwhat is two and two?<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n"
        "<|im_start|>user\nnaïve ☃<|im_end|>\n<|im_start|>assistant\n☃☃ \n\n<|im_end|>\n"
    )
    assert targets == "four<|im_end|>\n☃☃ \n\n<|im_end|>\n"
    ((ids, _),) = tokenized(opened, [first])
    assert (ids == END_OF_MESSAGE).sum() == 4, "special tokens, and not their names as text"
    second = chat("be kind", "hi", "hello", "bye", roles=("system", "user", "assistant", "user"))
    assert texts(opened, second)[1] == "hello<|im_end|>\n"


def test_replies_without_special_tokens_around_them(tmp_path):
    opened = text.Tokenizer(write_tokenizer(tmp_path, PLAIN), chat=True)
    replies = [" four", "four  ", "  ", "", "\n"]
    for question in "and two   ", "☃":
        whole, targets = texts(opened, chat(*(part for r in replies for part in (question, r))))
        assert whole == "".join(f"user:{question}assistant:{reply}" for reply in replies)
        assert targets == "".join(replies)


def test_chats_without_a_reply_have_no_tokens(tmp_path):
    path = write_tokenizer(tmp_path, eos_token=SPECIAL[0])
    opened = text.Tokenizer(path, chat=True)
    chats = [chat("hi"), [], None, chat("hi", roles=["assistant"]), chat("hi", "hello")]
    assert [len(ids) > 0 for ids, _ in tokenized(opened, chats)] == [False] * 4 + [True]


def test_the_start_token_stands_for_the_tokenizers_own(tmp_path):
    path = write_tokenizer(tmp_path, "{{ bos_token }}" + CHATML, bos_token=SPECIAL[0])
    ((ids, is_target),) = tokenized(text.Tokenizer(path, chat=True), [chat("hi", "hello")])
    assert ids[0] == 1 and END_OF_TEXT not in ids and not is_target[0]


def test_fields_that_arrow_adds_to_a_message_are_not_there(tmp_path):
    """Arrow gives each message the fields of the others, as None. transformers leaves them out."""
    template = "{% for m in messages %}{{ m | length }}{% endfor %}"
    opened = text.Tokenizer(write_tokenizer(tmp_path, template), chat=True)
    messages = chat("hi", "hello")
    messages[1]["tool_calls"] = "x"
    assert texts(opened, messages)[0] == "23"


def test_the_end_token_is_a_target(tmp_path):
    path = write_tokenizer(tmp_path, eos_token=SPECIAL[0])
    opened = text.Tokenizer(path, end_token=True)
    (ids, is_target), (nothing, _) = tokenized(opened, ["<|endoftext|>", ""])
    assert ids[-1] == END_OF_TEXT and END_OF_TEXT not in ids[:-1] and is_target.all()
    assert not len(nothing)
    plain = text.Tokenizer(path)
    ((ids, _),) = tokenized(plain, ["hello<|endoftext|>"])
    assert min(ids) > END_OF_MESSAGE, "the name of a special token in a text is text"


def test_the_digest_tells_what_a_document_becomes(tmp_path):
    path = write_tokenizer(tmp_path / "a", eos_token=SPECIAL[0])
    kinds = [{}, {"end_token": True}, {"chat": True}]
    digests = [text.Tokenizer(path, **kind).digest for kind in kinds]
    assert len(set(digests)) == 3
    other = write_tokenizer(tmp_path / "b", PLAIN, eos_token=SPECIAL[0])
    assert text.Tokenizer(other).digest == digests[0], "plain text doesn't depend on the template"
    assert text.Tokenizer(other, chat=True).digest != digests[2]
    other = write_tokenizer(tmp_path / "c", eos_token=SPECIAL[2])
    assert text.Tokenizer(other, end_token=True).digest != digests[1]


STRICT = "{{ raise_exception('roles must alternate') }}"
LAST = "{{ messages[-1].role }}:{{ messages[-1].content }}"
DROPS = CHATML.replace("m.content", "m.content if loop.last or m.role == 'user' else ''")
REFUSED = {
    "an end token that isn't named": (CHATML, {"end_token": True}),
    "an end token after chats": (CHATML, {"end_token": True, "chat": True}),
    "chats without a template": ("", {"chat": True}),
    "a template that refuses a chat": (STRICT, {"chat": True}),
    "a template that keeps the last message": (LAST, {"chat": True}),
    "a template that drops what it wrote": (DROPS, {"chat": True}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_tokenizer_can_not_do(tmp_path, case):
    template, asked = REFUSED[case]
    path = write_tokenizer(tmp_path, template)
    with pytest.raises(UserError) as error:
        texts(text.Tokenizer(path, **asked), chat("hi", "hello", "and", "bye"))
    message = str(error.value).replace(str(tmp_path), "FOLDER")
    golden.check("datasets.txt", f"tokenizer: {case}", message)
