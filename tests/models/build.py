"""Small models for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from configs.run import RunConfig
from configs.transformer import FUSION_FLAGS
from fusions.machine import probe
from fusions.registry import Counters, FusionPlan
from models.fusion_sites import fusion_plan
from models.language_model import LanguageModel
from models.tensor_parallel.params import TensorParallel
from trainer.data.bert_dataset import IGNORED, BertSample
from trainer.data.t5_dataset import T5Sample
from trainer.loss_scale import loss_scaler
from trainer.meshes import Meshes
from trainer.optimizer import Optimizer
from trainer.setup import build_model

BASE: dict[str, dict[str, Any]] = {
    "run": {"name": "test"},
    "model": {"vocab_size": 301, "max_position_embeddings": 64, "make_vocab_size_divisible_by": 8},
    "transformer": {
        "num_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "activation": "gelu_tanh",
    },
    "parallel": {},
    "data": {"train": ["none"], "seq_length": 32},
    "optimizer": {"learning_rate": 1e-3, "warmup_iters": 2},
    "training": {"train_iters": 20, "micro_batch_size": 4, "global_batch_size": 4},
}


def run_config(overrides: dict[str, Any], fused: bool | tuple[str, ...] = False) -> RunConfig:
    """BASE with dotted overrides; `fused` True: every fusion flag on, or only the named ones."""
    tree = {name: dict(section) for name, section in BASE.items()}
    for key, value in overrides.items():
        section, name = key.split(".")
        tree[section][name] = value
    for flag in FUSION_FLAGS if fused is True else fused or ():
        tree["transformer"][flag] = True
    if tree["training"].get("precision") == "bf16" and fused is True:
        tree["transformer"]["gradient_accumulation_fusion"] = False  # an obstacle on a CPU
    if fused:
        tree["transformer"]["strict_fusions"] = True  # what is asked for runs, or the plan is an error
    config = RunConfig.model_validate(tree)
    assert config.problems() == [], config.problems()
    return config


def build(
    config: RunConfig, plan: FusionPlan | None = None, tp: TensorParallel | None = None, meshes: Meshes | None = None
) -> tuple[Any, Counters]:
    """The model with its initial weights."""
    plan = plan or fusion_plan(config, probe("cpu"))
    return build_model(config, plan, meshes or Meshes(tp or TensorParallel()), torch.device("cpu"))


def optimizer_of(config: RunConfig, model: LanguageModel, counters: Counters | None = None) -> Optimizer:
    """The configured optimizer."""
    scaler = loss_scaler(config.training, model.device)
    return Optimizer(model, config.optimizer, fusion_plan(config, probe("cpu")), counters or Counters(), scaler)


BERT = {"model.family": "bert", "model.sentence_head": "next_sentence", "transformer.layernorm_position": "post",
        "transformer.activation": "gelu", "data.tokenizer": "none"}  # fmt: skip
T5 = {"model.family": "t5", "model.position_embedding_type": "relative", "model.decoder_num_layers": 2, "data.decoder_seq_length": 16,
      "model.relative_attention_num_buckets": 8, "model.relative_attention_max_distance": 20, "model.scale_decoder_outputs": True,
      "transformer.normalization": "RMSNorm", "transformer.add_bias_linear": False, "transformer.activation": "relu",
      "transformer.head_dim": 12, "data.tokenizer": "none"}  # fmt: skip


def samples_of(config: RunConfig, count: int, generator: torch.Generator) -> list[Any]:
    """Random samples of the family, as its dataset would give them: some padded, some tokens to be predicted."""
    s, vocabulary = config.data.seq_length, config.model.vocab_size

    def ids(length: int) -> Any:
        return torch.randint(0, vocabulary, (count, length), generator=generator).numpy()

    if config.model.family == "gpt":
        return list(ids(s + 1))
    lengths = torch.randint(s // 2, s + 1, (count,), generator=generator).tolist()
    if config.model.family == "t5":
        sd = config.data.decoder_seq_length or 0
        tokens, decoder, labels = ids(s), ids(sd), ids(sd)
        labels[:, sd - 3 :] = IGNORED
        return [T5Sample(*parts) for parts in zip(tokens, decoder, labels, lengths, strict=True)]
    tokens, labels = ids(s), ids(s)
    hidden = (torch.rand(count, s, generator=generator) > 0.3).numpy() | (np.arange(s) >= np.array(lengths)[:, None])
    labels[hidden] = IGNORED
    types = (np.arange(s) >= s // 3).astype(np.int64)
    head = config.model.sentence_head is not None
    parts = enumerate(zip(tokens, labels, lengths, strict=True))
    return [BertSample(t, lab, types, n, number % 2 if head else None) for number, (t, lab, n) in parts]


def tokens_of(config: RunConfig, samples: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens and shifted labels [samples, s]."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, config.model.vocab_size, (samples, config.data.seq_length + 1), generator=generator)
    return whole[:, :-1], whole[:, 1:]
