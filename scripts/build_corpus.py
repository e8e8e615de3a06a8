"""A corpus from text that every Python installation carries: its documentation topics and its standard library's sources.

python scripts/build_corpus.py --out corpus      writes corpus/train.jsonl and corpus/valid.jsonl, one document per line
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_SKIP = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "pydoc_data", "encodings"}


def documents() -> Iterator[str]:
    """Each documentation topic, then each source file of the standard library, in a fixed order."""
    try:
        from pydoc_data.topics import topics

        yield from (topics[name] for name in sorted(topics))
    except ImportError:  # some distributions leave it out; the sources are enough
        pass
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if not _SKIP & set(path.relative_to(library).parts[:-1]):
            yield path.read_text(encoding="utf-8", errors="replace")


def held_out(text: str) -> bool:
    """About one document in 25, by its content: the same split on every machine with the same documents."""
    return hashlib.sha256(text.encode()).digest()[0] < 10


def main() -> int:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="corpus", help="folder")
    arguments = parser.parse_args()
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    counts = {"train": 0, "valid": 0}
    with open(folder / "train.jsonl", "w") as train, open(folder / "valid.jsonl", "w") as valid:
        for text in documents():
            split, file = ("valid", valid) if held_out(text) else ("train", train)
            file.write(json.dumps({"text": text}) + "\n")
            counts[split] += len(text)
    print(f"{folder}: {counts['train']:,} characters to train on, {counts['valid']:,} held out")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
