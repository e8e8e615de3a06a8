"""One transformer layer: every sub-block returns (output, bias), and its slot adds both to the residual and normalises the sum
for what comes next. Pre-norm and post-norm differ in one thing: whether the sum or its norm is the next residual."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from configs.transformer import TransformerConfig
from fusions.random import MaskKey
from models.cache import LayerCache
from models.dropout import LayerKeys
from models.norm import Norm
from models.recompute import Recompute
from models.rotary import Rotary
from models.spec import Slot, build_module
from models.tensor_parallel.params import TensorParallel

Again = Callable[[], Tensor] | None


@dataclass(frozen=True)
class TransformerLayerSubmodules:
    """The slots of a layer. An add slot is `f(x, bias, residual, norm, prob, training, mask_key) -> (sum, norm(sum))`.

    Without `cross_attention` its three slots are not there.
    """

    self_attention: Slot
    self_attn_add: Slot
    pre_mlp_layernorm: Slot
    mlp: Slot
    mlp_add: Slot
    output_layernorm: Slot
    pre_cross_attn_layernorm: Slot | None = None
    cross_attention: Slot | None = None
    cross_attn_add: Slot | None = None


class LayerInputs(NamedTuple):
    """What all layers of a stack share: masks (boolean, True = masked out), positions, and what cross-attention looks at."""

    attention_mask: Tensor | None = None  # [b or 1, 1, s or 1, s]
    rotary: Rotary | None = None
    position_bias: Tensor | None = None  # [1, n/t, s, s], added to the scores
    context: Tensor | None = None  # [s_encoder, b, h] (or [s_encoder/t, b, h])
    context_mask: Tensor | None = None  # [b or 1, 1, s or 1, s_encoder]


@dataclass(frozen=True)
class AddThenNorm:
    """The two operations one after the other. `bda(x, bias, residual, prob, training, mask_key)`."""

    bda: Callable[..., Tensor]

    def norm_again(self, norm: Norm, total: Tensor) -> Callable[[], Tensor] | None:
        """What makes norm(total) anew in the backward."""
        return norm.again(total)

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

    def norm_again(self, norm: Norm, total: Tensor) -> Callable[[], Tensor] | None:
        """None: there is no kernel for the norm alone that gives the same bits."""
        return None

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

    A layer owns the norms after its additions, since one slot adds and normalises; the norm before the first layer belongs to the
    stack. So `output_layernorm` is what the next layer's attention reads: in a pre-norm stack Megatron's input_layernorm of that
    layer, after the last one the final norm; in a post-norm stack the layer's own last norm. A layer uses no parameter but its
    own, which fully_shard needs.
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
        self.hidden_dropout, self.post_norm = config.hidden_dropout, config.layernorm_position == "post"
        self.selective: Recompute | None = None
        self.self_attention = build_module(submodules.self_attention, config, layer_number, tp=tp, device=device)
        self.self_attn_add = build_module(submodules.self_attn_add)
        self.cross_attention = None
        if submodules.cross_attention is not None:
            norm, add = submodules.pre_cross_attn_layernorm, submodules.cross_attn_add
            assert norm is not None and add is not None, "cross-attention has a norm before it and an add after it"
            self.pre_cross_attn_layernorm = build_module(norm, config, tp=tp, device=device)
            self.cross_attention = build_module(submodules.cross_attention, config, layer_number, tp=tp, device=device)
            self.cross_attn_add = build_module(add)
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, config, tp=tp, device=device)
        self.mlp = build_module(submodules.mlp, config, tp=tp, device=device)
        self.mlp_add = build_module(submodules.mlp_add)
        self.output_layernorm = build_module(submodules.output_layernorm, config, tp=tp, device=device)

    def forward(
        self,
        hidden: Tensor,
        normalised: Tensor,
        inputs: LayerInputs,
        keys: LayerKeys,
        cache: LayerCache | None = None,
        again: Again = None,
    ) -> tuple[Tensor, Tensor, Again]:
        """Attention, cross-attention where there is one, and MLP, each with its residual and the norm that follows.

        `again` makes `normalised` anew; the third output does so for the second (see models/recompute.py).
        """
        prob, training = self.hidden_dropout, self.training
        with self._forget(normalised, again):
            out, bias = self.self_attention(normalised, inputs, keys.attention, cache)
        residual = normalised if self.post_norm else hidden
        norm = self.pre_mlp_layernorm if self.cross_attention is None else self.pre_cross_attn_layernorm
        hidden, normalised = self.self_attn_add(out, bias, residual, norm, prob, training, keys.self_attn_add)
        again = self._again(self.self_attn_add, norm, hidden)
        if self.cross_attention is not None:
            with self._forget(normalised, again):
                out, bias = self.cross_attention(normalised, inputs, keys.cross_attention, cache)
            residual, norm = normalised if self.post_norm else hidden, self.pre_mlp_layernorm
            hidden, normalised = self.cross_attn_add(out, bias, residual, norm, prob, training, keys.cross_attn_add)
            again = self._again(self.cross_attn_add, norm, hidden)
        with self._forget(normalised, again):
            out, bias = self.mlp(normalised)
        residual, norm = normalised if self.post_norm else hidden, self.output_layernorm
        hidden, normalised = self.mlp_add(out, bias, residual, norm, prob, training, keys.mlp_add)
        return hidden, normalised, self._again(self.mlp_add, norm, hidden)

    def recompute(self, selective: Recompute) -> None:
        """From now on keep less for the backward."""
        self.selective = self.self_attention.selective = self.mlp.selective = selective
        if self.cross_attention is not None:
            self.cross_attention.selective = selective

    def _again(self, add: AddThenNorm | AddAndNorm, norm: Norm, total: Tensor) -> Again:
        return None if self.selective is None or not torch.is_grad_enabled() else add.norm_again(norm, total)

    def _forget(self, normalised: Tensor, again: Again) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.selective is None else self.selective.forget(normalised, again)
