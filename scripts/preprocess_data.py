"""JSONL -> a .bin/.idx pair.  python scripts/preprocess_data.py --input F.jsonl --tokenizer tokenizer.json --output-prefix P"""

from __future__ import annotations

import argparse
import sys
from itertools import chain

from trainer.data.tokenizer import encode_documents, load_tokenizer, read_jsonl
from trainer.errors import DataError


def main() -> int:
    """Parse, encode, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True, nargs="+", help="JSONL files, one object per line")
    parser.add_argument("--json-key", default="text", help="the key of the text")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json of HF tokenizers")
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--no-append-eod", action="store_true", help="no end-of-document token after each text")
    arguments = parser.parse_args()
    try:
        texts = chain.from_iterable(read_jsonl(path, arguments.json_key) for path in arguments.input)
        tokenizer = load_tokenizer(arguments.tokenizer)
        report = encode_documents(texts, tokenizer, arguments.output_prefix, append_eod=not arguments.no_append_eod)
    except (DataError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(
        f"{arguments.output_prefix}: {report.documents} documents, {report.tokens} tokens, {report.empty_documents} empty dropped"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
