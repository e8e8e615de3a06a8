"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864). Tables are fp32 whatever the model's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from configs.run import ModelConfig, rotary_dim
from configs.transformer import TransformerConfig


class RotaryTables:
    """cos and sin of every position. Not a module, so that casting a model never rounds them."""

    def __init__(self, model: ModelConfig, transformer: TransformerConfig, device: torch.device):
        self.dim, self.interleaved = rotary_dim(model, transformer), model.rotary_interleaved
        exponent = torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim
        positions = torch.arange(model.max_position_embeddings, dtype=torch.float64)
        angles = positions[:, None] * model.rotary_base**-exponent  # [positions, dim/2]
        # Pairs (i, i + dim/2): the angles twice, end to end; pairs (2i, 2i + 1): each angle twice.
        angles = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat([angles, angles], -1)
        self.cos, self.sin = angles.cos().float().to(device), angles.sin().float().to(device)

    def at(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [s, b, 1, dim] for position_ids [b, s] (b may be 1)."""
        index = position_ids.t()
        return self.cos[index][:, :, None], self.sin[index][:, :, None]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the leading dimensions of each head. x [s, b, n, d], cos and sin [s, b or 1, 1, d_rot]; x's dtype stays."""
    rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    wide = rotated.float()
    wide = wide * cos + _rotate_half(wide, interleaved) * sin
    return torch.cat([wide.to(x.dtype), rest], -1) if rest.shape[-1] else wide.to(x.dtype)


def _rotate_half(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)
