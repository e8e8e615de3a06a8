"""The batches of an iteration: a function of the iteration, so a resume needs no state but its number."""

from __future__ import annotations

from collections.abc import Iterator

from configs.run import RunConfig
from trainer.data.batch import Batch
from trainer.data.families import make_batch
from trainer.data.sources import TrainingSet, ValidationSet


def training_batches(dataset: TrainingSet, config: RunConfig, iteration: int, data_rank: int = 0) -> list[Batch]:
    """This rank's micro-batches of iteration `iteration` (from 1), whose samples are (iteration - 1) * global_batch_size and on.

    The micro-batches of the global batch go round the data-parallel ranks in turn.
    """
    size = config.training.global_batch_size
    first = (iteration - 1) * size
    return [
        make_batch([dataset[first + place] for place in places], places, config)
        for places in _shares(size, config, data_rank)
    ]


def validation_batches(dataset: ValidationSet, config: RunConfig, data_rank: int = 0) -> Iterator[Batch]:
    """This rank's share of at most eval_iters global batches of the validation set.

    What is missing for a full micro-batch on every rank is filled with uncounted copies, so that all ranks have as many.
    """
    total = min(len(dataset), config.training.eval_iters * config.training.global_batch_size)
    for numbers in _shares(total, config, data_rank):
        counted = [number < total for number in numbers]
        samples = [dataset[min(number, total - 1)] for number in numbers]
        yield make_batch(samples, list(range(len(numbers))), config, counted)


def _shares(total: int, config: RunConfig, data_rank: int) -> Iterator[list[int]]:
    """The numbers of each of a rank's micro-batches, as many on every rank: those of the last may be `total` or more."""
    micro = config.training.micro_batch_size
    step = micro * config.parallel.data_parallel
    for start in range(data_rank * micro, max(total, 0) + data_rank * micro, step):
        yield list(range(start, start + micro))
