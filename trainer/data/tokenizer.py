"""Tokenizers (HF `tokenizers`: byte-level BPE, WordPiece, Unigram; SentencePiece models), and what a family needs of one."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from configs.run import RunConfig
from trainer.data.sentencepiece_model import SentencePieceModel
from trainer.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"
SENTINELS = 100

# What each family calls its special tokens; of several names the first that a tokenizer has. Ids in this order, from 0.
SPECIAL_TOKENS = {
    "gpt": {"end": (END_OF_DOCUMENT, "</s>", "<|end_of_text|>")},
    "bert": {
        "pad": ("[PAD]", "<pad>"),
        "unknown": ("[UNK]", "<unk>"),
        "cls": ("[CLS]", "<s>"),
        "sep": ("[SEP]", "</s>"),
        "mask": ("[MASK]", "<mask>"),
    },
    "t5": {"pad": ("<pad>", "[PAD]"), "end": ("</s>", END_OF_DOCUMENT, "[SEP]"), "unknown": ("<unk>", "[UNK]")},
}
ALGORITHMS = {"gpt": "bpe", "bert": "wordpiece", "t5": "unigram"}  # what `train_tokenizer` takes unless told otherwise


TextTokenizer = Tokenizer | SentencePieceModel


def train_tokenizer(texts: Iterable[str], vocab_size: int, family: str = "gpt", algorithm: str = "") -> Tokenizer:
    """A tokenizer of `vocab_size` tokens or fewer, with the special tokens of `family` first, a T5's sentinels last.

    `algorithm`: bpe (byte-level), wordpiece or unigram; ALGORITHMS[family] when not given. Raises DataError for a vocabulary that
    is too small.
    """
    names = [names[0] for names in SPECIAL_TOKENS[family].values()]
    sentinels = [f"<extra_id_{n}>" for n in reversed(range(SENTINELS))] if family == "t5" else []
    algorithm, room = algorithm or ALGORITHMS[family], vocab_size - len(sentinels)
    alphabet = pre_tokenizers.ByteLevel.alphabet() if algorithm == "bpe" else []
    smallest = len(alphabet) + len(names) + len(sentinels)
    if room < len(alphabet) + len(names) or room < 1:
        what = f"every byte and {', '.join(names)}" if alphabet else ", ".join(names)
        what += f", {SENTINELS} sentinels" if sentinels else ""
        raise DataError(f"vocabulary of {vocab_size}; one of {algorithm} for {family} has at least {smallest}: {what}")
    unknown = next((name for name in names if name in SPECIAL_TOKENS["bert"]["unknown"]), names[0])
    tokenizer, trainer = _MAKERS[algorithm](room, names, unknown, alphabet)
    try:
        tokenizer.train_from_iterator(texts, trainer)
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(f"vocabulary of {vocab_size}: {error}") from None
    if tokenizer.get_vocab_size() > room:  # WordPiece takes every character, whatever the size
        raise DataError(f"vocabulary of {vocab_size}; these texts have {tokenizer.get_vocab_size()} characters")
    tokenizer.add_special_tokens(sentinels)
    return tokenizer


def _bpe(size: int, names: list[str], unknown: str, alphabet: list[str]) -> tuple[Tokenizer, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    return tokenizer, trainer


def _wordpiece(size: int, names: list[str], unknown: str, alphabet: list[str]) -> tuple[Tokenizer, Any]:
    tokenizer = Tokenizer(models.WordPiece(unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return tokenizer, trainers.WordPieceTrainer(vocab_size=size, special_tokens=names, show_progress=False)


def _unigram(size: int, names: list[str], unknown: str, alphabet: list[str]) -> tuple[Tokenizer, Any]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer, trainers.UnigramTrainer(vocab_size=size, special_tokens=names, unk_token=unknown, show_progress=False)


_MAKERS = {"bpe": _bpe, "wordpiece": _wordpiece, "unigram": _unigram}


def load_tokenizer(path: str | Path) -> TextTokenizer:
    """The tokenizer in a tokenizer.json, or the SentencePiece model in a .model file. Raises DataError."""
    if not Path(path).is_file():
        raise DataError(f"tokenizer {path} is missing")
    if Path(path).suffix == ".model":
        return SentencePieceModel(path)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception for every fault of the file
        raise DataError(f"tokenizer {path} can't be read: {error}") from None


def end_of_document(tokenizer: TextTokenizer) -> int | None:
    """The id of the token after a document; None where the tokenizer has none."""
    found = (tokenizer.token_to_id(name) for name in SPECIAL_TOKENS["gpt"]["end"])
    return next((id_ for id_ in found if id_ is not None), None)


@dataclass(frozen=True)
class Vocabulary:
    """What the datasets of a family know of the tokenizer. `is_special`, `continues_word`: boolean [vocabulary]; `ordinary`: the
    ids that are not special."""

    tokenizer: TextTokenizer
    family: str
    path: str
    is_special: np.ndarray
    continues_word: np.ndarray
    ordinary: np.ndarray

    def special(self, kind: str) -> int:
        """The id of a special token: pad, cls, sep, mask, end. Raises DataError where the tokenizer has none."""
        names = SPECIAL_TOKENS[self.family][kind]
        for name in names:
            found = self.tokenizer.token_to_id(name)
            if found is not None:
                return found
        raise DataError(
            f"tokenizer {self.path} has no {' or '.join(names)}, which {self.family} needs; train one with "
            f"scripts/train_tokenizer.py --family {self.family}"
        )

    def sentinels(self, count: int) -> np.ndarray:
        """int64 [count]: the ids of <extra_id_0>, <extra_id_1>, … Raises DataError where there are not so many."""
        ids = [self.tokenizer.token_to_id(f"<extra_id_{n}>") for n in range(count)]
        if None in ids:
            raise DataError(
                f"tokenizer {self.path} has {ids.index(None)} sentinels (<extra_id_0>, …), but a sample has {count} spans; "
                "shorten data.seq_length, lower data.masked_fraction, or train one with scripts/train_tokenizer.py --family t5"
            )
        return np.array(ids, np.int64)


def load_vocabulary(config: RunConfig) -> Vocabulary:
    """The vocabulary of `data.tokenizer`. Raises DataError where it is missing or larger than `model.vocab_size`."""
    assert config.data.tokenizer is not None, "configs refuse a BERT or T5 without"
    vocabulary = _load_vocabulary(config.data.tokenizer, config.model.family)
    if len(vocabulary.is_special) > config.model.vocab_size:
        raise DataError(
            f"tokenizer {config.data.tokenizer} has {len(vocabulary.is_special)} tokens, more than model.vocab_size "
            f"{config.model.vocab_size}; set that to {len(vocabulary.is_special)}"
        )
    return vocabulary


@functools.lru_cache(maxsize=4)
def _load_vocabulary(path: str, family: str) -> Vocabulary:
    return vocabulary_of(load_tokenizer(path), family, path)


def vocabulary_of(tokenizer: TextTokenizer, family: str, path: str) -> Vocabulary:
    """The vocabulary of a tokenizer; `path` names it in messages."""
    tokens = [tokenizer.id_to_token(n) or "" for n in range(tokenizer.get_vocab_size())]
    names = {name for kinds in SPECIAL_TOKENS.values() for names in kinds.values() for name in names}
    if isinstance(tokenizer, Tokenizer):
        names |= {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    special = np.array([token in names or token.startswith("<extra_id_") or not token for token in tokens])
    # WordPiece marks every piece of a word but the first; byte-level BPE and SentencePiece mark the first, by its space.
    if isinstance(tokenizer, Tokenizer) and isinstance(tokenizer.model, models.WordPiece):
        continues = np.array([token.startswith(tokenizer.model.continuing_subword_prefix) for token in tokens])
    else:
        continues = np.array([not token.startswith(("\u0120", "\u010a", "\u2581")) for token in tokens])
    return Vocabulary(tokenizer, family, path, special, continues, np.flatnonzero(~special))
