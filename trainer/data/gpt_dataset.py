"""Samples of a GPT: tokens, shifted labels, and what follows from ends of documents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from configs.run import DataConfig, RunConfig
from trainer.data.batch import GPTBatch
from trainer.data.indexed_dataset import IndexedDataset
from trainer.data.sample_index import SampleIndex, build_sample_index, cached_sample_index
from trainer.data.sources import TrainingSet, ValidationSet, check_ids


def gpt_training_set(config: RunConfig, cache: str | Path) -> TrainingSet:
    """Samples int64 [s + 1], in an order of the run's seed."""
    s, seed = config.data.seq_length, config.training.seed
    return TrainingSet(config.data.sources("train"), lambda d: cached_sample_index(d, s, seed, cache), gpt_reader(config))


def gpt_validation_set(config: RunConfig) -> ValidationSet:
    """Samples int64 [s + 1], in the order of the files."""
    s = config.data.seq_length

    def index(dataset: IndexedDataset) -> SampleIndex:
        return build_sample_index(dataset.sequence_lengths, s, 0, shuffle=False)

    return ValidationSet(config.data.sources("valid"), index, gpt_reader(config))


def gpt_reader(config: RunConfig) -> Callable[[IndexedDataset, SampleIndex, int, int], np.ndarray]:
    """What reads a sample."""
    s, vocab_size = config.data.seq_length, config.model.vocab_size
    return lambda dataset, index, sample, number: read_sample(dataset, index, sample, s, vocab_size)


def read_sample(dataset: IndexedDataset, index: SampleIndex, sample: int, seq_length: int, vocab_size: int) -> np.ndarray:
    """int64 [seq_length + 1]. Raises DataError for an id at or beyond the vocabulary."""
    place, offset = (int(v) for v in index.starts[sample])
    pieces, missing = [], seq_length + 1
    while missing:
        sequence = int(index.documents[place])
        length = min(missing, int(dataset.sequence_lengths[sequence]) - offset)
        pieces.append(dataset.get(sequence, offset, length))
        missing -= length
        place, offset = place + 1, 0
    tokens = np.concatenate(pieces).astype(np.int64)
    check_ids(tokens, vocab_size, dataset, sample)
    return tokens


def make_gpt_batch(
    samples: list[np.ndarray], places: list[int], data: DataConfig, counted: list[bool] | None = None
) -> GPTBatch:
    """A batch of samples int64 [s + 1] at these places of the global batch; `counted` False: no loss (padding of a batch).

    The one shift of labels against tokens in the project is here.
    """
    whole = torch.from_numpy(np.stack(samples))
    tokens, labels = whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
    loss_mask = torch.ones(tokens.shape, dtype=torch.float32)
    if counted is not None:
        loss_mask *= torch.tensor(counted, dtype=torch.float32)[:, None]
    ends = tokens == data.eod_token if data.eod_token is not None else None
    if data.eod_mask_loss and ends is not None:
        loss_mask[ends] = 0.0
    position_ids = attention_mask = None
    if ends is not None and (data.reset_position_ids or data.reset_attention_mask):
        # An end of document belongs to the document it ends: the next token starts document number + 1.
        number = torch.cumsum(ends, 1) - ends.long()
        if data.reset_position_ids:
            position = torch.arange(tokens.shape[1]).expand_as(tokens)
            starts = torch.ones_like(ends)
            starts[:, 1:] = ends[:, :-1]
            position_ids = position - torch.cummax(torch.where(starts, position, 0), 1).values
        if data.reset_attention_mask:
            attention_mask = (number[:, :, None] != number[:, None, :])[:, None]
    return GPTBatch(torch.tensor(places), tokens, labels, loss_mask, position_ids, attention_mask)
