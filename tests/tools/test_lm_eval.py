"""Tests scoring against the oracle, and, where lm-eval and PyTorch are installed, all kinds of
requests against lm-eval's own model `hf` on the same weights."""

import json
import re
import types

import jax
import numpy as np
import pytest

from data.flat_tokens import NO_TOKEN
from data.loader import TokenBatch
from shardlib.errors import UserError
from shardlib.types import computing_in, make_shardings
from tests.data.test_tokenizer import trained_tokenizer
from tests.helpers import assert_close, mesh, small_config
from tests.tools.test_generate import oracle_logits, random_weights
from tools import huggingface_weights
from tools import lm_eval as tool
from tools.generate import steps


def test_scores_are_those_of_the_oracle():
    config = small_config()
    weights, rng = random_weights(config), np.random.default_rng(0)
    ids = rng.integers(0, 48, (8, 13)).astype(np.uint32)
    logits = oracle_logits(weights, ids[:, :-1]).astype(np.float64)
    ids[4, 1:] = logits[4].argmax(-1)[:12]  # likeliest for the row's own first ids alone
    logits = oracle_logits(weights, ids[:, :-1]).astype(np.float64)
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = np.take_along_axis(wanted, ids[:, 1:, None].astype(int), -1)[..., 0]
    padded = ids.copy()
    padded[6, 9:] = NO_TOKEN
    with jax.set_mesh(mesh(2, 4)), computing_in("f32"):
        batch = TokenBatch.of(padded, np.zeros(ids.shape, np.bool_), 0)
        batch = jax.tree.map(jax.device_put, batch, make_shardings(TokenBatch))
        found = steps.scores(steps.lay_out(weights), batch, config.model)
        nats, best = (np.array(x) for x in found)
    nats[6, 8:], best[6, 8:] = wanted[6, 8:], False
    likeliest = logits.argmax(-1) == ids[:, 1:]
    likeliest[6, 8:] = False
    assert_close(nats, wanted, 1e-5)
    assert (best == likeliest).all() and 0 < best.sum() < 48


def test_without_lm_eval_there_is_one_message(train_here, monkeypatch):
    monkeypatch.setattr(tool, "TemplateLM", object)
    _, message = train_here("runs/x", "--tasks", "y", program=tool.main)
    assert message.startswith("error: ") and "pip install lm-eval" in message


# --- lm-eval's own model --------------------------------------------------------------------------

WORDS = ["the", "a", "cat", "dog", "bird", "sat", "ran", "under", "tree", "was", "red", "blue"]
LENGTH = 48  # of the model's rows
JSON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{context}}"}
TASKS = {
    "choice": JSON | {
        "output_type": "multiple_choice", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": JSON | {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{context}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "bits_per_byte")],
    },
    "answer": JSON | {
        "output_type": "generate_until", "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["e", "zzz"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama and its tokenizer in `hf`, the same in `ours`, and tasks in `tasks`."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("lm_eval")
    import transformers

    path, rng = tmp_path_factory.mktemp("lm_eval"), np.random.default_rng(0)

    def text(count):
        return " ".join(rng.choice(WORDS, count))

    words = [text(9) for _ in range(200)]
    inner = trained_tokenizer(words, ["<unk>", "<s>", "</s>"], "<s>")
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    tokenizer.save_pretrained(path / "hf")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=len(tokenizer) + len(tokenizer) % 2,
        max_position_embeddings=LENGTH, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
        model.lm_head.weight[:3] *= 1.5  # so that answers have special tokens, and end with one
    model.save_pretrained(path / "hf")
    huggingface_weights.import_weights(str(path / "hf"), str(path / "ours"))

    # Contexts that are empty, end in a space, name special tokens, or don't fit.
    contexts = ["", "the cat ", "<s>the dog", "it</s>was", text(30), text(70), text(200)]
    contexts += [text(count) for count in rng.integers(1, 20, 12)]
    rows = [
        {"context": context, "choices": [text(n) for n in (1, 2, 4, 1)], "label": i % 4}
        for i, context in enumerate(contexts)
    ]
    (path / "tasks").mkdir()
    for name, task in TASKS.items():
        kept = [row for row in rows if row["context"] or name == "choice"]
        data = path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in kept))
        full = task | {"task": name, "dataset_kwargs": {"data_files": {"test": str(data)}}}
        (path / "tasks" / f"{name}.yaml").write_text(json.dumps(full))
    return path


def evaluated(model, folder, *names):
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    settings = {"task_manager": manager, "bootstrap_iters": 0, "log_samples": True}
    return lm_eval.simple_evaluate(model, tasks=list(names), **settings)


def responses(results, name):
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    return [response for sample in samples for response in sample["filtered_resps"]]


@pytest.fixture(scope="module")
def wanted(folder):
    """The results of lm-eval's own model, by task. Only where a whole text is scored, it doesn't
    add the BOS: it would score a second one. In a batch, whether an answer's context begins with
    BOS decides about all others, so there is one at a time."""
    from lm_eval.models.huggingface import HFLM

    settings = {"device": "cpu", "dtype": "float32", "batch_size": 1}
    model = HFLM(str(folder / "hf"), **settings)
    assert model.max_length == LENGTH
    results = evaluated(model, folder, "choice", "answer")
    whole = evaluated(HFLM(str(folder / "hf"), add_bos_token=False, **settings), folder, "rolling")
    return {"choice": results, "answer": results, "rolling": whole}


def opened(folder, batch_size=4, **mesh):
    given = {"dtype": "f32", "tokenizer": str(folder / "hf"), "batch_size": batch_size}
    return tool.CheckpointLM(str(folder / "ours"), **mesh, **given)


pytestmark = pytest.mark.filterwarnings("ignore")  # of lm-eval and what it imports


def test_results_are_those_of_lm_evals_own_model(folder, wanted):
    found = evaluated(opened(folder, d=4, t=2), folder, *wanted)
    choices, known = responses(found, "choice"), responses(wanted["choice"], "choice")
    assert len(choices) == 4 * 19
    np.testing.assert_allclose([n for n, _ in choices], [n for n, _ in known], atol=1e-3, rtol=0)
    assert [best for _, best in choices] == [best for _, best in known]
    whole, known = responses(found, "rolling"), responses(wanted["rolling"], "rolling")
    np.testing.assert_allclose(whole, known, atol=1e-3, rtol=0)
    assert responses(found, "answer") == responses(wanted["answer"], "answer")


def test_an_answer_is_greedy_if_the_model_generates_it(folder):
    model = opened(folder)
    context = model.tok_encode("the cat")
    greedy = steps.Sampling(0, None, 1, model.codec.ids)
    with model.model.computing():
        answer = [int(i) for (i,) in steps.generate(model.model, [context], [0], 5, 1, greedy)]
    answers = [answer, [3, *answer[1:]], [*answer[:4], 3], [*answer[:4], answer[4] + 1]]
    scored = model._loglikelihood_tokens([("", context, answer) for answer in answers])
    assert [best for _, best in scored] == [True, False, False, False]


def request(*args):
    return types.SimpleNamespace(args=args)


def test_samples_differ_and_depend_on_nothing_but_their_index_and_the_seed(folder):
    options = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 9, "until": []}
    requests = [request("the cat", options)] * 5

    def answers(size, seed):
        np.random.seed(seed)  # as lm-eval does, before it opens a model
        return opened(folder, batch_size=size).generate_until(requests)

    four, two, other = answers(4, 1), answers(2, 1), answers(4, 2)
    assert len(set(four)) == 5 and four == two and four != other


REFUSED = [
    ({"repetition_penalty": 1.2}, "can't do all of"),
    ({"num_beams": 4}, "can't do all of"),
    ({"max_gen_toks": LENGTH}, f"a row of the training has {LENGTH} tokens"),
]


def test_an_answer_that_can_not_be_generated_scored_or_cached_is_refused(folder):
    from lm_eval.api.model import CachingLM

    model = opened(folder)
    with pytest.raises(UserError, match="--use_cache: answers would be taken for any checkpoint's"):
        CachingLM(model, str(folder / "cache"))
    for options, message in REFUSED:
        with pytest.raises(UserError, match=message):
            model.generate_until([request("the cat", options)])
    for answer in [], [3] * (LENGTH + 1):
        with pytest.raises(UserError, match=f"tokens to score, but a row has 1 to {LENGTH}"):
            model._loglikelihood_tokens([("", [1], answer)])


def test_the_program(folder, wanted, train_here):
    """lm-eval's, with our model."""
    given = f"checkpoint={folder / 'ours'},tokenizer={folder / 'hf'},dtype=f32,d=2,t=2"
    command = ["--model_args", given, "--include_path", str(folder / "tasks"), "--limit=19"]
    out, _ = train_here(*command, "--tasks=choice", program=tool.main)
    accuracy = wanted["choice"]["results"]["choice"]["acc_norm,none"]
    assert re.search(rf"acc_norm *\|.*{accuracy:.4f}", out)


def test_lm_eval_knows_the_model_by_name(folder):
    from lm_eval.api.registry import get_model

    settings = {"checkpoint": str(folder / "ours"), "tokenizer": "bytes_utf8", "t": 2}
    model = get_model("shardlight").create_from_arg_obj(settings, {"batch_size": 2})
    assert model.batch_size == 2 and model.tok_encode("\1") == [1, 2]
    assert model.codec.ends == (2,), "the imported model's, as its config says"
    assert model.loglikelihood([request("a", "b")])[0][0] < 0
    assert model.loglikelihood_rolling([request("")]) == [0]
