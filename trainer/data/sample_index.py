"""Which tokens make which sample.

The documents are shuffled once and laid end to end; sample i is the s + 1 tokens from i * s on (inputs and shifted labels
share one array). Every epoch visits each sample once, in an order of its own. So sample number k means the same tokens
however long the run is, and how many processes it has: no sample is seen more than ceil(epochs) times.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

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
        epoch, place = divmod(number, len(self))
        return int(_order(len(self), self.seed, epoch)[place])


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


def cached_sample_index(dataset: IndexedDataset, seq_length: int, seed: int, cache: str | Path) -> SampleIndex:
    """The index from `cache`, or built and put there.

    The name is a hash of everything the index depends on, the .idx file's content included. Any process that finds none
    builds it and renames it into place whole, so no barrier and no shared file system is needed, and no half file is seen.
    """
    digest = hashlib.sha256(dataset.index_bytes + f"|{seq_length}|{seed}|v1".encode()).hexdigest()[:24]
    path = Path(cache, f"samples-{digest}.npz")
    if path.is_file():
        with np.load(path, allow_pickle=False) as saved:
            return SampleIndex(saved["documents"], saved["starts"], seed)
    try:
        index = build_sample_index(dataset.sequence_lengths, seq_length, seed)
    except DataError as error:
        raise DataError(f"{dataset.prefix}.bin: {error}; use more data or a shorter data.seq_length") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:
        np.savez(file, documents=index.documents, starts=index.starts)
    os.replace(file.name, path)
    return index
