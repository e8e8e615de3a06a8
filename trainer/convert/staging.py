"""A folder that is there whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import ConvertError


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A new folder beside `out` to write into; it gets the name when the block ends well, and is removed when it does not.

    Raises ConvertError where something is at `out` already.
    """
    if out.exists():
        raise ConvertError(f"{out} is there already; choose another folder, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{out.name}.partial-", dir=out.parent))
    partial.chmod(0o755)  # what mkdtemp makes is for its owner alone
    try:
        yield partial
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
