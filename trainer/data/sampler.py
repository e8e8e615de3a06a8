"""The batches of an iteration: a function of the iteration, so a resume needs no state but its number."""

from __future__ import annotations

from collections.abc import Iterator

from configs.run import RunConfig
from trainer.data.batch import Batch
from trainer.data.families import make_batch
from trainer.data.sources import TrainingSet, ValidationSet


def training_batches(dataset: TrainingSet, config: RunConfig, iteration: int) -> list[Batch]:
    """The micro-batches of iteration `iteration` (from 1): samples (iteration - 1) * global_batch_size and on."""
    micro, size = config.training.micro_batch_size, config.training.global_batch_size
    first = (iteration - 1) * size
    return [
        make_batch([dataset[first + place] for place in places], places, config)
        for places in (list(range(start, start + micro)) for start in range(0, size, micro))
    ]


def validation_batches(dataset: ValidationSet, config: RunConfig) -> Iterator[Batch]:
    """At most eval_iters global batches of the validation set; a last one that is not full is filled with uncounted copies."""
    micro = config.training.micro_batch_size
    total = min(len(dataset), config.training.eval_iters * config.training.global_batch_size)
    for start in range(0, total, micro):
        numbers = list(range(start, start + micro))
        counted = [number < total for number in numbers]
        samples = [dataset[min(number, total - 1)] for number in numbers]
        yield make_batch(samples, list(range(micro)), config, counted)
