"""Which key each dropout of a stack draws its mask from (fusions/random.py).

A stack has one site for what enters it and a few for each layer; a model gives each of its stacks sites of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from configs.transformer import TransformerConfig
from fusions.random import DropoutKeys, MaskKey
from models.tensor_parallel.params import TensorParallel


class LayerKeys(NamedTuple):
    """What a layer's dropouts draw their masks from; None where there is no dropout, or the generator decides.

    Made outside the layer: the layers of a stack then run one and the same graph when they are compiled.
    """

    attention: MaskKey | None = None
    self_attn_add: MaskKey | None = None
    mlp_add: MaskKey | None = None
    cross_attention: MaskKey | None = None
    cross_attn_add: MaskKey | None = None


@dataclass(frozen=True)
class StackDropout:
    """The dropout sites of one stack, from `first_site` on; of this rank's heads and rows."""

    config: TransformerConfig
    tp: TensorParallel
    first_site: int
    cross_attention: bool

    @property
    def sites_per_layer(self) -> int:
        """Attention weights, then the sum after them, each also for cross-attention; the sum after the MLP."""
        return 5 if self.cross_attention else 3

    @property
    def num_sites(self) -> int:
        """Of the whole stack: what enters it, and the layers."""
        return 1 + self.sites_per_layer * self.config.num_layers

    def entry(self, keys: DropoutKeys, seq_length: int) -> MaskKey | None:
        """For what enters the stack, [s, b, h] of the whole sequence or this rank's share of it."""
        if self.config.hidden_dropout == 0:
            return None
        return keys.hidden(self.first_site, self._rows(seq_length, keys.samples.device))

    def layer(self, index: int, keys: DropoutKeys, seq_length: int) -> LayerKeys:
        """The keys of one layer, counted from 0."""
        device, site = keys.samples.device, self.first_site + 1 + self.sites_per_layer * index
        positions, heads = self._rows(seq_length, device), self._heads(device)

        def weights(site: int) -> MaskKey | None:
            return keys.attention(site, heads, seq_length) if self.config.attention_dropout > 0 else None

        def hidden(site: int) -> MaskKey | None:
            return keys.hidden(site, positions) if self.config.hidden_dropout > 0 else None

        cross = (weights(site + 2), hidden(site + 3)) if self.cross_attention else (None, None)
        return LayerKeys(weights(site), hidden(site + 1), hidden(site + self.sites_per_layer - 1), *cross)

    def _rows(self, seq_length: int, device: torch.device) -> Tensor:
        """The global positions of this rank's tokens."""
        if not self.tp.sequence_parallel:
            return torch.arange(seq_length, device=device)
        rows = seq_length // self.tp.size
        return torch.arange(self.tp.rank * rows, (self.tp.rank + 1) * rows, device=device)

    def _heads(self, device: torch.device) -> Tensor:
        """The global numbers of this rank's heads."""
        heads = self.config.num_attention_heads // self.tp.size
        return torch.arange(self.tp.rank * heads, (self.tp.rank + 1) * heads, device=device)
