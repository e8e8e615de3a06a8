"""A micro-batch of each family: what the model gets, and which losses come back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fusions.random import DropoutKeys

IGNORED = -100  # the label of what is not to be predicted


@dataclass(frozen=True)
class Batch:
    """samples int64 [b]: each sample's place in the global batch. Tensors may be None where they would say nothing."""

    samples: Tensor

    def to(self, device: torch.device) -> Self:
        """The batch on a device."""
        if device.type == "cpu":
            return self
        tensors = {name: value for name, value in vars(self).items() if value is not None}
        return replace(self, **{name: value.to(device, non_blocking=True) for name, value in tensors.items()})

    @abstractmethod
    def counts(self) -> dict[str, float]:
        """How many tokens (or samples) each loss is over; read on the host, before the batch goes to the device."""

    @abstractmethod
    def losses(self, model: Any, keys: DropoutKeys | None) -> dict[str, Tensor]:
        """Each loss, as a sum over what is counted: fp32 scalars."""


@dataclass(frozen=True)
class GPTBatch(Batch):
    """tokens, labels int64 [b, s]; loss_mask fp32 [b, s], 1 = counted; position_ids int64 [b, s] or None; attention_mask
    boolean [b, 1, s, s] or None, True = masked."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor | None = None
    attention_mask: Tensor | None = None

    def counts(self) -> dict[str, float]:
        """The counted tokens."""
        return {"lm": float(self.loss_mask.sum())}

    def losses(self, model: Any, keys: DropoutKeys | None) -> dict[str, Tensor]:
        """The next token's."""
        losses = model(self.tokens, self.position_ids, self.attention_mask, self.labels, keys)  # [b, s]
        return {"lm": (losses * self.loss_mask).sum()}


@dataclass(frozen=True)
class BertBatch(Batch):
    """tokens, labels, token_types int64 [b, s]; loss_mask fp32 [b, s], 1 = to be predicted; attention_mask boolean
    [b, 1, 1, s], True = padding. sentence_labels int64 [b] (0: in order, 1: not), counted fp32 [b], or None without that head."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    token_types: Tensor
    attention_mask: Tensor
    sentence_labels: Tensor | None = None
    counted: Tensor | None = None

    def counts(self) -> dict[str, float]:
        """The masked tokens; the pairs of segments."""
        masked = {"masked_lm": float(self.loss_mask.sum())}
        return masked if self.counted is None else masked | {"sentence": float(self.counted.sum())}

    def losses(self, model: Any, keys: DropoutKeys | None) -> dict[str, Tensor]:
        """The masked tokens'; the sentence head's, where there is one."""
        types = self.token_types
        losses, logits = model(self.tokens, None, self.attention_mask, self.labels, keys, types)  # [b, s], [b, 2]
        found = {"masked_lm": (losses * self.loss_mask).sum()}
        if self.sentence_labels is not None and self.counted is not None:
            each = torch.nn.functional.cross_entropy(logits, self.sentence_labels, reduction="none")
            found["sentence"] = (each * self.counted).sum()
        return found


@dataclass(frozen=True)
class T5Batch(Batch):
    """tokens int64 [b, s]; decoder_tokens, labels int64 [b, sd]; loss_mask fp32 [b, sd]; attention_mask boolean
    [b, 1, 1, s], True = padding. Padding of the decoder stands at its end, where nothing that counts sees it."""

    tokens: Tensor
    decoder_tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    attention_mask: Tensor

    def counts(self) -> dict[str, float]:
        """The target tokens."""
        return {"lm": float(self.loss_mask.sum())}

    def losses(self, model: Any, keys: DropoutKeys | None) -> dict[str, Tensor]:
        """The targets'."""
        masks = self.attention_mask, None
        losses = model(self.tokens, self.decoder_tokens, *masks, self.labels, keys)  # [b, sd]
        return {"lm": (losses * self.loss_mask).sum()}


def padded(values: np.ndarray, length: int, filler: int) -> np.ndarray:
    """int64 [length]: the values, then the filler."""
    return np.concatenate([values, np.full(length - len(values), filler)]).astype(np.int64)


def stacked(samples: Sequence[Any], *names: str) -> tuple[Tensor, ...]:
    """Each of these arrays of all samples, [b, ...]."""
    return tuple(torch.from_numpy(np.stack([getattr(sample, name) for sample in samples])) for name in names)


def padding_mask(samples: Sequence[Any], width: int) -> Tensor:
    """Boolean [b, 1, 1, width], True beyond each sample's `length`: an attention mask."""
    return (torch.arange(width) >= torch.tensor([sample.length for sample in samples])[:, None])[:, None, None]


def total_counts(batches: Sequence[Batch]) -> dict[str, float]:
    """The counts of several micro-batches together."""
    total: dict[str, float] = {}
    for batch in batches:
        for name, count in batch.counts().items():
            total[name] = total.get(name, 0.0) + count
    return total
