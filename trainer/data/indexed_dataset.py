"""Megatron's .bin/.idx pair, read by memory map and written as a stream.

PREFIX.idx, little-endian: 9 bytes "MMIDIDX\\0\\0"; uint64 version 1; uint8 dtype code; uint64 S, the number of sequences;
uint64 D, the number of document boundaries (documents + 1); int32[S] tokens of each sequence; int64[S] byte offset of each
in the .bin; int64[D] the sequence each document starts with, first 0, last S. PREFIX.bin: all tokens, end to end.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from types import TracebackType

import numpy as np

from trainer.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries: 34 bytes
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}


def smallest_dtype(vocab_size: int) -> np.dtype:
    """uint16 where every id below `vocab_size` fits, else int32 (what Megatron can read of the possible ones)."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.int32)


class IndexedDataset:
    """The sequences of a .bin/.idx pair. Opening checks the whole pair; raises DataError naming the file and the fault."""

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        idx, bin_ = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        for path in (idx, bin_):
            if not path.is_file():
                raise DataError(f"{path} is missing; write the pair with scripts/preprocess_data.py")
        self.index_bytes = idx.read_bytes()
        self.dtype, sequences, boundaries = self._header(idx)
        self.sequence_lengths = np.frombuffer(self.index_bytes, np.dtype("<i4"), sequences, 34)
        self.sequence_pointers = np.frombuffer(self.index_bytes, np.dtype("<i8"), sequences, 34 + 4 * sequences)
        self.document_indices = np.frombuffer(self.index_bytes, np.dtype("<i8"), boundaries, 34 + 12 * sequences)
        self._check_arrays(idx, bin_)
        self._tokens = np.memmap(bin_, self.dtype, "r") if bin_.stat().st_size else np.empty(0, self.dtype)

    def _header(self, idx: Path) -> tuple[np.dtype, int, int]:
        data = self.index_bytes
        if len(data) < _HEADER.size:
            raise DataError(f"{idx} is truncated: {len(data)} bytes, shorter than its header of {_HEADER.size}")
        magic, version, code, sequences, boundaries = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise DataError(f"{idx} does not start with {MAGIC!r} but with {magic!r}; it is not a Megatron index")
        if version != 1 or code not in _DTYPES:
            raise DataError(
                f"{idx} has version {version} and dtype code {code}; expected version 1 and a code of {list(_DTYPES)}"
            )
        expected = _HEADER.size + 12 * sequences + 8 * boundaries
        if len(data) != expected:
            raise DataError(
                f"{idx} has {len(data)} bytes; its header ({sequences} sequences, {boundaries} document boundaries) "
                f"asks for {expected}: it is truncated or not of this format"
            )
        return np.dtype(_DTYPES[code]).newbyteorder("<"), sequences, boundaries

    def _check_arrays(self, idx: Path, bin_: Path) -> None:
        size, itemsize = bin_.stat().st_size, self.dtype.itemsize
        lengths = self.sequence_lengths.astype(np.int64)
        end = int((self.sequence_pointers[-1] + lengths[-1] * itemsize) if len(lengths) else 0)
        if end != size:
            raise DataError(
                f"{bin_} has {size} bytes but {idx} describes {end}; the two do not belong together or one is truncated"
            )
        if np.any(lengths < 0) or np.any(np.diff(self.sequence_pointers) != lengths[:-1] * itemsize):
            raise DataError(f"{idx} is damaged: its byte offsets don't follow from its sequence lengths")
        documents = self.document_indices
        if not len(documents) or documents[0] != 0 or documents[-1] != len(lengths) or np.any(np.diff(documents) < 0):
            raise DataError(f"{idx} is damaged: its document boundaries don't run from 0 to {len(lengths)}")

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, sequence: int) -> np.ndarray:
        return self.get(sequence)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [offset, offset + length) of a sequence; to its end where `length` is None."""
        whole = int(self.sequence_lengths[sequence])
        length = whole - offset if length is None else length
        if not 0 <= offset <= offset + length <= whole:
            raise IndexError(f"tokens {offset} to {offset + length} of sequence {sequence}, which has {whole}")
        start = int(self.sequence_pointers[sequence]) // self.dtype.itemsize + offset
        return self._tokens[start : start + length]

    def span(self, begin: int, end: int) -> np.ndarray:
        """Tokens [begin, end) of the whole file."""
        return self._tokens[begin:end]

    def sentences(self, begin: int, end: int) -> np.ndarray:
        """The tokens of sequences [begin, end), end to end."""
        first = int(self.sequence_pointers[begin]) // self.dtype.itemsize
        last = int(self.sequence_pointers[end - 1]) // self.dtype.itemsize + int(self.sequence_lengths[end - 1])
        return self._tokens[first:last]


class IndexedDatasetBuilder:
    """Writes a pair as a stream: memory is 16 bytes per sequence. The files get their names when `finalize` succeeds."""

    def __init__(self, prefix: str | Path, dtype: np.dtype | type):
        self.prefix, self.dtype = str(prefix), np.dtype(dtype)
        if self.dtype not in _CODES:
            raise DataError(f"dtype {self.dtype} can't be stored; expected one of {[str(d) for d in _CODES]}")
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self._bin = open(f"{prefix}.bin.partial", "wb")  # noqa: SIM115  closed by finalize or __exit__
        self._lengths: list[int] = []
        self._documents = [0]

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if not self._bin.closed:
            self._bin.close()
            os.unlink(f"{self.prefix}.bin.partial")

    def add_item(self, tokens: np.ndarray | list[int]) -> None:
        """Append one sequence to the current document. Raises DataError for an id that the dtype can't hold."""
        wide = np.asarray(tokens, np.int64 if self.dtype.kind in "iu" else self.dtype)
        if self.dtype.kind in "iu" and wide.size:
            limits = np.iinfo(self.dtype)
            if wide.min() < limits.min or wide.max() > limits.max:
                raise DataError(
                    f"token ids {wide.min()} to {wide.max()} do not fit in {self.dtype}; "
                    "choose the dtype from the vocabulary size including added tokens"
                )
        self._bin.write(wide.astype(self.dtype.newbyteorder("<")).tobytes())
        self._lengths.append(len(wide))

    def end_document(self) -> None:
        """Close the current document."""
        self._documents.append(len(self._lengths))

    def finalize(self) -> None:
        """Write the index and give both files their names."""
        self._bin.close()
        lengths = np.asarray(self._lengths, np.dtype("<i4"))
        pointers = np.zeros(len(lengths), np.dtype("<i8"))
        np.cumsum(lengths[:-1].astype(np.int64) * self.dtype.itemsize, out=pointers[1:])
        with open(f"{self.prefix}.idx.partial", "wb") as idx:
            idx.write(_HEADER.pack(MAGIC, 1, _CODES[self.dtype], len(lengths), len(self._documents)))
            for array in (lengths, pointers, np.asarray(self._documents, np.dtype("<i8"))):
                idx.write(array.tobytes())
        os.replace(f"{self.prefix}.bin.partial", f"{self.prefix}.bin")
        os.replace(f"{self.prefix}.idx.partial", f"{self.prefix}.idx")
