"""Self-attention: one product for q, k and v, the core, one product back; cross-attention: k and v from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from configs.transformer import TransformerConfig
from fusions.random import MaskKey
from models.cache import LayerCache
from models.core_attention import SDPAttention, UnfusedAttention
from models.recompute import Recompute
from models.spec import Slot, build_module
from models.tensor_parallel.layers import Output
from models.tensor_parallel.params import TensorParallel
from models.transformer_layer import LayerInputs


@dataclass(frozen=True)
class SelfAttentionSubmodules:
    """The slots of self-attention."""

    linear_qkv: Slot
    split_qkv: Slot  # (mixed, bias, head_dim, rotary or None) -> q, k, v
    core_attention: Slot
    linear_proj: Slot


@dataclass(frozen=True)
class CrossAttentionSubmodules:
    """The slots of cross-attention."""

    linear_q: Slot
    linear_kv: Slot
    core_attention: Slot
    linear_proj: Slot


class _Attention(nn.Module):
    """What both have: a core that may be run again in the backward."""

    core_attention: UnfusedAttention | SDPAttention
    selective: Recompute | None = None

    def _core(self, *args: Any) -> Tensor:
        """The core of (q, k, v, mask, position bias, mask key). SDPA keeps no scores, so there is nothing to forget."""
        core = self.core_attention
        if self.selective is None or isinstance(core, SDPAttention):
            return core(*args)
        return self.selective.run(core, *args, draws=args[-1] is None and core.dropout_prob > 0)


class SelfAttention(_Attention):
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
        self.head_dim, self.groups_per_partition = config.head_size, config.query_groups // tp.size
        # Weight [groups, heads/groups + 2, head_dim, h]: per group its query heads, its key, its value.
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            (config.query_groups, config.num_attention_heads // config.query_groups + 2, self.head_dim),
            bias=config.has_qkv_bias,
            init_std=config.init_method_std,
            tp=tp,
            device=device,
        )
        self.split_qkv = build_module(submodules.split_qkv)
        self.core_attention = build_module(submodules.core_attention, config, layer_number, tp=tp, device=device)
        self.linear_proj = _projection(submodules.linear_proj, config, tp, device)

    def forward(self, x: Tensor, inputs: LayerInputs, mask_key: MaskKey | None, cache: LayerCache | None = None) -> Output:
        """Attention over the whole sequence, and over what the cache has of it."""
        mixed, bias = self.linear_qkv(x)  # [s, b, (g/t) (n/g + 2) d]
        mixed = mixed.unflatten(-1, (self.groups_per_partition, -1))
        q, k, v = self.split_qkv(mixed, bias, self.head_dim, inputs.rotary)  # [s, b, n/t, d], [s, b, g/t, d] twice
        if cache is not None:
            k, v = cache.append(k, v)
        return self.linear_proj(self._core(q, k, v, inputs.attention_mask, inputs.position_bias, mask_key))


class CrossAttention(_Attention):
    """x [s, b, h] (or [s/t, b, h]) looks at `inputs.context` -> (output of x's shape, bias of the projection)."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        submodules: CrossAttentionSubmodules,
        tp: TensorParallel,
        device: torch.device,
    ):
        super().__init__()
        heads, groups, self.head_dim = config.num_attention_heads, config.query_groups, config.head_size
        self.groups_per_partition = groups // tp.size
        self.linear_q = build_module(
            submodules.linear_q,
            config.hidden_size,
            (groups, heads // groups, self.head_dim),
            bias=config.has_qkv_bias,
            init_std=config.init_method_std,
            tp=tp,
            device=device,
        )
        # Weight [groups, 2, head_dim, h]: per group its key and its value.
        self.linear_kv = build_module(
            submodules.linear_kv,
            config.hidden_size,
            (groups, 2, self.head_dim),
            bias=config.has_qkv_bias,
            init_std=config.init_method_std,
            tp=tp,
            device=device,
        )
        self.core_attention = build_module(submodules.core_attention, config, layer_number, tp=tp, device=device)
        self.linear_proj = _projection(submodules.linear_proj, config, tp, device)

    def forward(self, x: Tensor, inputs: LayerInputs, mask_key: MaskKey | None, cache: LayerCache | None = None) -> Output:
        """Attention of each token over the whole context."""
        q, bias = self.linear_q(x)  # [s, b, (n/t) d]
        q = (q if bias is None else q + bias).unflatten(-1, (-1, self.head_dim))
        k, v = self._keys_and_values(inputs.context) if cache is None or cache.cross is None else cache.cross
        if cache is not None:
            cache.cross = (k, v)
        return self.linear_proj(self._core(q, k, v, inputs.context_mask, None, mask_key))

    def _keys_and_values(self, context: Tensor | None) -> tuple[Tensor, Tensor]:
        if context is None:
            raise ValueError("cross-attention needs inputs.context, the output of the other stack")
        mixed, bias = self.linear_kv(context)  # [s_encoder, b, (g/t) 2 d]
        mixed = (mixed if bias is None else mixed + bias).unflatten(-1, (self.groups_per_partition, 2, self.head_dim))
        return mixed[..., 0, :], mixed[..., 1, :]


def _projection(slot: Slot, config: TransformerConfig, tp: TensorParallel, device: torch.device) -> nn.Module:
    """The product back to the residual stream."""
    return build_module(
        slot,
        config.num_attention_heads * config.head_size,
        config.hidden_size,
        bias=config.add_bias_linear,
        init_std=config.init_method_std / (2 * config.num_layers) ** 0.5,
        tp=tp,
        device=device,
    )
