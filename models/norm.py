"""The norm of a layer: parameters here, arithmetic in the slot's function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from configs.transformer import TransformerConfig
from models.init import constant
from models.tensor_parallel.params import ParallelModule, TensorParallel


class Norm(ParallelModule):
    """LayerNorm or RMSNorm of [s, b, h] (or [s/t, b, h]); `function(x, weight, bias, eps, memory_efficient)`
    comes from the fusion plan."""

    def __init__(self, config: TransformerConfig, tp: TensorParallel, device: torch.device, function: Callable[..., Tensor]):
        super().__init__(tp, device)
        self.function, self.eps = function, config.layernorm_epsilon
        self.memory_efficient = config.memory_efficient_layer_norm
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.has_bias = config.normalization == "LayerNorm"
        start = constant(0.0 if self.zero_centered else 1.0)
        self.add_parameter("weight", (config.hidden_size,), start, on_sharded_tokens=tp.sequence_parallel)
        if self.has_bias:
            self.add_parameter("bias", (config.hidden_size,), constant(0.0), on_sharded_tokens=tp.sequence_parallel)

    def weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """(weight, bias or None) as the arithmetic takes them."""
        weight = self.local("weight", dtype)
        bias = self.local("bias", dtype) if self.has_bias else None
        return weight + 1 if self.zero_centered else weight, bias

    def again(self, x: Tensor) -> Callable[[], Tensor]:
        """What makes norm(x) anew in the backward, from copies of the weights: fully_shard may have taken them back."""
        weight, bias = self.weights(x.dtype)
        x, weight, bias = x.detach(), weight.detach().clone(), None if bias is None else bias.detach().clone()
        return lambda: self.function(x, weight, bias, self.eps, self.memory_efficient)

    def forward(self, x: Tensor) -> Tensor:
        """The normalised x, in x's dtype."""
        weight, bias = self.weights(x.dtype)
        return self.function(x, weight, bias, self.eps, self.memory_efficient)
