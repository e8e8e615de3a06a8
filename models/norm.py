"""The norm of a layer: parameters here, arithmetic in the slot's function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from configs.transformer import TransformerConfig
from models.init import constant
from models.tensor_parallel.params import ParallelModule, TensorParallel


class Norm(ParallelModule):
    """LayerNorm or RMSNorm of [s, b, h] (or [s/t, b, h]); `function(x, weight, bias, eps)` comes from the fusion plan."""

    def __init__(self, config: TransformerConfig, tp: TensorParallel, device: torch.device, function: Callable[..., Tensor]):
        super().__init__(tp, device)
        self.function, self.eps = function, config.layernorm_epsilon
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.has_bias = config.normalization == "LayerNorm"
        self.add_parameter("weight", (config.hidden_size,), constant(0.0 if self.zero_centered else 1.0))
        if self.has_bias:
            self.add_parameter("bias", (config.hidden_size,), constant(0.0))

    def forward(self, x: Tensor) -> Tensor:
        """The normalised x, in x's dtype."""
        sharded = self.tp.sequence_parallel
        weight = self.local("weight", x.dtype, on_sharded_tokens=sharded)
        bias = self.local("bias", x.dtype, on_sharded_tokens=sharded) if self.has_bias else None
        return self.function(x, weight + 1 if self.zero_centered else weight, bias, self.eps)
