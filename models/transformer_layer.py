"""One transformer layer, pre-norm: every sub-block returns (output, bias), and its slot adds both to the residual and
normalises the sum for what comes next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from configs.transformer import TransformerConfig
from fusions.random import DropoutKeys, MaskKey
from models.norm import Norm
from models.rotary import Rotary
from models.spec import Slot, build_module
from models.tensor_parallel.params import TensorParallel


@dataclass(frozen=True)
class TransformerLayerSubmodules:
    """The slots of a layer. An add slot is `f(x, bias, residual, norm, prob, training, mask_key) -> (sum, norm(sum))`."""

    input_layernorm: Slot
    self_attention: Slot
    self_attn_add: Slot
    pre_mlp_layernorm: Slot
    mlp: Slot
    mlp_add: Slot


class LayerKeys(NamedTuple):
    """What a layer's dropouts draw their masks from; None where there is no dropout, or the generator decides.

    Made outside the layer: the layers of a stack then run one and the same graph when they are compiled.
    """

    attention: MaskKey | None = None
    self_attn_add: MaskKey | None = None
    mlp_add: MaskKey | None = None


@dataclass(frozen=True)
class DropoutContext:
    """The keys of this micro-batch and the global index of this rank's rows. Site 0 is the embedding's."""

    keys: DropoutKeys
    positions: Tensor  # int64 [s] or [s/t]
    heads: Tensor  # int64 [n/t]
    seq_length: int

    SITES_PER_LAYER = 3

    def layer(self, index: int, hidden: bool, attention: bool) -> LayerKeys:
        """The keys of one layer, counted from 0."""
        site = 1 + self.SITES_PER_LAYER * index
        return LayerKeys(
            self.attention(site) if attention else None,
            self.hidden(site + 1) if hidden else None,
            self.hidden(site + 2) if hidden else None,
        )

    def hidden(self, site: int) -> MaskKey:
        """For a tensor [s, b, h] of this rank."""
        return self.keys.hidden(site, self.positions)

    def attention(self, site: int) -> MaskKey:
        """For attention weights [b, n/t, s, s] of this rank."""
        return self.keys.attention(site, self.heads, self.seq_length)


@dataclass(frozen=True)
class AddThenNorm:
    """The two operations one after the other. `bda(x, bias, residual, prob, training, mask_key)`."""

    bda: Callable[..., Tensor]

    def __call__(  # noqa: D102  said by the slot
        self,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        norm: Norm,
        prob: float,
        training: bool,
        mask_key: MaskKey | None,
    ) -> tuple[Tensor, Tensor]:
        total = self.bda(x, bias, residual, prob, training, mask_key)
        return total, norm(total)


@dataclass(frozen=True)
class AddAndNorm:
    """The two as one operation: `residual_norm` of fusions/fused_residual_norm.py."""

    residual_norm: Callable[..., tuple[Tensor, Tensor]]

    def __call__(  # noqa: D102  said by the slot
        self,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        norm: Norm,
        prob: float,
        training: bool,
        mask_key: MaskKey | None,
    ) -> tuple[Tensor, Tensor]:
        weight, norm_bias = norm.weights(residual.dtype)
        options = {"prob": prob, "training": training, "eps": norm.eps, "rms": not norm.has_bias, "mask_key": mask_key}
        return self.residual_norm(x, bias, residual, weight, norm_bias, **options)


class TransformerLayer(nn.Module):
    """hidden [s, b, h] (or [s/t, b, h]) and its norm -> the next hidden and its norm. `layer_number` counts from 1.

    The first norm, `input_layernorm`, is called by whoever comes before: the layer before adds and normalises in one slot.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        submodules: TransformerLayerSubmodules,
        tp: TensorParallel,
        device: torch.device,
    ):
        super().__init__()
        self.hidden_dropout = config.hidden_dropout
        self.input_layernorm = build_module(submodules.input_layernorm, config, tp=tp, device=device)
        self.self_attention = build_module(submodules.self_attention, config, layer_number, tp=tp, device=device)
        self.self_attn_add = build_module(submodules.self_attn_add)
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, config, tp=tp, device=device)
        self.mlp = build_module(submodules.mlp, config, tp=tp, device=device)
        self.mlp_add = build_module(submodules.mlp_add)

    def forward(
        self,
        hidden: Tensor,
        normalised: Tensor,
        next_norm: Norm,
        attention_mask: Tensor | None,
        rotary: Rotary | None,
        keys: LayerKeys,
    ) -> tuple[Tensor, Tensor]:
        """Attention and MLP, each with its residual and the norm that follows; `next_norm` is the next layer's first."""
        prob, training = self.hidden_dropout, self.training
        out, bias = self.self_attention(normalised, attention_mask, rotary, keys.attention)
        hidden, normalised = self.self_attn_add(
            out, bias, hidden, self.pre_mlp_layernorm, prob, training, keys.self_attn_add
        )
        out, bias = self.mlp(normalised)
        return self.mlp_add(out, bias, hidden, next_norm, prob, training, keys.mlp_add)
