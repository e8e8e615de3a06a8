"""Samples of a BERT: one span of a document or a pair of its segments, with tokens masked (Devlin et al. 2019, arXiv:1810.04805).

    [CLS] span [SEP]                       without a sentence head: a document, cut into spans
    [CLS] segment [SEP] segment [SEP]      with one: consecutive sentences of a document, parted at a random place

Of the tokens that are masked 80 % become [MASK], 10 % a random token, 10 % stay. All that is random depends on the seed and the
number of the sample in the run alone: it is the same on every rank and after a resume, and new in each epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from configs.run import DataConfig, RunConfig
from trainer.data.batch import IGNORED, BertBatch, padded, padding_mask, stacked
from trainer.data.indexed_dataset import IndexedDataset
from trainer.data.sample_index import RangeIndex, cached_ranges, pair_ranges, span_ranges
from trainer.data.sources import TrainingSet, ValidationSet, check_ids
from trainer.data.tokenizer import Vocabulary, load_vocabulary
from trainer.errors import DataError


@dataclass(frozen=True)
class BertSample:
    """tokens, labels, token_types int64 [s]; labels are IGNORED where nothing is to be predicted; `length` without padding;
    `sentence` 1 where the second segment is from elsewhere, or the two are swapped."""

    tokens: np.ndarray
    labels: np.ndarray
    token_types: np.ndarray
    length: int
    sentence: int | None = None


def bert_training_set(config: RunConfig, cache: str | Path) -> TrainingSet:
    """Samples in an order of the run's seed."""

    def index(dataset: IndexedDataset) -> RangeIndex:
        _require_two_documents(config, dataset)
        return cached_ranges(dataset, _ranges(config), _room(config), config.training.seed, cache)

    return TrainingSet(config.data.sources("train"), index, BertReader(config, config.training.seed))


def bert_validation_set(config: RunConfig) -> ValidationSet:
    """Samples in the order of the files, masked the same way every time."""

    def index(dataset: IndexedDataset) -> RangeIndex:
        _require_two_documents(config, dataset)
        return RangeIndex(_ranges(config)(dataset, _room(config)), 0)

    return ValidationSet(config.data.sources("valid"), index, BertReader(config, 0))


def _require_two_documents(config: RunConfig, dataset: IndexedDataset) -> None:
    tokens = np.concatenate([[0], np.cumsum(dataset.sequence_lengths.astype(np.int64))])[dataset.document_indices]
    if config.model.sentence_head == "next_sentence" and np.count_nonzero(np.diff(tokens)) < 2:
        raise DataError(f"{dataset.prefix}.bin has only one document with text, so no sentence can come from another one")


def _ranges(config: RunConfig) -> Callable[[IndexedDataset, int], np.ndarray]:
    return span_ranges if config.model.sentence_head is None else pair_ranges


def _room(config: RunConfig) -> int:
    """Tokens of a sample beside [CLS] and [SEP]."""
    return config.data.seq_length - (2 if config.model.sentence_head is None else 3)


class BertReader:
    """Reads a sample and masks it."""

    def __init__(self, config: RunConfig, seed: int):
        self.seed, self.room, self.seq_length = seed, _room(config), config.data.seq_length
        self.head, self.data, self.vocab_size = config.model.sentence_head, config.data, config.model.vocab_size
        self.vocabulary = load_vocabulary(config)
        self.cls, self.sep = self.vocabulary.special("cls"), self.vocabulary.special("sep")
        self.pad, self.mask = self.vocabulary.special("pad"), self.vocabulary.special("mask")

    def __call__(self, dataset: IndexedDataset, index: RangeIndex, sample: int, number: int) -> BertSample:
        """The sample, the same whenever and wherever it is read."""
        random = np.random.Generator(np.random.PCG64([self.seed, 2, number]))
        room = self.room
        if random.random() < self.data.short_sequence_fraction:
            room = int(random.integers(2, room + 1))
        if self.head is None:
            segments, sentence = [dataset.span(*index.ranges[sample])[:room]], None
        else:
            first, second, sentence = self._pair(dataset, index.ranges[sample], random)
            segments = truncate_pair(first, second, room, random)
        tokens, token_types = self._join(segments)
        check_ids(tokens, self.vocab_size, dataset, sample)
        masked, labels = mask_tokens(tokens, self.vocabulary, self.mask, self.data, random)
        whole = self.seq_length
        arrays = padded(masked, whole, self.pad), padded(labels, whole, IGNORED), padded(token_types, whole, 0)
        return BertSample(*arrays, len(tokens), sentence)

    def _pair(
        self, dataset: IndexedDataset, sentences: np.ndarray, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """(first segment, second, whether they do not follow each other)."""
        begin, end = (int(v) for v in sentences)
        filled = begin + np.flatnonzero(dataset.sequence_lengths[begin:end])  # neither side of the cut may be empty
        cut = int(random.integers(filled[0] + 1, filled[-1] + 1))
        first, second = dataset.sentences(begin, cut), dataset.sentences(cut, end)
        if random.random() < 0.5:
            return first, second, 0
        if self.head == "sentence_order":
            return second, first, 1
        return first, self._from_another_document(dataset, begin, random), 1

    def _from_another_document(self, dataset: IndexedDataset, sentence: int, random: np.random.Generator) -> np.ndarray:
        """Sentences of any other document with text, as many as fit."""
        boundaries = dataset.document_indices
        own = int(np.searchsorted(boundaries, sentence, side="right")) - 1
        while True:
            other = int(random.integers(0, len(boundaries) - 2))
            other += other >= own
            begin, end = int(boundaries[other]), int(boundaries[other + 1])
            if begin < end:
                found = dataset.sentences(int(random.integers(begin, end)), end)[: self.room]
                if len(found):
                    return found

    def _join(self, segments: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        pieces, types = [np.array([self.cls])], [np.zeros(1, np.int64)]
        for kind, segment in enumerate(segments):
            pieces += [segment.astype(np.int64), np.array([self.sep])]
            types.append(np.full(len(segment) + 1, kind))
        return np.concatenate(pieces), np.concatenate(types)


def truncate_pair(first: np.ndarray, second: np.ndarray, room: int, random: np.random.Generator) -> list[np.ndarray]:
    """Both cut to `room` tokens together: the longer one loses a token, at either end, until they fit. Neither becomes empty."""
    cuts = [[0, len(first)], [0, len(second)]]
    while sum(end - begin for begin, end in cuts) > max(room, 2):
        longer = cuts[0] if cuts[0][1] - cuts[0][0] > cuts[1][1] - cuts[1][0] else cuts[1]
        if random.random() < 0.5:
            longer[0] += 1
        else:
            longer[1] -= 1
    return [first[slice(*cuts[0])], second[slice(*cuts[1])]]


def mask_tokens(
    tokens: np.ndarray, vocabulary: Vocabulary, mask: int, data: DataConfig, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens with some masked, labels). Special tokens are never masked, nor drawn as a random token.

    `masked_fraction` of the others, rounded, at least one. Units (tokens, or whole words) are visited in random order, each with
    up to `max_ngram` - 1 of its followers; what would be too many is passed over, as in BERT's own create_pretraining_data.py.
    """
    tokens, labels = tokens.copy(), np.full(len(tokens), IGNORED, np.int64)
    candidates = np.flatnonzero(~vocabulary.is_special[tokens])
    if not len(candidates):
        return tokens, labels
    units = _units(candidates, vocabulary.continues_word[tokens[candidates]] if data.whole_word_masking else None)
    budget = max(1, round(len(candidates) * data.masked_fraction))
    sizes = np.arange(1, data.max_ngram + 1)
    weights = (1.0 / sizes) / (1.0 / sizes).sum()
    chosen: set[int] = set()
    for unit in random.permutation(len(units)):
        if len(chosen) >= budget:
            break
        count = int(random.choice(sizes, p=weights)) if data.max_ngram > 1 else 1
        for n in range(count, 0, -1):  # fewer followers where all of them would be too many
            places = np.concatenate(units[unit : unit + n])
            if len(chosen) + len(places) <= budget and chosen.isdisjoint(places.tolist()):
                chosen.update(places.tolist())
                break
    if not chosen:  # every word is longer than the budget: a sample without any loss would teach nothing
        chosen = set(units[int(random.integers(len(units)))][:budget].tolist())
    places = np.array(sorted(chosen))
    labels[places] = tokens[places]
    what = random.random(len(places))
    tokens[places[what < 0.8]] = mask
    swapped = places[what >= 0.9]
    tokens[swapped] = random.choice(vocabulary.ordinary, len(swapped))
    return tokens, labels


def _units(candidates: np.ndarray, continues: np.ndarray | None) -> list[np.ndarray]:
    """The places of each token, or with `continues` of each whole word; special tokens part words."""
    if continues is None:
        return list(candidates[:, None])
    starts = ~continues
    starts[0] = True
    starts[1:] |= np.diff(candidates) > 1
    return np.split(candidates, np.flatnonzero(starts)[1:])


def make_bert_batch(
    samples: list[BertSample], places: list[int], data: DataConfig, counted: list[bool] | None = None
) -> BertBatch:
    """A batch of samples at these places of the global batch; `counted` False: no loss (padding of a batch)."""
    tokens, labels, types = stacked(samples, "tokens", "labels", "token_types")
    weight = torch.ones(len(samples)) if counted is None else torch.tensor(counted, dtype=torch.float32)
    loss_mask = (labels != IGNORED).float() * weight[:, None]
    padding = padding_mask(samples, tokens.shape[1])
    sentences = [s.sentence for s in samples if s.sentence is not None]
    pair = {"sentence_labels": torch.tensor(sentences), "counted": weight} if sentences else {}
    return BertBatch(torch.tensor(places), tokens, labels, loss_mask, types, padding, **pair)
