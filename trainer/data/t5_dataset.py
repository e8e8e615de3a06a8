"""Samples of a T5: spans of the text are taken out, and a sentinel stands for each (Raffel et al. 2020, arXiv:1910.10683, 3.1.4).

    text      Thank you for inviting me to your party last week .
    encoder   Thank you <extra_id_0> me to your party <extra_id_1> week . </s>
    targets   <extra_id_0> for inviting <extra_id_1> last </s>

Documents are laid end to end, as for a GPT; a sample is as many tokens of text as fill the encoder. What is random depends on the
seed and the number of the sample in the run alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from configs.families import t5_lengths, t5_spans
from configs.run import DataConfig, RunConfig
from trainer.data.batch import IGNORED, T5Batch, padded, padding_mask, stacked
from trainer.data.gpt_dataset import read_sample
from trainer.data.indexed_dataset import IndexedDataset
from trainer.data.sample_index import SampleIndex, build_sample_index, cached_sample_index
from trainer.data.sources import TrainingSet, ValidationSet
from trainer.data.tokenizer import load_vocabulary


@dataclass(frozen=True)
class T5Sample:
    """tokens int64 [s]; decoder_tokens, labels int64 [sd]; `length` of the encoder's tokens without padding."""

    tokens: np.ndarray
    decoder_tokens: np.ndarray
    labels: np.ndarray
    length: int


def t5_training_set(config: RunConfig, cache: str | Path) -> TrainingSet:
    """Samples in an order of the run's seed."""
    raw, seed = _raw_length(config), config.training.seed
    return TrainingSet(
        config.data.sources("train"), lambda d: cached_sample_index(d, raw, seed, cache), T5Reader(config, seed)
    )


def t5_validation_set(config: RunConfig) -> ValidationSet:
    """Samples in the order of the files, with the same spans taken out every time."""

    def index(dataset: IndexedDataset) -> SampleIndex:
        return build_sample_index(dataset.sequence_lengths, _raw_length(config), 0, shuffle=False)

    return ValidationSet(config.data.sources("valid"), index, T5Reader(config, 0))


def _raw_length(config: RunConfig) -> int:
    """Tokens of text in a sample."""
    return t5_lengths(config.data.seq_length, config.data.masked_fraction, config.data.mean_span_length)[0]


class T5Reader:
    """Reads a sample and takes spans out of it."""

    def __init__(self, config: RunConfig, seed: int):
        self.seed, self.data, self.vocab_size, self.raw = seed, config.data, config.model.vocab_size, _raw_length(config)
        self.masked, self.spans = t5_spans(self.raw, config.data.masked_fraction, config.data.mean_span_length)
        vocabulary = load_vocabulary(config)
        self.pad, self.end = vocabulary.special("pad"), vocabulary.special("end")
        self.sentinels = vocabulary.sentinels(self.spans)

    def __call__(self, dataset: IndexedDataset, index: SampleIndex, sample: int, number: int) -> T5Sample:
        """The sample, the same whenever and wherever it is read."""
        random = np.random.Generator(np.random.PCG64([self.seed, 3, number]))
        text = read_sample(dataset, index, sample, self.raw, self.vocab_size)[:-1]
        kept = random_lengths(self.raw - self.masked, self.spans, random)
        taken = random_lengths(self.masked, self.spans, random)
        tokens, targets = corrupt(text, kept, taken, self.sentinels, self.end)
        length = self.data.decoder_seq_length or 0
        before = np.concatenate([[self.pad], targets[:-1]])  # the decoder starts from padding, as T5's does
        return T5Sample(
            padded(tokens, self.data.seq_length, self.pad),
            padded(before, length, self.pad),
            padded(targets, length, IGNORED),
            len(tokens),
        )


def random_lengths(total: int, parts: int, random: np.random.Generator) -> np.ndarray:
    """int64 [parts]: lengths of at least 1 that add up to `total`; every such division is equally likely."""
    cuts = np.sort(random.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


def corrupt(
    text: np.ndarray, kept: np.ndarray, taken: np.ndarray, sentinels: np.ndarray, end: int
) -> tuple[np.ndarray, np.ndarray]:
    """(encoder tokens, targets) of a text of which `kept[i]` tokens stay, then `taken[i]` go, in turn."""
    encoder, targets, place = [], [], 0
    for stay, go, sentinel in zip(kept.tolist(), taken.tolist(), sentinels.tolist(), strict=True):
        encoder += [text[place : place + stay], [sentinel]]
        targets += [[sentinel], text[place + stay : place + stay + go]]
        place += stay + go
    return np.concatenate([*encoder, [end]]), np.concatenate([*targets, [end]])


def make_t5_batch(
    samples: list[T5Sample], places: list[int], data: DataConfig, counted: list[bool] | None = None
) -> T5Batch:
    """A batch of samples at these places of the global batch; `counted` False: no loss (padding of a batch)."""
    tokens, decoder_tokens, labels = stacked(samples, "tokens", "decoder_tokens", "labels")
    loss_mask = (labels != IGNORED).float()
    if counted is not None:
        loss_mask *= torch.tensor(counted, dtype=torch.float32)[:, None]
    padding = padding_mask(samples, tokens.shape[1])
    return T5Batch(torch.tensor(places), tokens, decoder_tokens, labels, loss_mask, padding)
