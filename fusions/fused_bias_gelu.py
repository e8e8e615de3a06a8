"""activation(x + bias) for the three GELUs: erf, tanh and quick. Which one is the config's `activation`, fused or not.

    gelu        0.5 u (1 + erf(u / sqrt 2))                             u = x + bias
    gelu_tanh   0.5 u (1 + tanh(sqrt(2/pi) (u + 0.044715 u^3)))         Hendrycks & Gimpel 2016, arXiv:1606.08415
    quick_gelu  u sigmoid(1.702 u)

Shapes: x [..., f]; bias [f] or None. Saved for the backward, per element: compile only x (its own bytes); the reference
keeps u as well. Half precision is computed in fp32 inside the compiled form. The tanh form is written as a sigmoid,
0.5 (1 + tanh v) = sigmoid(2 v), since exp is cheaper than tanh in vector code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusions.column_sum import block_sums, row_block, total
from fusions.jit import jit_fuser

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


def activation_function(activation: str) -> Callable[[Tensor], Tensor]:
    """The plain activation of a name: gelu, gelu_tanh or quick_gelu."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu": F.gelu,
        "gelu_tanh": lambda u: F.gelu(u, approximate="tanh"),
        "quick_gelu": lambda u: u * torch.sigmoid(1.702 * u),
    }
    return functions[activation]


def reference(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """The definition, in plain PyTorch."""
    return activation_function(activation)(x if bias is None else x + bias)


def compiled(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """The same in one pass forward and one backward."""
    return _BiasActivation.apply(x, bias, activation)


class _BiasActivation(torch.autograd.Function):
    """Saves x and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Any, activation: str) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.activation = activation
        return _forward(x, bias, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        if bias is not None and bias.dim() == 1:
            dx, sums = _backward_with_bias(grad, x, bias, ctx.activation, row_block(x))
            return dx, total(sums, bias), None
        dx = _backward(grad, x, bias, ctx.activation)
        return dx, None if bias is None else dx.sum_to_size(bias.shape), None


@jit_fuser
def _forward(x: Tensor, bias: Any, activation: str) -> Tensor:
    u = _wide(x, bias)
    out_dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
    return (u * _gate_and_slope(u, activation)[0]).to(out_dtype)


@jit_fuser
def _backward(grad: Tensor, x: Tensor, bias: Any, activation: str) -> Tensor:
    return _gradient(grad, x, bias, activation).to(x.dtype)


@jit_fuser
def _backward_with_bias(grad: Tensor, x: Tensor, bias: Tensor, activation: str, block: int) -> tuple[Tensor, Tensor]:
    dx = _gradient(grad, x, bias, activation)
    return dx.to(x.dtype), block_sums(dx, block)


def _gradient(grad: Tensor, x: Tensor, bias: Any, activation: str) -> Tensor:
    u = _wide(x, bias)
    gate, slope = _gate_and_slope(u, activation)
    return grad * (gate + u * slope)


def _gate_and_slope(u: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The factor that u is multiplied with (a sigmoid, or the normal distribution function), and its derivative."""
    if activation == "gelu":
        return _normal_distribution(u)
    if activation == "gelu_tanh":
        k = 2 * _SQRT_2_OVER_PI
        gate, slope = _sigmoid(u * (k + (k * 0.044715) * (u * u)))
        return gate, slope * (k + (3 * k * 0.044715) * (u * u))
    gate, slope = _sigmoid(1.702 * u)
    return gate, 1.702 * slope


def _sigmoid(v: Tensor) -> tuple[Tensor, Tensor]:
    """sigmoid(v) and its derivative as sigmoid^2 exp(-v), which does not cancel as sigmoid (1 - sigmoid) does near 1."""
    inverse = torch.exp(-torch.clamp(v, min=-80.0))  # beyond it exp overflows and the derivative would be 0 * inf
    gate = 1.0 / (1.0 + inverse)
    return gate, gate * gate * inverse


def _normal_distribution(u: Tensor) -> tuple[Tensor, Tensor]:
    """Distribution and density of the standard normal.

    Below fp64 by Abramowitz & Stegun 7.1.26 (error 1.5e-7, that of fp32): it needs the exponential that the density is,
    and gives the lower tail directly, where 0.5 (1 + erf) cancels.
    """
    bell = torch.exp(-0.5 * (u * u))
    density = bell * (1 / math.sqrt(2 * math.pi))
    if u.dtype == torch.float64:
        return 0.5 * torch.erfc(-u * math.sqrt(0.5)), density
    t = 1.0 / (1.0 + (0.3275911 * math.sqrt(0.5)) * u.abs())
    series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    tail = 0.5 * series * bell
    return torch.where(u > 0, 1.0 - tail, tail), density


def _wide(x: Tensor, bias: Any) -> Tensor:
    """x + bias, in fp32 for half precision."""
    x = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return x if bias is None else x + bias


BACKENDS = {"bias_activation": {"reference": reference, "compile": compiled}}


# ---- Megatron's names -------------------------------------------------------------------------------------------------


class GeLUFunction:
    """Megatron's handle of the operation: `GeLUFunction.apply(input, bias)` is the tanh form."""

    @staticmethod
    def apply(input: Tensor, bias: Tensor, approximate: str = "tanh") -> Tensor:
        """gelu(input + bias)."""
        return bias_gelu_impl(input, bias, approximate)


def bias_gelu_impl(input: Tensor, bias: Tensor, approximate: str = "tanh") -> Tensor:
    """gelu(input + bias); `approximate` "tanh" or "none" as in torch.nn.functional.gelu."""
    if approximate not in ("tanh", "none"):
        raise ValueError(f"approximate is {approximate!r}; expected 'tanh' or 'none'")
    return compiled(input, bias, "gelu_tanh" if approximate == "tanh" else "gelu")


def bias_gelu(bias: Tensor, y: Tensor) -> Tensor:
    """gelu_tanh(y + bias), without a gradient of its own; note the order of the arguments."""
    return _forward(y, bias, "gelu_tanh")


def bias_gelu_back(g: Tensor, bias: Tensor, y: Tensor) -> Tensor:
    """The gradient of gelu_tanh(y + bias) times g."""
    return _backward(g, y, bias, "gelu_tanh")
