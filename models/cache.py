"""Keys and values of the tokens before, for generation: each new token then costs one row of attention, not all of them."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """Of one layer: k and v [s, b, g/t, d] of self-attention so far, and those of cross-attention, which never change."""

    def __init__(self) -> None:
        self.own: tuple[Tensor, Tensor] | None = None
        self.cross: tuple[Tensor, Tensor] | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add new rows; all rows."""
        if self.own is not None:
            k, v = torch.cat([self.own[0], k]), torch.cat([self.own[1], v])
        self.own = (k, v)
        return self.own


class KeyValueCache:
    """Of a stack, layer by layer. A model that is given one takes its tokens as the continuation of those in it."""

    def __init__(self, num_layers: int):
        self.layers = [LayerCache() for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Tokens in it."""
        own = self.layers[0].own
        return 0 if own is None else own[0].shape[0]
