"""BERT and T5 from text to trained model by the commands, and every family over to `transformers` and back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import ROOT
from tests.scripts.test_launch import command, losses, run
from trainer.checkpoint import complete_checkpoints
from trainer.data.preprocess import encode_documents
from trainer.data.tokenizer import train_tokenizer
from trainer.records import read_metrics

COLOURS, ANIMALS = ("red", "green", "blue"), ("cat", "dog", "bird", "fish")


def sentences(count: int, seed: int) -> list[str]:
    """Text that can be learned: each animal has one colour, and each sentence says what the one before it said."""
    random = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        kinds = random.integers(0, len(ANIMALS), 6)
        documents.append(" ".join(f"The {COLOURS[k % 3]} {ANIMALS[k]} sees the {ANIMALS[k]}." for k in kinds))
    return documents


SETTINGS = {
    "gpt": ["transformer.num_query_groups=8"],
    "bert": ["model.family=bert", "transformer.layernorm_position=post", "transformer.activation=gelu", "transformer.num_query_groups=8"],
    "t5": ["model.family=t5", "model.position_embedding_type=relative", "data.decoder_seq_length=16", "transformer.num_query_groups=8",
           "transformer.normalization=RMSNorm", "transformer.add_bias_linear=false", "transformer.activation=geglu",
           "transformer.attention_scale=1.0", "model.scale_decoder_outputs=true", "transformer.init_method_std=0.1"],
}  # fmt: skip


@pytest.fixture
def job(tiny: Path, request: pytest.FixtureRequest) -> tuple[Path, str, list[str]]:
    """(folder, family, overrides) with a tokenizer and data of the family."""
    family = request.param
    tokenizer = train_tokenizer(sentences(50, 0), 300, family)
    tokenizer.save(str(tiny / "tokenizer.json"))
    encode_documents(sentences(300, 1), tokenizer, tiny / "data", append_eod=True, sentences=family == "bert")
    overrides = [*SETTINGS[family], f"data.tokenizer={tiny}/tokenizer.json", "data.seq_length=32", "optimizer.learning_rate=3e-3",
                 "parallel.sequence_parallel=true", "training.micro_batch_size=4", "training.global_batch_size=8"]  # fmt: skip
    return tiny, family, overrides


def script(name: str, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, f"scripts/{name}.py", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("job", ["bert", "t5"], indirect=True)
def test_it_trains_on_two_ranks_and_resumes_bit_for_bit(job: tuple[Path, str, list[str]]) -> None:
    tiny, family, overrides = job
    head = ["model.sentence_head=next_sentence"] if family == "bert" else []
    fused = ["transformer.bias_dropout_fusion=true", "transformer.masked_softmax_fusion=true"]
    long = [*overrides, *head, *fused, "optimizer.schedule=constant", "training.eval_interval=20"]
    code, output = run(
        command(tiny, 2, *long, "training.train_iters=60", "checkpoint.save_interval=40"),
        timeout=200,
    )
    assert code == 0, output
    found = losses(tiny / "run")
    first, last = np.mean([found[i] for i in range(1, 6)]), np.mean([found[i] for i in range(56, 61)])
    assert last < first - 1.5, (first, last)
    rows = read_metrics(tiny / "run" / "metrics.jsonl")
    if family == "bert":
        assert rows[0]["masked_lm_loss"] + rows[0]["sentence_loss"] == pytest.approx(rows[0]["loss"], rel=1e-6)
    assert "validation loss" in output
    again = [f"checkpoint.load={tiny}/run/checkpoints/iter_0000040", f"run.directory={tiny}/again"]
    code, output = run(command(tiny, 2, *long, "training.train_iters=60", *again), timeout=200)
    assert code == 0 and "resumed from" in output, output
    assert losses(tiny / "again") == {i: loss for i, loss in found.items() if i > 40}


@pytest.mark.parametrize("job", ["gpt", "bert", "t5"], indirect=True)
def test_transformers_says_the_same_as_generate(job: tuple[Path, str, list[str]]) -> None:
    import transformers

    tiny, family, overrides = job
    iterations = {"gpt": 40, "bert": 40, "t5": 60}[family]
    code, output = run(command(tiny, 2, *overrides, f"training.train_iters={iterations}"), timeout=200)
    assert code == 0, output
    code, output = script("convert_checkpoint", "to-hf", str(tiny / "run"), "--out", str(tiny / "hf"))
    assert code == 0, output
    prompt = {"gpt": "The red cat", "bert": "The red [MASK] sees the [MASK].", "t5": "The <extra_id_0> sees the cat."}[
        family
    ]
    code, ours = script("generate", str(tiny / "run"), "--prompt", prompt, "--temperature", "0", "--max-new-tokens", "12")
    assert code == 0, ours
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny / "hf")
    if family == "bert":
        ids = [tokenizer.cls_token_id, *tokenizer(prompt, add_special_tokens=False).input_ids, tokenizer.sep_token_id]
        model = transformers.AutoModelForMaskedLM.from_pretrained(tiny / "hf").eval()
        probabilities = model(torch.tensor([ids])).logits[0].softmax(-1)
        for number, place in enumerate([i for i, t in enumerate(ids) if t == tokenizer.mask_token_id], 1):
            best = int(probabilities[place].argmax())
            assert f"mask {number}: {tokenizer.convert_ids_to_tokens(best)} {probabilities[place, best]:.0%}" in ours
        return
    auto = transformers.AutoModelForCausalLM if family == "gpt" else transformers.AutoModelForSeq2SeqLM
    model = auto.from_pretrained(tiny / "hf").eval()
    ids = tokenizer(prompt, add_special_tokens=False).input_ids + ([tokenizer.eos_token_id] if family == "t5" else [])
    inputs = torch.tensor([ids])
    out = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=12)[0].tolist()
    out = [token for token in out if family == "gpt" or token not in (tokenizer.pad_token_id, tokenizer.eos_token_id)]
    assert tokenizer.decode(out, skip_special_tokens=family == "gpt") == ours.split("\n", 1)[1].rsplit("\n---", 1)[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "nan"], "must be 0 or more"),
        (["--seed", "99999999999999999999"], "below 2^63"),
        (["--top-p", "0"], "--top-p must be above 0"),
        (["--tokenizer", "{folder}/big.json"], "it is another model's"),
        (["--prompt", "def " * 100], "max_position_embeddings is 64"),
    ],
)
def test_generate_says_what_is_wrong(arguments: list[str], words: str, tiny: Path) -> None:
    train_tokenizer(["def a(b): " * 9], 257, "gpt").save(str(tiny / "t.json"))
    big = train_tokenizer(["def a(b): " * 9], 257, "gpt")
    big.add_tokens([f"word{n}" for n in range(90)])
    big.add_tokens(["def"])
    big.save(str(tiny / "big.json"))
    if not (tiny / "run").exists():
        assert run(command(tiny, 1, "training.train_iters=1", f"data.tokenizer={tiny}/t.json"))[0] == 0
    code, output = script("generate", str(tiny / "run"), *[a.format(folder=tiny) for a in arguments])
    assert code == 2 and words in output and "Traceback" not in output


def test_an_hf_model_goes_on_training_here_and_returns(tiny: Path) -> None:
    from tests.trainer.convert.hf_models import save

    save("gpt2", tiny / "hf")
    code, output = script("convert_checkpoint", "from-hf", str(tiny / "hf"), "--out", str(tiny / "start"))
    assert code == 0 and f"{tiny}/start/config.yaml" in output
    overrides = [f"data.train=[{tiny}/data]", "data.seq_length=32", "training.train_iters=6", f"run.directory={tiny}/run",
                 "optimizer.warmup_iters=1", "parallel.tensor_parallel_size=2", "checkpoint.save_interval=3", "checkpoint.keep_last=1"]  # fmt: skip
    job = [
        str(tiny / "start" / "config.yaml") if part == str(tiny / "tiny.yaml") else part
        for part in command(tiny, 2, *overrides)
    ]
    code, output = run(job, timeout=100)
    assert code == 0 and f"weights from {tiny}/start" in output, output
    assert [p.name for p in complete_checkpoints(tiny / "run" / "checkpoints")] == ["iter_0000006"]
    code, output = run([*job, "training.train_iters=8"], timeout=100)  # the run's own checkpoint comes first
    assert code == 0 and "resumed from" in output and "weights from" not in output
    code, output = run([*job, f"checkpoint.load={tiny}/start", f"run.directory={tiny}/other"], timeout=100)
    assert code != 0 and "has weights only, nothing to resume" in output
    code, output = script("convert_checkpoint", "to-hf", str(tiny / "run"), "--out", str(tiny / "back"), "--dtype", "bf16")
    assert code == 0 and json.loads((tiny / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    code, output = script("convert_checkpoint", "to-hf", str(tiny / "nothing"), "--out", str(tiny / "x"))
    assert code == 2 and "neither a checkpoint nor a run folder" in output and "Traceback" not in output
