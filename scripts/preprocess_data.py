"""JSONL -> a .bin/.idx pair.

python scripts/preprocess_data.py --input F.jsonl --tokenizer tokenizer.json --output-prefix P [--split-sentences] [--workers 4]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainer.data.preprocess import encode_in_processes, read_jsonl
from trainer.errors import DataError


def main() -> int:
    """Parse, encode, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, nargs="+", help="JSONL files, one object per line")
    parser.add_argument("--json-key", default="text", help="the key of the text")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json of HF tokenizers, or a SentencePiece .model")
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--no-append-eod", action="store_true", help="no end-of-document token after each text")
    parser.add_argument(
        "--split-sentences", action="store_true", help="a sequence per sentence: for bert with a sentence head"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes (1)")
    arguments = parser.parse_args()
    if arguments.workers < 1:
        parser.error("--workers must be 1 or more")
    try:
        with _progress() as progress:
            task = progress.add_task("documents", total=sum(map(_lines, arguments.input)))
            report = encode_in_processes(
                _texts(arguments.input, arguments.json_key),
                arguments.tokenizer,
                arguments.output_prefix,
                workers=arguments.workers,
                append_eod=not arguments.no_append_eod,
                sentences=arguments.split_sentences,
                done=lambda count: progress.advance(task, count),
            )
    except (DataError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    sentences = f"{report.sentences} sentences, " if arguments.split_sentences else ""
    print(
        f"{arguments.output_prefix}: {report.documents} documents, {sentences}{report.tokens} tokens, "
        f"{report.empty_documents} empty dropped"
    )
    if not report.end_token and not arguments.no_append_eod:
        print("note: this tokenizer has no end-of-document token, so none stands after the documents")
    return 0


def _texts(paths: list[str], key: str) -> Iterator[str]:
    for path in paths:
        yield from read_jsonl(path, key)


def _lines(path: str) -> int:
    """Lines with anything in them."""
    with Path(path).open("rb") as file:
        return sum(1 for line in file if line.strip())


def _progress() -> Progress:
    """A bar on a terminal; nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


if __name__ == "__main__":
    raise SystemExit(main())
