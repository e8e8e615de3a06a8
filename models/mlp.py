"""The MLP: up, activation with its bias, down."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from configs.transformer import TransformerConfig
from models.recompute import Recompute
from models.spec import Slot, build_module
from models.tensor_parallel.layers import Output
from models.tensor_parallel.params import TensorParallel


@dataclass(frozen=True)
class MLPSubmodules:
    """The slots of the MLP; `bias_activation(x, bias)`, x [..., f/t] or, gated, [..., 2 f/t] with the gate first."""

    linear_fc1: Slot
    bias_activation: Slot
    linear_fc2: Slot


class MLP(nn.Module):
    """x [s, b, h] (or [s/t, b, h]) -> (output of that shape, bias of fc2, not yet added)."""

    def __init__(self, config: TransformerConfig, submodules: MLPSubmodules, tp: TensorParallel, device: torch.device):
        super().__init__()
        self.linear_fc1 = build_module(
            submodules.linear_fc1,
            config.hidden_size,
            (config.ffn_size, 2) if config.gated else (config.ffn_size,),
            bias=config.add_bias_linear,
            init_std=config.init_method_std,
            tp=tp,
            device=device,
        )
        self.selective: Recompute | None = None
        self.bias_activation = build_module(submodules.bias_activation)
        self.linear_fc2 = build_module(
            submodules.linear_fc2,
            config.ffn_size,
            config.hidden_size,
            bias=config.add_bias_linear,
            init_std=config.init_method_std / (2 * config.num_layers) ** 0.5,
            tp=tp,
            device=device,
        )

    def forward(self, x: Tensor) -> Output:
        """fc2(activation(fc1(x) + bias))."""
        inner, bias = self.linear_fc1(x)  # [s, b, f/t], or [s, b, 2 f/t]
        activated = self.bias_activation(inner, bias)
        if self.selective is None:
            return self.linear_fc2(activated)
        with self.selective.forget(activated, lambda: self.bias_activation(inner, bias)):
            return self.linear_fc2(activated)
