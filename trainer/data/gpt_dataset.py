"""Samples of a GPT: tokens, shifted labels, and what follows from ends of documents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.run import DataConfig, DataSource
from trainer.data.blend import Blend
from trainer.data.indexed_dataset import IndexedDataset
from trainer.data.sample_index import build_sample_index, cached_sample_index
from trainer.errors import DataError


@dataclass(frozen=True)
class Batch:
    """One micro-batch. tokens, labels int64 [b, s]; loss_mask fp32 [b, s], 1 = counted; samples int64 [b]: each one's
    place in the global batch; position_ids int64 [b, s] or None; attention_mask boolean [b, 1, s, s] or None, True = masked.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    samples: Tensor
    position_ids: Tensor | None = None
    attention_mask: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        if device.type == "cpu":
            return self
        moved: dict[str, Any] = {
            name: None if value is None else value.to(device, non_blocking=True) for name, value in vars(self).items()
        }
        return Batch(**moved)


class GPTDataset:
    """An endless series of training samples: `dataset[number]` int64 [s + 1]. Ids are checked when read."""

    def __init__(self, sources: list[DataSource], seq_length: int, vocab_size: int, seed: int, cache: str | Path):
        self.seq_length, self.vocab_size = seq_length, vocab_size
        self._datasets = [IndexedDataset(source.prefix) for source in sources]
        used = [source.weight > 0 for source in sources]
        self._indices = [
            cached_sample_index(dataset, seq_length, seed, cache) if use else None
            for dataset, use in zip(self._datasets, used, strict=True)
        ]
        self._blend = Blend([source.weight for source in sources]) if len(sources) > 1 else None

    def __getitem__(self, number: int) -> np.ndarray:
        source, within = self._blend.locate(number) if self._blend else (0, number)
        index = self._indices[source]
        if index is None:
            raise IndexError(f"sample {number} falls on a source of weight 0")
        sample = index.sample(within)
        return read_sample(self._datasets[source], index.documents, index.starts, sample, self.seq_length, self.vocab_size)

    def describe(self, samples: int) -> list[str]:
        """One line per source: how many of the run's samples it gives, and how often each is seen."""
        lines = []
        for number, (dataset, index) in enumerate(zip(self._datasets, self._indices, strict=True)):
            share = self._blend.counts[number] / self._blend.period if self._blend else 1.0
            given, have = round(share * samples), len(index) if index else 0
            epochs = f"{given / have:.2f} epochs of {have}" if have else "none"
            lines.append(f"{dataset.prefix}: {given} samples ({epochs})")
        return lines


class ValidationSet:
    """Samples in the order of the files, each once: the same for every evaluation."""

    def __init__(self, sources: list[DataSource], seq_length: int, vocab_size: int):
        self.seq_length, self.vocab_size = seq_length, vocab_size
        self._datasets = [IndexedDataset(source.prefix) for source in sources]
        self._indices = []
        for dataset in self._datasets:
            try:
                self._indices.append(build_sample_index(dataset.sequence_lengths, seq_length, 0, shuffle=False))
            except DataError as error:
                raise DataError(f"{dataset.prefix}.bin: {error}") from None

    def __len__(self) -> int:
        return sum(len(index) for index in self._indices)

    def __getitem__(self, number: int) -> np.ndarray:
        for dataset, index in zip(self._datasets, self._indices, strict=True):
            if number < len(index):
                return read_sample(dataset, index.documents, index.starts, number, self.seq_length, self.vocab_size)
            number -= len(index)
        raise IndexError(number)


def read_sample(
    dataset: IndexedDataset, documents: np.ndarray, starts: np.ndarray, sample: int, seq_length: int, vocab_size: int
) -> np.ndarray:
    """int64 [s + 1]. Raises DataError for an id at or beyond the vocabulary."""
    place, offset = (int(v) for v in starts[sample])
    pieces, missing = [], seq_length + 1
    while missing:
        sequence = int(documents[place])
        length = min(missing, int(dataset.sequence_lengths[sequence]) - offset)
        pieces.append(dataset.get(sequence, offset, length))
        missing -= length
        place, offset = place + 1, 0
    tokens = np.concatenate(pieces).astype(np.int64)
    if tokens.max() >= vocab_size or tokens.min() < 0:
        raise DataError(
            f"{dataset.prefix}.bin has token id {tokens.max() if tokens.max() >= vocab_size else tokens.min()} in sample "
            f"{sample}, but model.vocab_size is {vocab_size}; use the tokenizer the file was written with, or set vocab_size"
        )
    return tokens


def make_batch(samples: list[np.ndarray], places: list[int], data: DataConfig, counted: list[bool] | None = None) -> Batch:
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
    return Batch(tokens, labels, loss_mask, torch.tensor(places), position_ids, attention_mask)
