"""The stack of layers and the norm before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from configs.transformer import TransformerConfig
from fusions.random import DropoutKeys, dropout, random_mask_key
from models.cache import KeyValueCache
from models.dropout import LayerKeys, StackDropout
from models.recompute import Recompute
from models.spec import ModuleSpec, Slot, build_module
from models.tensor_parallel.params import TensorParallel
from models.transformer_layer import LayerInputs, TransformerLayer


@dataclass(frozen=True)
class TransformerBlockSubmodules:
    """The specs of the norm before the layers and of every layer; whether layers are compiled, who is told how many were
    called, and what the backward computes again."""

    input_layernorm: Slot
    layer: ModuleSpec
    compile_layers: bool = False
    count_layers: Callable[[int], None] = lambda layers: None
    recompute: Recompute = field(default_factory=Recompute)


class TransformerBlock(nn.Module):
    """hidden [s, b, h] (or [s/t, b, h]) -> the same shape.

    What enters is dropped: before the first norm, or after it in a post-norm stack, whose first norm is the embedding's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerBlockSubmodules,
        tp: TensorParallel,
        device: torch.device,
        first_dropout_site: int = 0,
    ):
        super().__init__()
        self.config, self.tp, self.post_norm = config, tp, config.layernorm_position == "post"
        self.input_layernorm = build_module(submodules.input_layernorm, config, tp=tp, device=device)
        self.layers = nn.ModuleList(
            build_module(submodules.layer, config, number + 1, tp=tp, device=device) for number in range(config.num_layers)
        )
        cross = submodules.layer.submodules.cross_attention is not None
        self.dropout = StackDropout(config, tp, first_dropout_site, cross)
        self.count_layers, self.recompute = submodules.count_layers, submodules.recompute
        for index, layer in enumerate(self.layers):
            if isinstance(layer, TransformerLayer) and self.recompute.of_layer(index) == "selective":
                layer.recompute(self.recompute)
        if submodules.compile_layers:
            for layer in self.layers:
                # One mathematics: a rounding to half precision stays one, as in fusions/jit.py.
                layer.compile(dynamic=False, options={"emulate_precision_casts": True})

    def forward(
        self,
        hidden: Tensor,
        inputs: LayerInputs,
        dropout_keys: DropoutKeys | None,
        seq_length: int,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """All layers in turn; the last one's norm is the stack's. `seq_length`: tokens of the whole sequence, s."""
        layers: list[Any] = list(self.layers)
        keys = self._usable(dropout_keys)
        hidden = hidden if self.post_norm else self._drop(hidden, keys, seq_length)
        normalised = self.input_layernorm(hidden)
        normalised = self._drop(normalised, keys, seq_length) if self.post_norm else normalised
        again = None
        for index, layer in enumerate(layers):
            layer_keys = LayerKeys() if keys is None else self.dropout.layer(index, keys, seq_length)
            layer_cache = None if cache is None else cache.layers[index]
            arguments = hidden, normalised, inputs, layer_keys, layer_cache, again
            if self.recompute.of_layer(index) == "full" and torch.is_grad_enabled():
                hidden, normalised, again = self.recompute.run(layer, *arguments, draws=self.training and keys is None)
            else:
                hidden, normalised, again = layer(*arguments)
        self.count_layers(len(layers))
        return normalised

    def _drop(self, hidden: Tensor, keys: DropoutKeys | None, seq_length: int) -> Tensor:
        prob = self.config.hidden_dropout
        if not self.training or prob == 0:
            return hidden
        key = None if keys is None else self.dropout.entry(keys, seq_length)
        return dropout(hidden, prob, key or random_mask_key(hidden))

    def _usable(self, keys: DropoutKeys | None) -> DropoutKeys | None:
        """The keys where something is dropped. Raises ValueError where ranks would draw masks of their own."""
        if not self.training or (self.config.hidden_dropout == 0 and self.config.attention_dropout == 0):
            return None
        if keys is None and self.tp.size > 1:
            raise ValueError("training with dropout at tensor-parallel size > 1 needs dropout_keys, equal on all ranks")
        return keys
