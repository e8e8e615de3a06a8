"""Self-attention: one product for q, k and v, the core, one product back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from configs.transformer import TransformerConfig
from fusions.random import MaskKey
from models.rotary import apply_rotary
from models.spec import Slot, build_module
from models.tensor_parallel.layers import Output
from models.tensor_parallel.params import TensorParallel


@dataclass(frozen=True)
class SelfAttentionSubmodules:
    """The slots of self-attention."""

    linear_qkv: Slot
    core_attention: Slot
    linear_proj: Slot


@dataclass(frozen=True)
class Rotary:
    """cos and sin [s, b or 1, 1, d_rot] of this batch's positions, and how elements are paired."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


class SelfAttention(nn.Module):
    """x [s, b, h] (or [s/t, b, h]) -> (output of that shape, bias of the projection, not yet added)."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        submodules: SelfAttentionSubmodules,
        tp: TensorParallel,
        device: torch.device,
    ):
        super().__init__()
        heads, self.head_dim = config.num_attention_heads, config.head_size
        self.heads_per_group = heads // config.query_groups
        self.groups_per_partition = config.query_groups // tp.size
        # Weight [groups, heads/groups + 2, head_dim, h]: per group its query heads, its key, its value.
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            (config.query_groups, self.heads_per_group + 2, self.head_dim),
            bias=config.add_bias_linear,
            init_std=config.init_method_std,
            tp=tp,
            device=device,
        )
        self.core_attention = build_module(submodules.core_attention, config, layer_number)
        self.linear_proj = build_module(
            submodules.linear_proj,
            heads * self.head_dim,
            config.hidden_size,
            bias=config.add_bias_linear,
            init_std=config.init_method_std / (2 * config.num_layers) ** 0.5,
            tp=tp,
            device=device,
        )

    def forward(self, x: Tensor, attention_mask: Tensor | None, rotary: Rotary | None, mask_key: MaskKey | None) -> Output:
        """Attention over the whole sequence."""
        mixed, bias = self.linear_qkv(x)  # [s, b, (g/t) (n/g + 2) d]
        if bias is not None:
            mixed = mixed + bias
        s, b, _ = mixed.shape
        mixed = mixed.view(s, b, self.groups_per_partition, self.heads_per_group + 2, self.head_dim)
        q, k, v = mixed.split([self.heads_per_group, 1, 1], dim=3)
        q, k, v = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)  # [s, b, n/t, d], [s, b, g/t, d] twice
        if rotary is not None:
            q = apply_rotary(q, rotary.cos, rotary.sin, rotary.interleaved)
            k = apply_rotary(k, rotary.cos, rotary.sin, rotary.interleaved)
        return self.linear_proj(self.core_attention(q, k, v, attention_mask, mask_key))
