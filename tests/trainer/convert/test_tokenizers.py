"""Tokenizers that `transformers` saved, here and back: the same ids, and greedily the same text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import processors

from tests.trainer.convert.hf_models import MODELS, save
from tests.trainer.test_families_data import texts
from trainer.convert.from_hf import convert_from_hf
from trainer.convert.to_hf import convert_to_hf
from trainer.data.tokenizer import load_tokenizer, train_tokenizer
from trainer.errors import ConvertError
from trainer.generate import Sampling, generate, load_model

PROMPT = "Alpha beta gamma"


def tokenizer_of(name: str) -> Any:
    """As HF's of that model: Llama's puts a start of text in front, T5's an end behind."""
    if name == "t5":
        made = train_tokenizer(texts(40), 300, "t5", "unigram")
        made.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=made, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
        )
    made = train_tokenizer(texts(40), 299, "gpt", "bpe")
    if name == "gpt2":
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=made, eos_token="<|endoftext|>", bos_token="<|endoftext|>"
        )
    made.add_special_tokens(["<s>"])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>", bos_token="<s>")


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_a_tokenizer_comes_along_and_the_text_is_the_same(name: str, tmp_path: Path) -> None:
    assert name in MODELS
    model, tokenizer = save(name, tmp_path / "hf"), tokenizer_of(name)
    tokenizer.save_pretrained(tmp_path / "hf")
    convert_from_hf(tmp_path / "hf", tmp_path / "ours")
    convert_to_hf(tmp_path / "ours", tmp_path / "back")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert again(PROMPT).input_ids == tokenizer(PROMPT).input_ids and again.eos_token == tokenizer.eos_token

    ours, config, _ = load_model(tmp_path / "ours", torch.device("cpu"))
    assert config.data.tokenizer == str(tmp_path / "ours" / "tokenizer.json")
    text = generate(ours, load_tokenizer(config.data.tokenizer), PROMPT, config, max_new_tokens=9, sampling=Sampling(0.0))
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    start = {"decoder_start_token_id": 0} if name == "t5" else {}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=9, pad_token_id=0, **start
    )[0].tolist()  # fmt: skip
    said = [i for i in out[1:] if i != tokenizer.eos_token_id] if name == "t5" else out
    assert text == tokenizer.decode(said, skip_special_tokens=name != "t5")


def test_a_run_from_an_hf_model_keeps_its_tokenizer_and_special_tokens(tmp_path: Path) -> None:
    """The README's recipe: from HF, train on, and back."""
    from configs.load import load_config
    from tests.conftest import write_tokens
    from trainer.log import Log
    from trainer.loop import train
    from trainer.setup import build_job, start

    save("llama", tmp_path / "hf")
    tokenizer = tokenizer_of("llama")
    tokenizer.save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | ids))
    convert_from_hf(tmp_path / "hf", tmp_path / "ours")
    write_tokens(tmp_path / "data", [list(range(300))])
    loaded = load_config(tmp_path / "ours" / "config.yaml", [
        f"data.train=[{tmp_path}/data]", f"run.directory={tmp_path}/run", "run.device=cpu", "data.seq_length=16",
        "training.train_iters=2", "optimizer.warmup_iters=1", "checkpoint.save_last=true",
    ])  # fmt: skip
    log = Log(rank=1)
    device, tp = start(loaded, log)
    train(build_job(loaded, device, tp, log))
    written = convert_to_hf(tmp_path / "run", tmp_path / "back")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert {key: written[key] for key in ids} == ids and again(PROMPT).input_ids == tokenizer(PROMPT).input_ids
    assert (again.bos_token, again.eos_token) == ("<s>", "<|endoftext|>")


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_files_from_before_tokenizer_json_are_read(name: str, tmp_path: Path) -> None:
    save(name, tmp_path / "hf")
    if name == "bert":
        made = train_tokenizer(texts(40), 200, "bert", "wordpiece")
        words = sorted(made.get_vocab().items(), key=lambda item: item[1])
        (tmp_path / "hf" / "vocab.txt").write_text("".join(f"{word}\n" for word, _ in words))
        (tmp_path / "hf" / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    else:
        made = train_tokenizer(texts(40), 299, "gpt", "bpe")
        made.model.save(str(tmp_path / "hf"))
    config = convert_from_hf(tmp_path / "hf", tmp_path / "ours")
    again = load_tokenizer(str(config.data.tokenizer))
    assert again.encode(PROMPT, add_special_tokens=False).ids == made.encode(PROMPT, add_special_tokens=False).ids
    assert again.token_to_id("[MASK]" if name == "bert" else "<|endoftext|>") is not None


def test_a_tokenizer_that_is_asked_for_must_be_there(tmp_path: Path) -> None:
    save("gpt2", tmp_path / "hf")
    convert_from_hf(tmp_path / "hf", tmp_path / "ours")
    with pytest.raises(ConvertError, match="nope.json is missing"):
        convert_to_hf(tmp_path / "ours", tmp_path / "back", tokenizer=str(tmp_path / "nope.json"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "ours"]


def test_a_tokenizer_of_ones_own_takes_the_place_of_the_models_and_nothing_else(tmp_path: Path) -> None:
    save("llama", tmp_path / "fp32").to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    tokenizer_of("llama").save_pretrained(tmp_path / "hf")
    convert_from_hf(tmp_path / "hf", tmp_path / "ours")
    (tmp_path / "own").mkdir()
    train_tokenizer(texts(40), 280, "gpt", "bpe").save(str(tmp_path / "own" / "tokenizer.json"))
    written = convert_to_hf(tmp_path / "ours", tmp_path / "back", tokenizer=str(tmp_path / "own" / "tokenizer.json"))
    assert written["dtype"] == "bfloat16" and written["eos_token_id"] == written["bos_token_id"] == 0
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert len(again) == 280 and again.eos_token == "<|endoftext|>"
