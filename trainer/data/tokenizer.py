"""Byte-level BPE by HF tokenizers: train one, and encode JSONL into a .bin/.idx pair."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from trainer.data.indexed_dataset import IndexedDatasetBuilder, smallest_dtype
from trainer.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of exactly or fewer than `vocab_size` tokens; id 0 is the end of a document."""
    smallest = len(ByteLevel.alphabet()) + 1
    if vocab_size < smallest:
        raise DataError(
            f"vocabulary of {vocab_size}; a byte-level one has at least {smallest}: every byte and {END_OF_DOCUMENT}"
        )
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json. Raises DataError."""
    if not Path(path).is_file():
        raise DataError(f"tokenizer {path} is missing")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception for every fault of the file
        raise DataError(f"tokenizer {path} can't be read: {error}") from None


@dataclass
class PreprocessReport:
    """What was written."""

    documents: int = 0
    empty_documents: int = 0
    tokens: int = 0


def read_jsonl(path: str | Path, key: str) -> Iterator[str]:
    """The texts of a JSONL file, one object per line. Raises DataError naming the line."""
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{path}:{number} is not UTF-8: {error}") from None
            if not line.strip():
                continue
            try:
                text = json.loads(line)[key]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise DataError(f"{path}:{number} is not a JSON object with the key {key!r}: {error!r}") from None
            if isinstance(text, str) and not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
                raise DataError(f"{path}:{number}: the text holds half of a surrogate pair, which is not a character")
            if not isinstance(text, str):
                raise DataError(f"{path}:{number}: {key!r} is {type(text).__name__}, expected text")
            yield text


def encode_documents(
    texts: Iterable[str], tokenizer: Tokenizer, prefix: str | Path, *, append_eod: bool, batch: int = 512
) -> PreprocessReport:
    """Write each text as one document. Empty texts are dropped and counted; none left is a DataError.

    Streams: `batch` texts at a time are encoded, in parallel, by the tokenizer's own threads.
    """
    report, texts = PreprocessReport(), iter(texts)
    eod = tokenizer.token_to_id(END_OF_DOCUMENT)
    if append_eod and eod is None:
        raise DataError(f"the tokenizer has no {END_OF_DOCUMENT} token to append; train one with scripts/train_tokenizer.py")
    with IndexedDatasetBuilder(prefix, smallest_dtype(tokenizer.get_vocab_size(with_added_tokens=True))) as builder:
        while part := list(islice(texts, batch)):
            for encoding in tokenizer.encode_batch(part, add_special_tokens=False):
                ids = encoding.ids
                if not ids:
                    report.empty_documents += 1
                    continue
                builder.add_item([*ids, eod] if append_eod and eod is not None else ids)
                builder.end_document()
                report.documents += 1
                report.tokens += len(ids) + append_eod
        if not report.documents:
            raise DataError(
                f"no document has any text ({report.empty_documents} empty); nothing was written to {prefix}.bin"
            )
        builder.finalize()
    return report
