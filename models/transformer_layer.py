"""One transformer layer, pre-norm: every sub-block returns (output, bias) and its slot adds both to the residual."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from configs.transformer import TransformerConfig
from fusions.random import DropoutKeys, MaskKey
from models.attention import Rotary
from models.spec import Slot, build_module
from models.tensor_parallel.params import TensorParallel


@dataclass(frozen=True)
class TransformerLayerSubmodules:
    """The slots of a layer; a bda slot is `f(x, bias, residual, prob, training, mask_key)`."""

    input_layernorm: Slot
    self_attention: Slot
    self_attn_bda: Slot
    pre_mlp_layernorm: Slot
    mlp: Slot
    mlp_bda: Slot


@dataclass(frozen=True)
class DropoutContext:
    """The keys of this micro-batch and the global index of this rank's rows. Site 0 is the embedding's."""

    keys: DropoutKeys
    positions: Tensor  # int64 [s] or [s/t]
    heads: Tensor  # int64 [n/t]
    seq_length: int

    SITES_PER_LAYER = 3

    def hidden(self, site: int) -> MaskKey:
        """For a tensor [s, b, h] of this rank."""
        return self.keys.hidden(site, self.positions)

    def attention(self, site: int) -> MaskKey:
        """For attention weights [b, n/t, s, s] of this rank."""
        return self.keys.attention(site, self.heads, self.seq_length)


class TransformerLayer(nn.Module):
    """hidden [s, b, h] (or [s/t, b, h]) -> the same shape. `layer_number` counts from 1."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        submodules: TransformerLayerSubmodules,
        tp: TensorParallel,
        device: torch.device,
    ):
        super().__init__()
        self.hidden_dropout, self.attention_dropout = config.hidden_dropout, config.attention_dropout
        self.first_site = 1 + DropoutContext.SITES_PER_LAYER * (layer_number - 1)
        self.input_layernorm = build_module(submodules.input_layernorm, config, tp=tp, device=device)
        self.self_attention = build_module(submodules.self_attention, config, layer_number, tp=tp, device=device)
        self.self_attn_bda = build_module(submodules.self_attn_bda)
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, config, tp=tp, device=device)
        self.mlp = build_module(submodules.mlp, config, tp=tp, device=device)
        self.mlp_bda = build_module(submodules.mlp_bda)

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None, rotary: Rotary | None, dropout: DropoutContext | None
    ) -> Tensor:
        """Attention and MLP, each with its norm before and its residual after."""
        attention_key = attn_key = mlp_key = None
        if dropout is not None:
            attention_key = dropout.attention(self.first_site) if self.attention_dropout > 0 else None
            if self.hidden_dropout > 0:
                attn_key, mlp_key = dropout.hidden(self.first_site + 1), dropout.hidden(self.first_site + 2)
        out, bias = self.self_attention(self.input_layernorm(hidden), attention_mask, rotary, attention_key)
        hidden = self.self_attn_bda(out, bias, hidden, self.hidden_dropout, self.training, attn_key)
        out, bias = self.mlp(self.pre_mlp_layernorm(hidden))
        return self.mlp_bda(out, bias, hidden, self.hidden_dropout, self.training, mlp_key)
