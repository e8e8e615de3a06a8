"""relu(x + bias)^2 * weights (So et al. 2021, arXiv:2109.08668).

Shapes: x [..., h]; bias [h] or None; weights [..., 1] or None; the result in x's dtype. Saved for the backward, per element:
x (its own bytes). The arithmetic is in activation.py.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fusions.activation import COMPILED, Rule, bias_activation
from fusions.kernels import triton_kernels

_RULE = Rule("squared_relu")


def reference(x: Tensor, bias: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    """The definition, in plain PyTorch."""
    y = F.relu(x if bias is None else x + bias).square()
    return (y if weights is None else y * weights).to(x.dtype)


def compiled(x: Tensor, bias: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    """The same in one pass forward and one backward."""
    return bias_activation(COMPILED, x, bias, _RULE, weights)


def triton(x: Tensor, bias: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    """The same with Triton kernels."""
    return bias_activation(triton_kernels("activation"), x, bias, _RULE, weights)


BACKENDS = {"squared_relu": {"reference": reference, "compile": compiled, "triton": triton}}


# ---- Megatron's names -------------------------------------------------------------------------------------------------


def weighted_squared_relu(x: Tensor, weights: Tensor) -> Tensor:
    """relu(x)^2 * weights; differentiable."""
    return compiled(x, None, weights)


def weighted_squared_relu_back(g: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of x, gradient of weights) times g."""
    dx, _, dweights = COMPILED.backward(g, x, None, weights, _RULE)
    return dx, dweights


class WeightedSquaredReLUFunction:
    """Megatron's handle: `WeightedSquaredReLUFunction.apply(input, weights)`."""

    @staticmethod
    def apply(input: Tensor, weights: Tensor) -> Tensor:
        """weighted_squared_relu."""
        return compiled(input, None, weights)


def weighted_squared_relu_impl(input: Tensor, weights: Tensor) -> Tensor:
    """relu(input)^2 * weights of [n, h] (or 3-D) and [n, 1]."""
    assert input.dim() in (2, 3), f"expected 2 or 3 dimensions, got {list(input.shape)}"
    return compiled(input.reshape(-1, input.shape[-1]), None, weights.reshape(-1, 1)).view(input.shape)
