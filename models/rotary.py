"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864): tables, and the split of packed QKV. Tables are fp32 whatever
the model's dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.model import ModelConfig, RopeScaling, rotary_dim
from configs.transformer import TransformerConfig
from fusions.fused_rope import split_qkv

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Rotary:
    """cos and sin [s, b or 1, 1, d_rot] of this batch's positions, and how elements are paired."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


class RotaryTables:
    """cos and sin of every position. Not a module, so that casting a model never rounds them."""

    def __init__(self, model: ModelConfig, transformer: TransformerConfig, device: torch.device):
        self.dim, self.interleaved = rotary_dim(model, transformer), model.rotary_interleaved
        frequencies = rotary_frequencies(self.dim, model.rotary_base, model.rope_scaling)
        positions = torch.arange(model.max_position_embeddings, dtype=torch.float64)
        angles = positions[:, None] * frequencies  # [positions, dim/2]
        # Pairs (i, i + dim/2): the angles twice, end to end; pairs (2i, 2i + 1): each angle twice.
        angles = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat([angles, angles], -1)
        size = magnitude(model.rope_scaling)
        self.cos, self.sin = ((size * f(angles)).float().to(device) for f in (torch.cos, torch.sin))

    def at(self, position_ids: Tensor) -> Rotary:
        """The rows for position_ids [b, s] (b may be 1)."""
        index = position_ids.t()
        return Rotary(self.cos[index][:, :, None], self.sin[index][:, :, None], self.interleaved)


def rotary_frequencies(dim: int, base: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position of each pair, fp64 [dim / 2]: base^(-2i / dim), stretched as `scaling` says.

    linear: all divided by the factor (Chen et al. 2023, arXiv:2306.15595). llama3: long wavelengths divided, short ones kept,
    a linear blend between (Llama 3.1's rule). yarn: NTK-by-parts (Peng et al. 2023, arXiv:2309.00071).
    """
    plain = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if scaling is None:
        return plain
    stretched = plain / scaling.factor
    if scaling.type == "linear":
        return stretched
    original = scaling.original_max_position_embeddings or 1
    if scaling.type == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        turns = original * plain / (2 * math.pi)  # how often a pair turns within the original context
        keep = ((turns - low) / (high - low)).clamp(0, 1)
    else:

        def pair_that_turns(times: float) -> float:
            return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

        first = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
        last = min(math.ceil(pair_that_turns(scaling.beta_slow)), dim - 1)
        last = last + 0.001 if first == last else last  # a ramp of width 0 would divide by it
        keep = 1 - ((torch.arange(dim // 2, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
    return keep * plain + (1 - keep) * stretched


def magnitude(scaling: RopeScaling | None) -> float:
    """YaRN's factor on cos and sin, which sharpens attention over long contexts; 1 for every other rule."""
    if scaling is None or scaling.type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


@dataclass(frozen=True)
class SplitThenRotate:
    """mixed [s, b, g, (n/g + 2) d] and its bias -> q [s, b, n, d], k, v [s, b, g, d], one operation after the other."""

    rope: Callable[..., Tensor]

    def __call__(self, mixed: Tensor, bias: Tensor | None, head_dim: int, rotary: Rotary | None) -> QKV:  # noqa: D102
        mixed = mixed if bias is None else mixed + bias.view(mixed.shape[-2:])
        q, k, v = split_qkv(mixed, head_dim)
        if rotary is None:
            return q, k, v
        q, k = (self.rope(x, rotary.cos, rotary.sin, rotary.interleaved) for x in (q, k))
        return q, k, v


@dataclass(frozen=True)
class RotatePacked:
    """The same in one pass; needs rotary positions."""

    qkv_rope: Callable[..., QKV]

    def __call__(self, mixed: Tensor, bias: Tensor | None, head_dim: int, rotary: Rotary) -> QKV:  # noqa: D102
        return self.qkv_rope(mixed, bias, head_dim, rotary.cos, rotary.sin, rotary.interleaved)
