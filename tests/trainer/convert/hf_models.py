"""Small random models of HF `transformers`, and the same batch for them and for ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCABULARY, LAYERS, HIDDEN, HEADS = 301, 3, 64, 4
LENGTH, DECODER_LENGTH, BATCH = 16, 12, 5


def _gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS)
    return transformers.GPT2LMHeadModel(config)


def _gpt2_untied() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, activation_function="gelu",
        n_inner=96, scale_attn_weights=False, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _llama_sizes() -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip


def _llama() -> Any:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32}  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_llama_sizes(), rope_parameters=rope))


def _llama_biased() -> Any:
    config = transformers.LlamaConfig(
        **_llama_sizes(), attention_bias=True, mlp_bias=True, head_dim=24, tie_word_embeddings=True
    )
    return transformers.LlamaForCausalLM(config)


def _qwen2() -> Any:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_llama_sizes(), rope_parameters=rope))


def _bert_config(**changes: Any) -> Any:
    return transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=96,
        max_position_embeddings=64, **changes,
    )  # fmt: skip


def _bert() -> Any:
    return transformers.BertForPreTraining(_bert_config())


def _bert_masked_lm() -> Any:
    return transformers.BertForMaskedLM(_bert_config(hidden_act="gelu_new", type_vocab_size=3))


def _bert_untied() -> Any:
    return transformers.BertForMaskedLM(_bert_config(tie_word_embeddings=False))


def _t5_config(**changes: Any) -> Any:
    return transformers.T5Config(
        vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=12, d_ff=96, num_layers=LAYERS, num_decoder_layers=2, num_heads=HEADS,
        relative_attention_num_buckets=8, relative_attention_max_distance=20, **changes,
    )  # fmt: skip


def _t5() -> Any:
    return transformers.T5ForConditionalGeneration(_t5_config())


def _t5_v11() -> Any:
    return transformers.T5ForConditionalGeneration(_t5_config(feed_forward_proj="gated-gelu", tie_word_embeddings=False))


MODELS = {
    "gpt2": _gpt2, "gpt2-untied": _gpt2_untied, "llama": _llama, "llama-biased": _llama_biased, "qwen2": _qwen2,
    "bert": _bert, "bert-masked-lm": _bert_masked_lm, "bert-untied": _bert_untied, "t5": _t5, "t5-v1.1": _t5_v11, "t5-untied": _t5_v11,
}  # fmt: skip


def save(name: str, folder: Path) -> Any:
    """A model whose norms and biases are not constants, which would hide a mix-up; saved as HF saves."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        if name == "bert-untied":  # the one that is read, and the one that is not
            model.cls.predictions.bias.copy_(model.cls.predictions.decoder.bias)
    model.save_pretrained(folder)
    return _untie_t5(folder) if name == "t5-untied" else model.eval()


def _untie_t5(folder: Path) -> Any:
    """The saved model as T5 v1.1's files are: an output layer of its own. (transformers 5 ties it wherever a file doesn't differ.)"""
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = 0.1 * torch.randn_like(tensors["shared.weight"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["scale_decoder_outputs"]
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return load(folder)


def load(folder: Path) -> Any:
    """The saved model, in fp32, with eager attention."""
    kinds = transformers.AutoConfig.from_pretrained(folder).architectures
    return getattr(transformers, kinds[0]).from_pretrained(folder, attn_implementation="eager").eval()


def family(name: str) -> str:
    """gpt, bert or t5."""
    return name.partition("-")[0] if name.startswith(("bert", "t5")) else "gpt"


def batch(family: str) -> dict[str, Tensor]:
    """Samples without padding, padded right, padded left, half and half, and one that is nothing but padding."""
    random = torch.Generator().manual_seed(1)

    def ids(length: int) -> Tensor:
        # From 1: HF gives the padding id of a BERT no gradient where it is an input (which real padding has none of anyway).
        return torch.randint(1, VOCABULARY, (BATCH, length), generator=random)

    real = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    real[1, 10:], real[2, :5], real[3, 3:7], real[4] = False, False, False, False
    out = {"tokens": ids(LENGTH), "real": real}
    length = DECODER_LENGTH if family == "t5" else LENGTH
    labels, wanted = ids(length), torch.rand(BATCH, length, generator=random) < 0.7
    wanted[4] = False
    wanted = wanted if family == "t5" else wanted & real
    out["labels"] = labels.masked_fill(~wanted, -100)
    # Positions count real tokens, so that left padding does not move them.
    out["position_ids"] = (real.long().cumsum(1) - 1).clamp(min=0)
    if family == "bert":
        out |= {
            "token_types": (torch.arange(LENGTH) >= 7).long().expand(BATCH, -1),
            "sentence_labels": torch.tensor([0, 1, 1, 0, 1]),
        }
    if family == "t5":
        out["decoder_tokens"] = ids(DECODER_LENGTH)
        out["decoder_real"] = torch.ones(BATCH, DECODER_LENGTH, dtype=torch.bool)
        out["decoder_real"][1, 9:] = False
        out["labels"][1, 9:] = -100
    return out


def hf_forward(model: Any, name: str, data: dict[str, Tensor]) -> dict[str, Tensor]:
    """logits [b, s, v], `sentence` logits where there is such a head, and the loss (without the all-padding sample)."""
    kind, mask = family(name), data["real"].long()
    if kind == "t5":
        out = model(
            input_ids=data["tokens"], attention_mask=mask, decoder_input_ids=data["decoder_tokens"],
            decoder_attention_mask=data["decoder_real"].long(),
        )  # fmt: skip
        found = {"logits": out.logits}
    elif kind == "bert":
        out = model(input_ids=data["tokens"], attention_mask=mask, token_type_ids=data["token_types"])
        found = {"logits": out.logits if hasattr(out, "logits") else out.prediction_logits}
        if hasattr(out, "seq_relationship_logits"):
            found["sentence"] = out.seq_relationship_logits
    else:
        found = {"logits": model(input_ids=data["tokens"], attention_mask=mask, position_ids=data["position_ids"]).logits}
    found["loss"] = torch.nn.functional.cross_entropy(found["logits"].flatten(0, 1), data["labels"].flatten())
    if "sentence" in found:
        found["loss"] = found["loss"] + torch.nn.functional.cross_entropy(found["sentence"][:4], data["sentence_labels"][:4])
    return found


def our_forward(model: Any, name: str, data: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same of one of our models; logits are this rank's part of the vocabulary."""
    kind, mask = family(name), ~data["real"][:, None, None]

    def call(labels: Tensor | None) -> Any:
        if kind == "t5":
            return model(data["tokens"], data["decoder_tokens"], mask, ~data["decoder_real"][:, None, None], labels)
        if kind == "bert":
            return model(data["tokens"], None, mask, labels, None, data["token_types"])
        return model(data["tokens"], data["position_ids"], mask, labels)

    logits, losses = call(None), call(data["labels"])
    found = {}
    if kind == "bert":
        (logits, sentence), (losses, again) = logits, losses
        if sentence is not None:
            found["sentence"] = sentence
    found["logits"] = logits.transpose(0, 1)
    found["loss"] = losses.sum() / (data["labels"] >= 0).sum()
    if "sentence" in found:
        found["loss"] = found["loss"] + torch.nn.functional.cross_entropy(again[:4], data["sentence_labels"][:4])
    return found
