"""Samples out of one or several .bin/.idx pairs. What a sample is made of is said by an `index` and a `read` function:

index(dataset) -> SampleIndex or RangeIndex      len(index); index.sample(number): the number-th of an endless run
read(dataset, index, sample, number) -> sample   `number` seeds what is drawn at random (masks): each epoch draws anew
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from configs.run import DataSource
from trainer.data.blend import Blend
from trainer.data.indexed_dataset import IndexedDataset
from trainer.errors import DataError

MakeIndex = Callable[[IndexedDataset], Any]
Read = Callable[[IndexedDataset, Any, int, int], Any]


class TrainingSet:
    """An endless series of samples, `dataset[number]`, blended by weight."""

    def __init__(self, sources: list[DataSource], index: MakeIndex, read: Read):
        self._read = read
        self._datasets = [IndexedDataset(source.prefix) for source in sources]
        used = [source.weight > 0 for source in sources]
        self._indices = [index(data) if use else None for data, use in zip(self._datasets, used, strict=True)]
        self._blend = Blend([source.weight for source in sources]) if len(sources) > 1 else None

    def __getitem__(self, number: int) -> Any:
        source, within = self._blend.locate(number) if self._blend else (0, number)
        index = self._indices[source]
        if index is None:
            raise IndexError(f"sample {number} falls on a source of weight 0")
        return self._read(self._datasets[source], index, index.sample(within), number)

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

    def __init__(self, sources: list[DataSource], index: MakeIndex, read: Read):
        self._read = read
        self._datasets = [IndexedDataset(source.prefix) for source in sources]
        self._indices = []
        for dataset in self._datasets:
            try:
                self._indices.append(index(dataset))
            except DataError as error:
                raise DataError(f"{dataset.prefix}.bin: {error}") from None

    def __len__(self) -> int:
        return sum(len(index) for index in self._indices)

    def __getitem__(self, number: int) -> Any:
        within = number
        for dataset, index in zip(self._datasets, self._indices, strict=True):
            if within < len(index):
                return self._read(dataset, index, within, number)
            within -= len(index)
        raise IndexError(number)


def check_ids(tokens: Any, vocab_size: int, dataset: IndexedDataset, sample: int) -> None:
    """Raises DataError for an id at or beyond the vocabulary."""
    if len(tokens) and (tokens.max() >= vocab_size or tokens.min() < 0):
        raise DataError(
            f"{dataset.prefix}.bin has token id {tokens.max() if tokens.max() >= vocab_size else tokens.min()} in sample "
            f"{sample}, but model.vocab_size is {vocab_size}; use the tokenizer the file was written with, or set vocab_size"
        )
