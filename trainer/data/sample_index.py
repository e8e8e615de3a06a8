"""Which tokens make which sample.

Of a GPT or a T5: the documents are shuffled once and laid end to end; sample i is the s + 1 tokens from i * s on (inputs and
shifted labels share one array). Of a BERT: a range of a document's tokens, or of its sentences. Every epoch visits each sample
once, in an order of its own. So sample number k means the same tokens however long the run is, and how many processes it has: no
sample is seen more than ceil(epochs) times.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.indexed_dataset import IndexedDataset
from trainer.errors import DataError


@dataclass(frozen=True)
class SampleIndex:
    """documents: sequence ids in their shuffled order; starts int64 [n + 1, 2]: (place in documents, token offset)."""

    documents: np.ndarray
    starts: np.ndarray
    seed: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def sample(self, number: int) -> int:
        """The sample that is seen as the `number`-th of an endless run."""
        return sample_of(number, len(self), self.seed)


@dataclass(frozen=True)
class RangeIndex:
    """ranges int64 [n, 2]: each sample's tokens, or its sentences, [begin, end)."""

    ranges: np.ndarray
    seed: int

    def __len__(self) -> int:
        return len(self.ranges)

    def sample(self, number: int) -> int:
        """The sample that is seen as the `number`-th of an endless run."""
        return sample_of(number, len(self), self.seed)


def sample_of(number: int, samples: int, seed: int) -> int:
    """The sample at a place of an endless run of epochs, each in an order of its own."""
    epoch, place = divmod(number, samples)
    return int(_order(samples, seed, epoch)[place])


@functools.lru_cache(maxsize=4)
def _order(samples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, 1, epoch])).permutation(samples)


def build_sample_index(lengths: np.ndarray, seq_length: int, seed: int, *, shuffle: bool = True) -> SampleIndex:
    """The index of sequences with these `lengths` (tokens). Raises DataError where they don't fill one sample."""
    lengths = np.asarray(lengths, np.int64)  # 64 bits: the total may exceed 2^31
    order = np.arange(len(lengths), dtype=np.int64)
    if shuffle:
        order = np.random.Generator(np.random.PCG64([seed, 0])).permutation(order)
    ends = np.cumsum(lengths[order])
    total = int(ends[-1]) if len(ends) else 0
    samples = (total - 1) // seq_length
    if samples < 1:
        raise DataError(f"{total} tokens don't fill one sample of seq_length {seq_length} + 1")
    first_token = np.arange(samples + 1, dtype=np.int64) * seq_length
    place = np.searchsorted(ends, first_token, side="right")  # documents of length 0 are stepped over
    offset = first_token - (ends - lengths[order])[place]
    return SampleIndex(order, np.stack([place, offset], 1), seed)


def span_ranges(dataset: IndexedDataset, room: int) -> np.ndarray:
    """int64 [n, 2]: each document cut into spans of at most `room` tokens, by their place in the whole file.

    Raises DataError where there is no token.
    """
    boundaries = np.concatenate([[0], np.cumsum(dataset.sequence_lengths.astype(np.int64))])[dataset.document_indices]
    spans = -(-np.diff(boundaries) // room)  # of each document
    if not spans.sum():
        raise DataError("no document has any text")
    document = np.repeat(np.arange(len(spans)), spans)
    within = np.arange(len(document)) - np.repeat(np.cumsum(spans) - spans, spans)
    begin = boundaries[document] + within * room
    return np.stack([begin, np.minimum(begin + room, boundaries[document + 1])], 1)


def pair_ranges(dataset: IndexedDataset, room: int) -> np.ndarray:
    """int64 [n, 2]: runs of sentences of one document, each with at least two, and as many as fill `room` tokens.

    Raises DataError where no document has two sentences.
    """
    lengths, boundaries, found = dataset.sequence_lengths.tolist(), dataset.document_indices.tolist(), []
    for begin, end in itertools.pairwise(boundaries):
        start, tokens, count = begin, 0, 0
        for sentence in range(begin, end):
            tokens, count = tokens + lengths[sentence], count + (lengths[sentence] > 0)
            if count >= 2 and (tokens >= room or sentence + 1 == end):
                found.append((start, sentence + 1))
                start, tokens, count = sentence + 1, 0, 0
    if not found:
        raise DataError(
            "no usable document (need >= 2 sentences); write the file with preprocess_data.py --split-sentences, or set "
            "model.sentence_head=null"
        )
    return np.array(found, np.int64)


def cached_ranges(
    dataset: IndexedDataset, make: Callable[[IndexedDataset, int], np.ndarray], room: int, seed: int, cache: str | Path
) -> RangeIndex:
    """The ranges that `make` (span_ranges, pair_ranges) gives, from `cache`, or built and put there."""
    saved = _cached(dataset, f"{make.__name__}|{room}|v1", cache, lambda: {"ranges": make(dataset, room)})
    return RangeIndex(saved["ranges"], seed)


def cached_sample_index(dataset: IndexedDataset, seq_length: int, seed: int, cache: str | Path) -> SampleIndex:
    """The index from `cache`, or built and put there."""

    def build() -> dict[str, np.ndarray]:
        try:
            index = build_sample_index(dataset.sequence_lengths, seq_length, seed)
        except DataError as error:
            raise DataError(f"{error}; use more data or a shorter data.seq_length") from None
        return {"documents": index.documents, "starts": index.starts}

    saved = _cached(dataset, f"{seq_length}|{seed}|v1", cache, build)
    return SampleIndex(saved["documents"], saved["starts"], seed)


def _cached(
    dataset: IndexedDataset, settings: str, cache: str | Path, build: Callable[[], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Arrays from `cache`, or built and put there.

    The name is a hash of everything they depend on, the .idx file's content included. Any process that finds none builds them
    and renames them into place whole, so no barrier and no shared file system is needed, and no half file is seen.
    """
    digest = hashlib.sha256(dataset.index_bytes + f"|{settings}".encode()).hexdigest()[:24]
    path = Path(cache, f"samples-{digest}.npz")
    if path.is_file():
        with np.load(path, allow_pickle=False) as saved:
            return dict(saved)
    try:
        arrays: dict[str, Any] = build()
    except DataError as error:
        raise DataError(f"{dataset.prefix}.bin: {error}") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:
        np.savez(file, **arrays)
    os.replace(file.name, path)
    return arrays
