"""The stack of layers and the norm after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from configs.transformer import TransformerConfig
from models.rotary import Rotary
from models.spec import ModuleSpec, Slot, build_module
from models.tensor_parallel.params import TensorParallel
from models.transformer_layer import DropoutContext, LayerKeys


@dataclass(frozen=True)
class TransformerBlockSubmodules:
    """The spec of every layer, and the final norm's; whether layers are compiled, and who is told how many were called."""

    layer: ModuleSpec
    final_layernorm: Slot
    compile_layers: bool = False
    count_layers: Callable[[int], None] = lambda layers: None


class TransformerBlock(nn.Module):
    """hidden [s, b, h] (or [s/t, b, h]) -> the same shape."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerBlockSubmodules,
        tp: TensorParallel,
        device: torch.device,
    ):
        super().__init__()
        self.layers = nn.ModuleList(
            build_module(submodules.layer, config, number + 1, tp=tp, device=device) for number in range(config.num_layers)
        )
        self.final_layernorm = build_module(submodules.final_layernorm, config, tp=tp, device=device)
        self.hidden_dropout, self.attention_dropout = config.hidden_dropout > 0, config.attention_dropout > 0
        self.count_layers = submodules.count_layers
        if submodules.compile_layers:
            for layer in self.layers:
                # One mathematics: a rounding to half precision stays one, as in fusions/jit.py.
                layer.compile(dynamic=False, options={"emulate_precision_casts": True})

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None, rotary: Rotary | None, dropout: DropoutContext | None
    ) -> Tensor:
        """All layers in turn, then the final norm."""
        layers: list[Any] = list(self.layers)
        norms = [*(layer.input_layernorm for layer in layers[1:]), self.final_layernorm]
        normalised = layers[0].input_layernorm(hidden)
        for index, (layer, next_norm) in enumerate(zip(layers, norms, strict=True)):
            keys = LayerKeys() if dropout is None else dropout.layer(index, self.hidden_dropout, self.attention_dropout)
            hidden, normalised = layer(hidden, normalised, next_norm, attention_mask, rotary, keys)
        self.count_layers(len(layers))
        return normalised
