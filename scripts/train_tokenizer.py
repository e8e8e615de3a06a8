"""JSONL -> a tokenizer with the special tokens of a family.

python scripts/train_tokenizer.py --input F.jsonl --vocab-size 4096 --output tokenizer.json [--family gpt|bert|t5] [--algorithm A]
"""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from pathlib import Path

from trainer.data.preprocess import read_jsonl
from trainer.data.tokenizer import ALGORITHMS, train_tokenizer
from trainer.errors import DataError


def main() -> int:
    """Parse, train, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, nargs="+")
    parser.add_argument("--json-key", default="text")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--family", choices=list(ALGORITHMS), default="gpt", help="whose special tokens it has (gpt)")
    parser.add_argument(
        "--algorithm",
        choices=list(ALGORITHMS.values()),
        help="bpe (byte-level) for gpt, wordpiece for bert, unigram for t5 when not given",
    )
    arguments = parser.parse_args()
    if Path(arguments.output).is_dir():
        parser.error(f"--output {arguments.output} is a folder; expected a file, such as tokenizer.json")
    try:
        Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
        texts = chain.from_iterable(read_jsonl(path, arguments.json_key) for path in arguments.input)
        tokenizer = train_tokenizer(texts, arguments.vocab_size, arguments.family, arguments.algorithm or "")
        tokenizer.save(arguments.output)
    except (DataError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{arguments.output}: {tokenizer.get_vocab_size()} tokens")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
