"""activation(x + bias): the three GELUs, erf, tanh and quick, and SiLU and ReLU. Which one is the config's `activation`.

    gelu        0.5 u (1 + erf(u / sqrt 2))                             u = x + bias
    gelu_tanh   0.5 u (1 + tanh(sqrt(2/pi) (u + 0.044715 u^3)))         Hendrycks & Gimpel 2016, arXiv:1606.08415
    quick_gelu  u sigmoid(1.702 u)
    silu        u sigmoid(u)

Shapes: x [..., f]; bias [f] (any bias that broadcasts works) or None. Saved for the backward, per element: x (its own
bytes); the reference keeps u as well. The arithmetic of the kernels is in activation.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fusions.activation import COMPILED, Rule, bias_activation
from fusions.kernels import triton_kernels


def activation_function(activation: str) -> Callable[[Tensor], Tensor]:
    """The plain activation of a name: gelu, gelu_tanh, quick_gelu, silu, relu or squared_relu."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu": F.gelu,
        "gelu_tanh": lambda u: F.gelu(u, approximate="tanh"),
        "quick_gelu": lambda u: u * torch.sigmoid(1.702 * u),
        "silu": F.silu,
        "relu": F.relu,
        "squared_relu": lambda u: F.relu(u).square(),
    }
    return functions[activation]


def reference(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """The definition, in plain PyTorch."""
    return activation_function(activation)(x if bias is None else x + bias)


def compiled(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """The same in one pass forward and one backward."""
    return bias_activation(COMPILED, x, bias, Rule(activation))


def triton(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """The same with Triton kernels."""
    return bias_activation(triton_kernels("activation"), x, bias, Rule(activation))


BACKENDS = {"bias_gelu": {"reference": reference, "compile": compiled, "triton": triton}}


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
    return COMPILED.forward(y, bias, None, Rule("gelu_tanh"))


def bias_gelu_back(g: Tensor, bias: Tensor, y: Tensor) -> Tensor:
    """The gradient of gelu_tanh(y + bias) times g."""
    return COMPILED.backward(g, y, bias, None, Rule("gelu_tanh"))[0]
