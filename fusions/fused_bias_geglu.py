"""GEGLU (tanh form) and quick-GEGLU with bias, clamp, linear offset and per-token weights (Shazeer 2020, arXiv:2002.05202).

    [u1 | u2] = x + bias;   y = act(min(u1, c)) * (clip(u2, -c, c) + offset) * weights
    act: gelu_tanh, gelu (erf) or quick_gelu

Shapes: x [..., 2h], gate first; bias [2h] or None; weights [..., 1] or None; y [..., h] in x's dtype. The clamp comes after
the bias in every form. Saved for the backward, per element of x: x (its own bytes), or 1 byte with `fp8_input_store`.
The arithmetic is in activation.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusions.activation import COMPILED, Rule, bias_activation
from fusions.fused_bias_gelu import activation_function
from fusions.kernels import Kernels, triton_kernels


def reference(
    x: Tensor,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    act: str = "gelu_tanh",
    clamp: float | None = None,
    offset: float = 0.0,
    fp8_input_store: bool = False,
) -> Tensor:
    """The definition, in plain PyTorch. `fp8_input_store` only concerns what fused forms save."""
    gate, linear = (x if bias is None else x + bias).chunk(2, -1)
    if clamp is not None:
        gate, linear = gate.clamp(max=clamp), linear.clamp(-clamp, clamp)
    y = activation_function(act)(gate) * (linear + offset if offset else linear)
    return (y if weights is None else y * weights).to(x.dtype)


def compiled(x: Tensor, bias: Tensor | None = None, weights: Tensor | None = None, **options: Any) -> Tensor:
    """The same in one pass forward and one backward. Options as in `reference`."""
    return _fused(COMPILED, x, bias, weights, **options)


def triton(x: Tensor, bias: Tensor | None = None, weights: Tensor | None = None, **options: Any) -> Tensor:
    """The same with Triton kernels."""
    return _fused(triton_kernels("activation"), x, bias, weights, **options)


def _fused(
    kernels: Kernels,
    x: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    *,
    act: str = "gelu_tanh",
    clamp: float | None = None,
    offset: float = 0.0,
    fp8_input_store: bool = False,
) -> Tensor:
    return bias_activation(kernels, x, bias, Rule(act, True, clamp, offset), weights, fp8_input_store)


BACKENDS = {"bias_geglu": {"reference": reference, "compile": compiled, "triton": triton}}


# ---- Megatron's names -------------------------------------------------------------------------------------------------

_TANH, _QUICK = Rule("gelu_tanh", True), "quick_gelu"


def geglu(y: Tensor) -> Tensor:
    """gelu_tanh(y1) * y2; differentiable."""
    return compiled(y)


def bias_geglu(bias: Tensor, y: Tensor) -> Tensor:
    """geglu(y + bias); differentiable. Note the order of the arguments."""
    return compiled(y, bias)


def geglu_back(g: Tensor, y: Tensor) -> Tensor:
    """The gradient of geglu(y) times g."""
    return COMPILED.backward(g, y, None, None, _TANH)[0]


def bias_geglu_back(g: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    """The gradient of geglu(y + bias) times g."""
    return COMPILED.backward(g, y, bias, None, _TANH)[0]


class GeGLUFunction:
    """Megatron's handle: `GeGLUFunction.apply(input)`."""

    @staticmethod
    def apply(input: Tensor) -> Tensor:
        """geglu(input)."""
        return compiled(input)


class BiasGeGLUFunction:
    """Megatron's handle: `BiasGeGLUFunction.apply(input, bias)`."""

    @staticmethod
    def apply(input: Tensor, bias: Tensor) -> Tensor:
        """geglu(input + bias)."""
        return compiled(input, bias)


def bias_geglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """geglu(input + bias) of [s, b, 2h] or [n, 2h]."""
    assert input.dim() in (2, 3), f"expected 2 or 3 dimensions, got {list(input.shape)}"
    return compiled(input, bias)


def quick_gelu(y: Tensor) -> Tensor:
    """y * sigmoid(1.702 y)."""
    return activation_function(_QUICK)(y)


def quick_geglu(y: Tensor, linear_offset: float = 0.0) -> Tensor:
    """quick_gelu(y1) * (y2 + linear_offset); differentiable."""
    return compiled(y, act=_QUICK, offset=float(linear_offset))


def weighted_quick_geglu(y: Tensor, weights: Tensor, linear_offset: float = 0.0) -> Tensor:
    """quick_geglu(y) * weights; differentiable."""
    return compiled(y, None, weights, act=_QUICK, offset=float(linear_offset))


def weighted_bias_quick_geglu(y: Tensor, bias: Tensor, weights: Tensor, linear_offset: float = 0.0) -> Tensor:
    """quick_geglu(y + bias) * weights; differentiable."""
    return compiled(y, bias, weights, act=_QUICK, offset=float(linear_offset))


def quick_geglu_back(g: Tensor, y: Tensor, linear_offset: float = 0.0) -> Tensor:
    """The gradient of quick_geglu(y) times g."""
    return COMPILED.backward(g, y, None, None, Rule(_QUICK, True, None, float(linear_offset)))[0]


def weighted_quick_geglu_back(g: Tensor, y: Tensor, weights: Tensor, linear_offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """(gradient of y, gradient of weights) of weighted_quick_geglu times g."""
    dy, _, dweights = COMPILED.backward(g, y, None, weights, Rule(_QUICK, True, None, float(linear_offset)))
    return dy, dweights


def weighted_bias_quick_geglu_back(
    g: Tensor, y: Tensor, bias: Tensor, weights: Tensor, linear_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of y, of the bias per token as Megatron hands it on, of weights) times g."""
    dy, _, dweights = COMPILED.backward(g, y, bias, weights, Rule(_QUICK, True, None, float(linear_offset)))
    return dy, dy, dweights


class WeightedQuickGeGLUFunction:
    """Megatron's handle: `WeightedQuickGeGLUFunction.apply(input, weights, fp8_input_store, linear_offset)`."""

    @staticmethod
    def apply(input: Tensor, weights: Tensor, fp8_input_store: bool = False, linear_offset: Tensor | float = 0.0) -> Tensor:
        """weighted_quick_geglu."""
        return weighted_bias_quick_geglu_impl(input, None, weights, fp8_input_store, float(linear_offset))


class WeightedBiasQuickGeGLUFunction:
    """Megatron's handle: `WeightedBiasQuickGeGLUFunction.apply(input, bias, weights, fp8_input_store, linear_offset)`."""

    @staticmethod
    def apply(
        input: Tensor,
        bias: Tensor,
        weights: Tensor,
        fp8_input_store: bool = False,
        linear_offset: Tensor | float = 0.0,
    ) -> Tensor:
        """weighted_bias_quick_geglu."""
        return weighted_bias_quick_geglu_impl(input, bias, weights, fp8_input_store, float(linear_offset))


def weighted_bias_quick_geglu_impl(
    input: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    fp8_input_store: bool = False,
    linear_offset: float = 0.0,
    clamp_value: float | None = None,
) -> Tensor:
    """quick_geglu(input + bias) * weights of [n, 2h] (or [s, b, 2h], n = s b) and [n, 1].

    The clamp comes after the bias (Megatron's comes before).
    """
    assert input.dim() in (2, 3), f"expected 2 or 3 dimensions, got {list(input.shape)}"
    clamp = clamp_value if clamp_value is not None and clamp_value > 0 else None
    options = {"act": _QUICK, "clamp": clamp, "offset": float(linear_offset), "fp8_input_store": fp8_input_store}
    y = compiled(input.reshape(-1, input.shape[-1]), bias, weights.reshape(-1, 1), **options)
    return y.view(*input.shape[:-1], -1)
