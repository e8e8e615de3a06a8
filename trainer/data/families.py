"""The data of the configured family: which samples there are, and how they become a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.run import DataConfig, RunConfig
from trainer.data.batch import Batch
from trainer.data.bert_dataset import bert_training_set, bert_validation_set, make_bert_batch
from trainer.data.gpt_dataset import gpt_training_set, gpt_validation_set, make_gpt_batch
from trainer.data.sources import TrainingSet, ValidationSet
from trainer.data.t5_dataset import make_t5_batch, t5_training_set, t5_validation_set


@dataclass(frozen=True)
class _Family:
    training_set: Callable[[RunConfig, str | Path], TrainingSet]
    validation_set: Callable[[RunConfig], ValidationSet]
    make_batch: Callable[[list[Any], list[int], DataConfig, list[bool] | None], Batch]


_FAMILIES = {
    "gpt": _Family(gpt_training_set, gpt_validation_set, make_gpt_batch),
    "bert": _Family(bert_training_set, bert_validation_set, make_bert_batch),
    "t5": _Family(t5_training_set, t5_validation_set, make_t5_batch),
}


def training_set(config: RunConfig, cache: str | Path | None = None) -> TrainingSet:
    """The endless training samples. `cache`: folder of their index; that of the configuration when None. Raises DataError."""
    folder = cache or config.data.cache_directory or Path(config.run.path, "cache")
    return _FAMILIES[config.model.family].training_set(config, folder)


def validation_set(config: RunConfig) -> ValidationSet:
    """The validation samples. Raises DataError."""
    return _FAMILIES[config.model.family].validation_set(config)


def make_batch(samples: list[Any], places: list[int], config: RunConfig, counted: list[bool] | None = None) -> Batch:
    """A batch of samples at these places of the global batch; `counted` False: no loss (padding of a batch)."""
    return _FAMILIES[config.model.family].make_batch(samples, places, config.data, counted)
