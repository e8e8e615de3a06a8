"""Tokenizers that `transformers` saved, here and back: the same ids, and greedily the same text."""

from __future__ import annotations

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
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=9, eos_token_id=tokenizer.eos_token_id, pad_token_id=0, **start
    )[0].tolist()  # fmt: skip
    said = [i for i in out[1:] if i != tokenizer.eos_token_id] if name == "t5" else out
    assert text == tokenizer.decode(said, skip_special_tokens=name != "t5")
