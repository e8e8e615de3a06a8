"""Small models for tests."""

from __future__ import annotations

from typing import Any

import torch

from configs.run import RunConfig
from configs.transformer import FUSION_FLAGS
from fusions.machine import probe
from fusions.registry import Counters, FusionPlan
from models.fusion_sites import fusion_plan
from models.language_model import LanguageModel
from models.tensor_parallel.params import TensorParallel
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


def build(config: RunConfig, plan: FusionPlan | None = None, tp: TensorParallel | None = None) -> tuple[Any, Counters]:
    """The model with its initial weights."""
    plan = plan or fusion_plan(config, probe("cpu"))
    return build_model(config, plan, tp or TensorParallel(), torch.device("cpu"))


def optimizer_of(config: RunConfig, model: LanguageModel, counters: Counters | None = None) -> Optimizer:
    """The configured optimizer."""
    return Optimizer(model, config.optimizer, fusion_plan(config, probe("cpu")), counters or Counters())


def tokens_of(config: RunConfig, samples: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens and shifted labels [samples, s]."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, config.model.vocab_size, (samples, config.data.seq_length + 1), generator=generator)
    return whole[:, :-1], whole[:, 1:]
