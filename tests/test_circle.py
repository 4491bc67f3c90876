"""A model goes the whole circle: imported, evaluated, generated from, trained on, exported, and
loaded in two other engines, which need PyTorch: make test-torch. With SMOLLM=FOLDER it is the real
model in that folder, such as SmolLM2-135M-Instruct; without, a small random one."""

import itertools
import json
import math
import os

import numpy as np
import pytest
import transformers

from data.flat_tokens import FlatTokens
from tests.data.test_tokenizer import write_tokenizer
from tests.files import rows
from tests.processes import python
from tests.tools.test_huggingface_weights import SMOLLM_2, random_tensors, write_folder

REAL = os.environ.get("SMOLLM")
PROMPT = "The sum of two and two"


def run(*arguments):
    """Runs a program. Returns what it printed, without the newline at the end."""
    done = python("-m", *arguments, JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    return done.stdout.removesuffix("\n")


def stand_in(folder):
    """Writes a random model that generates more than one token."""
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    vocabulary = len(transformers.AutoTokenizer.from_pretrained(write_tokenizer(folder, **special)))
    config = SMOLLM_2 | {"vocab_size": vocabulary, "bos_token_id": 1, "eos_token_id": 2}
    config |= {"max_position_embeddings": 128}
    tensors = random_tensors(config)
    tensors["model.embed_tokens.weight"][2] = 0  # an end of text isn't likely
    return write_folder(folder, config, tensors)


def sums(folder):
    """Writes 300 texts about sums."""
    texts = (f"what is the sum of {i} and {i + 1}? it is {2 * i + 1}" for i in range(300))
    (folder / "sums.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return folder / "sums.jsonl"


@pytest.mark.slow
def test_the_whole_circle(tmp_path):
    source = REAL or stand_in(tmp_path / "source")
    ours, data, config = tmp_path / "ours", tmp_path / "sums.zarr", tmp_path / "mine.yaml"
    config.write_text(run("tools.huggingface_weights", "import", source, ours))
    run(
        "tools.huggingface_to_flat_tokens", "--config-name=json_files", f"tokenizer={source}",
        f"load_dataset.data_files={sums(tmp_path)}", f"output={data}",
        "validation_share=0.2",
    )  # fmt: skip

    def evaluated(*how):
        line = run("tools.generate", ours, f"--evaluate={data}", "--dtype=f32", *how)
        return float(line.split("tokens: ")[1].split(" nats")[0])

    loss = evaluated("--length=4096")  # one row, so that a token sees all of its document
    greedy = ["--dtype=f32", "--temperature=0", "--tokens=24"]
    untrained = run("tools.generate", ours, f"--prompt={PROMPT}", *greedy)
    assert untrained.startswith(PROMPT) and untrained != PROMPT

    run(
        "train", f"--config-dir={tmp_path}", "--config-name=mine", f"flat_tokens.filespec={data}",
        "paths.model_name=tuned", f"paths.root_working_dir={tmp_path}", "simulate_devices=true",
        "training.tokens={batch: 8, len: 128}", "training.steps=20", "training.warmup_steps=2",
        "training.learning_rate=1e-4", "training.validation_at_start=true", "check=types",
        "training.validation_batches=2", "training.validation_interval=20",
    )  # fmt: skip
    first, *others, last = rows(tmp_path / "tuned")
    assert len(others) == 18 and last["validation_loss"] < first["validation_loss_at_start"]
    # In bf16, and of the rows that fill two batches.
    assert first["validation_loss_at_start"] == pytest.approx(evaluated("--length=128"), rel=0.1)

    trained, exported = tmp_path / "tuned/checkpoints", tmp_path / "exported"
    run("tools.huggingface_weights", "export", trained, exported)
    before, after = (
        json.loads((path / "config.json").read_text()) for path in (ours / "huggingface", exported)
    )
    same = "bos_token_id", "eos_token_id", "tie_word_embeddings", "vocab_size"
    assert [after[key] for key in same] == [before[key] for key in same]
    text = run("tools.generate", trained, f"--prompt={PROMPT}", *greedy)
    assert text.startswith(PROMPT) and text != PROMPT

    torch = pytest.importorskip("torch")
    import ctranslate2

    settings = ours / "huggingface" if REAL else source
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings)
    load = transformers.AutoModelForCausalLM.from_pretrained

    def continued(model):
        prompt = [model.config.bos_token_id, *tokenizer(PROMPT, add_special_tokens=False).input_ids]
        made = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24)[0]
        kept = [id for id in made[1:].tolist() if id != model.config.eos_token_id]
        return prompt, tokenizer.decode(kept)

    with torch.no_grad():
        model = load(source, dtype=torch.float32)
        assert continued(model)[1] == untrained

        dataset = FlatTokens(str(data), "validation")
        ids = dataset.read(0, dataset.token_count)[0].astype(np.int64)
        starts = dataset.starts(0, dataset.sequence_count).tolist()
        nats = 0.0
        for begin, end in itertools.pairwise(starts):
            row = ids[begin:end]
            inputs = torch.tensor([[model.config.bos_token_id, *row[:-1]]])
            logits = torch.log_softmax(model(inputs).logits[0], -1)
            nats -= logits[np.arange(len(row)), row].numpy().sum()
        assert math.isclose(nats / len(ids), loss, abs_tol=2e-4)
        prompt, wanted = continued(load(exported, dtype=torch.float32))
    assert wanted == text

    folder = str(exported) + "_ctranslate2"
    ctranslate2.converters.TransformersConverter(str(exported)).convert(folder)
    (result,) = ctranslate2.Generator(folder).generate_batch(
        [tokenizer.convert_ids_to_tokens(prompt)], max_length=24, include_prompt_in_result=False
    )
    assert tokenizer.decode([*prompt[1:], *result.sequences_ids[0]]) == text
