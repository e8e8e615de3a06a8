"""A SentencePiece .model file with the methods of HF `tokenizers`; needs the extra `sentencepiece`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import DataError


@dataclass(frozen=True)
class _Encoding:
    ids: list[int]


class SentencePieceModel:
    """The model, and a T5's 100 sentinels after its own pieces, in T5's order: <extra_id_0> is the last id."""

    def __init__(self, path: str | Path):
        try:
            from sentencepiece import SentencePieceProcessor  # pyright: ignore[reportMissingImports]  an extra
        except ImportError as error:
            raise DataError(f"{path} is a SentencePiece model: pip install 'fuseline[sentencepiece]' ({error})") from None
        try:
            self._model: Any = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise DataError(f"tokenizer {path} can't be read: {error}") from None
        self._pieces = self._model.get_piece_size()
        self._sentinels = {f"<extra_id_{n}>": self._pieces + 99 - n for n in range(100)}

    def encode(self, sequence: str, add_special_tokens: bool = True) -> _Encoding:
        """The ids; never with special tokens."""
        return _Encoding(self._model.encode(sequence))

    def encode_batch(self, input: Sequence[str], add_special_tokens: bool = True) -> list[_Encoding]:
        """The ids of each text."""
        return [_Encoding(ids) for ids in self._model.encode(list(input))]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text; sentinels are written out, or left out."""
        names = {id_: name for name, id_ in self._sentinels.items()}
        parts, plain = [], []
        for id_ in ids:
            if id_ < self._pieces:
                plain.append(int(id_))
                continue
            parts.append(self._model.decode(plain))
            plain = []
            if not skip_special_tokens:
                parts.append(names.get(int(id_), ""))
        return " ".join(part for part in (*parts, self._model.decode(plain)) if part)

    def token_to_id(self, token: str) -> int | None:
        """The id of a piece or sentinel; None for what is neither."""
        if token in self._sentinels:
            return self._sentinels[token]
        found = self._model.piece_to_id(token)
        return found if self._model.id_to_piece(found) == token else None

    def id_to_token(self, id: int) -> str | None:
        """The piece or sentinel of an id."""
        if id < self._pieces:
            return self._model.id_to_piece(id)
        return f"<extra_id_{self._pieces + 99 - id}>" if id < self._pieces + 100 else None

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        """Pieces, and sentinels."""
        return self._pieces + (100 if with_added_tokens else 0)
