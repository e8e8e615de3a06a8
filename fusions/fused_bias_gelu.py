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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dx = _backward(grad, x, bias, ctx.activation)
        return dx, dx.sum_to_size(bias.shape) if ctx.needs_input_grad[1] else None, None


def _gate(u: Tensor, activation: str) -> Tensor:
    """The factor that u is multiplied with: a sigmoid, or the normal distribution function."""
    if activation == "gelu":
        return 0.5 + 0.5 * torch.erf(u * math.sqrt(0.5))
    if activation == "gelu_tanh":
        return torch.sigmoid(u * (2 * _SQRT_2_OVER_PI + (2 * _SQRT_2_OVER_PI * 0.044715) * (u * u)))
    return torch.sigmoid(1.702 * u)


@jit_fuser
def _forward(x: Tensor, bias: Any, activation: str) -> Tensor:
    u = _wide(x, bias)
    return (u * _gate(u, activation)).to(x.dtype)


@jit_fuser
def _backward(grad: Tensor, x: Tensor, bias: Any, activation: str) -> Tensor:
    u = _wide(x, bias)
    gate = _gate(u, activation)
    if activation == "gelu":
        slope = torch.exp(-0.5 * (u * u)) * (1 / math.sqrt(2 * math.pi))
    elif activation == "gelu_tanh":
        inner = 2 * _SQRT_2_OVER_PI + (6 * _SQRT_2_OVER_PI * 0.044715) * (u * u)
        slope = (gate - gate * gate) * inner
    else:
        slope = 1.702 * (gate - gate * gate)
    return (grad * (gate + u * slope)).to(x.dtype)


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
