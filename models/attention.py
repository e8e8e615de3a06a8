"""Self-attention: one product for q, k and v, the core, one product back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from configs.transformer import TransformerConfig
from fusions.random import MaskKey
from models.rotary import Rotary
from models.spec import Slot, build_module
from models.tensor_parallel.layers import Output
from models.tensor_parallel.params import TensorParallel


@dataclass(frozen=True)
class SelfAttentionSubmodules:
    """The slots of self-attention."""

    linear_qkv: Slot
    split_qkv: Slot  # (mixed, bias, head_dim, rotary or None) -> q, k, v
    core_attention: Slot
    linear_proj: Slot


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
        self.split_qkv = build_module(submodules.split_qkv)
        self.core_attention = build_module(submodules.core_attention, config, layer_number, tp=tp, device=device)
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
        mixed = mixed.unflatten(-1, (self.groups_per_partition, -1))
        q, k, v = self.split_qkv(mixed, bias, self.head_dim, rotary)  # [s, b, n/t, d], [s, b, g/t, d] twice
        return self.linear_proj(self.core_attention(q, k, v, attention_mask, mask_key))
