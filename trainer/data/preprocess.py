"""JSONL -> .bin/.idx: texts are read, split into sentences where that is asked for, and encoded in several processes."""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from trainer.data.indexed_dataset import IndexedDatasetBuilder, smallest_dtype
from trainer.data.tokenizer import TextTokenizer, end_of_document, load_tokenizer
from trainer.errors import DataError

_BATCH = 512  # documents at a time
# A sentence ends with . ! or ? (and what closes it), before a space and what can start one; or with an empty line.
_SENTENCE_END = re.compile(r"""(?<=[.!?])(?:["')\]]*)\s+(?=["'(\[]*[A-Z0-9])|\n\s*\n""")


@dataclass
class PreprocessReport:
    """What was written. `end_token`: whether one stands after each document."""

    documents: int = 0
    empty_documents: int = 0
    sentences: int = 0
    tokens: int = 0
    end_token: bool = False


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


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, by its punctuation and empty lines: a rule for any language that writes them so."""
    found, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        found.append(text[start : match.end()].strip())
        start = match.end()
    found.append(text[start:].strip())
    return [sentence for sentence in found if sentence]


def encode_documents(
    texts: Iterable[str],
    tokenizer: TextTokenizer,
    prefix: str | Path,
    *,
    append_eod: bool,
    sentences: bool = False,
    done: Callable[[int], None] = lambda documents: None,
) -> PreprocessReport:
    """Write each text as one document. Empty texts are dropped and counted; none left is a DataError.

    Streams: some texts at a time are encoded, in parallel, by the tokenizer's own threads. `sentences`: each sentence is a
    sequence of its own. `done` is told how many documents are written. With `append_eod` an end-of-document token follows each,
    where the tokenizer has one.
    """
    return _write(
        ((part, _encode(tokenizer, part, sentences)) for part in _parts(texts)), tokenizer, prefix, append_eod, done
    )


def encode_in_processes(
    texts: Iterable[str],
    tokenizer_path: str,
    prefix: str | Path,
    *,
    workers: int,
    append_eod: bool,
    sentences: bool = False,
    done: Callable[[int], None] = lambda documents: None,
) -> PreprocessReport:
    """The same, with the same result, in several processes."""
    tokenizer = load_tokenizer(tokenizer_path)
    if workers == 1:
        return encode_documents(texts, tokenizer, prefix, append_eod=append_eod, sentences=sentences, done=done)
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _start_worker, (tokenizer_path, sentences)) as pool:
        encoded = pool.imap(_encode_part, _parts(texts))
        return _write(encoded, tokenizer, prefix, append_eod, done)


_Part = tuple[list[str], list[list[list[int]]]]  # texts, and for each the ids of its sentences
_worker: tuple[TextTokenizer, bool] | None = None


def _start_worker(tokenizer_path: str, sentences: bool) -> None:
    global _worker
    _worker = load_tokenizer(tokenizer_path), sentences


def _encode_part(part: list[str]) -> _Part:
    assert _worker is not None
    return part, _encode(_worker[0], part, _worker[1])


def _parts(texts: Iterable[str]) -> Iterator[list[str]]:
    texts = iter(texts)
    while part := list(islice(texts, _BATCH)):
        yield part


def _encode(tokenizer: TextTokenizer, part: list[str], sentences: bool) -> list[list[list[int]]]:
    """For each text the ids of its sentences, or of itself as the only one; without empty ones."""
    pieces = [split_sentences(text) if sentences else [text] for text in part]
    encoded = iter(tokenizer.encode_batch([p for piece in pieces for p in piece], add_special_tokens=False))
    ids = [[next(encoded).ids for _ in piece] for piece in pieces]
    return [[sentence for sentence in document if sentence] for document in ids]


def _write(
    parts: Iterable[_Part], tokenizer: TextTokenizer, prefix: str | Path, append_eod: bool, done: Callable[[int], None]
) -> PreprocessReport:
    eod = end_of_document(tokenizer) if append_eod else None
    report = PreprocessReport(end_token=eod is not None)
    with IndexedDatasetBuilder(prefix, smallest_dtype(tokenizer.get_vocab_size(with_added_tokens=True))) as builder:
        for texts, documents in parts:
            for document in documents:
                if not document:
                    report.empty_documents += 1
                    continue
                document[-1] += [eod] if eod is not None else []
                for sentence in document:
                    builder.add_item(sentence)
                builder.end_document()
                report.documents += 1
                report.sentences += len(document)
                report.tokens += sum(map(len, document))
            done(len(texts))
        if not report.documents:
            raise DataError(
                f"no document has any text ({report.empty_documents} empty); nothing was written to {prefix}.bin"
            )
        builder.finalize()
    return report
