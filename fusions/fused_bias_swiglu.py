"""SwiGLU with bias, clamp and per-token weights: silu(u1) * u2 (Shazeer 2020, arXiv:2002.05202).

    [u1 | u2] = x + bias;   y = silu(min(u1, c)) * clip(u2, -c, c) * weights

Shapes: x [..., 2h], gate first; bias [2h] or None; weights [..., 1] or None; y [..., h] in x's dtype. Saved for the backward,
per element of x: x (its own bytes), or 1 byte with `fp8_input_store`, which changes gradients by fp8's rounding (2^-4
relative per input). The reference keeps four to six tensors of half its size. The arithmetic is in activation.py.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fusions.activation import COMPILED, Rule, bias_activation
from fusions.kernels import Kernels, triton_kernels


def reference(
    x: Tensor,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    clamp: float | None = None,
    fp8_input_store: bool = False,
) -> Tensor:
    """The definition, in plain PyTorch. `fp8_input_store` only concerns what fused forms save."""
    gate, linear = (x if bias is None else x + bias).chunk(2, -1)
    if clamp is not None:
        gate, linear = gate.clamp(max=clamp), linear.clamp(-clamp, clamp)
    y = F.silu(gate) * linear
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
    clamp: float | None = None,
    fp8_input_store: bool = False,
) -> Tensor:
    return bias_activation(kernels, x, bias, Rule("silu", True, clamp), weights, fp8_input_store)


BACKENDS = {"bias_swiglu": {"reference": reference, "compile": compiled, "triton": triton}}


# ---- Megatron's names -------------------------------------------------------------------------------------------------


def swiglu(y: Tensor) -> Tensor:
    """silu(y1) * y2; differentiable."""
    return compiled(y)


def bias_swiglu(y: Tensor, bias: Tensor) -> Tensor:
    """swiglu(y + bias); differentiable."""
    return compiled(y, bias)


def weighted_swiglu(y: Tensor, weights: Tensor) -> Tensor:
    """swiglu(y) * weights; differentiable."""
    return compiled(y, None, weights)


def clamped_swiglu(y: Tensor, clamp_value: float) -> Tensor:
    """silu(min(y1, c)) * clip(y2, -c, c); differentiable."""
    return compiled(y, clamp=clamp_value)


def bias_clamped_swiglu(y: Tensor, bias: Tensor, clamp_value: float) -> Tensor:
    """clamped_swiglu(y + bias); differentiable."""
    return compiled(y, bias, clamp=clamp_value)


def clamped_weighted_swiglu(y: Tensor, weights: Tensor, clamp_value: float) -> Tensor:
    """clamped_swiglu(y) * weights; differentiable."""
    return compiled(y, None, weights, clamp=clamp_value)


def swiglu_back(g: Tensor, y: Tensor) -> Tensor:
    """The gradient of swiglu(y) times g."""
    return COMPILED.backward(g, y, None, None, Rule("silu", True))[0]


def bias_swiglu_back(g: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    """The gradient of swiglu(y + bias) times g."""
    return COMPILED.backward(g, y, bias, None, Rule("silu", True))[0]


def weighted_swiglu_back(g: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of y, gradient of weights) of weighted_swiglu times g."""
    dy, _, dweights = COMPILED.backward(g, y, None, weights, Rule("silu", True))
    return dy, dweights


def clamped_swiglu_back(g: Tensor, y: Tensor, clamp_value: float) -> Tensor:
    """The gradient of clamped_swiglu(y) times g; 0 beyond the clamp, 1 at it."""
    return COMPILED.backward(g, y, None, None, Rule("silu", True, clamp_value))[0]


def bias_clamped_swiglu_back(g: Tensor, y: Tensor, bias: Tensor, clamp_value: float) -> Tensor:
    """The gradient of bias_clamped_swiglu(y, bias) times g."""
    return COMPILED.backward(g, y, bias, None, Rule("silu", True, clamp_value))[0]


def clamped_weighted_swiglu_back(g: Tensor, y: Tensor, weights: Tensor, clamp_value: float) -> tuple[Tensor, Tensor]:
    """(gradient of y, gradient of weights) of clamped_weighted_swiglu times g."""
    dy, _, dweights = COMPILED.backward(g, y, None, weights, Rule("silu", True, clamp_value))
    return dy, dweights


class SwiGLUFunction:
    """Megatron's handle: `SwiGLUFunction.apply(input, fp8_input_store, cpu_offload_input, clamp_value)`."""

    @staticmethod
    def apply(
        input: Tensor, fp8_input_store: bool = False, cpu_offload_input: bool = False, clamp_value: float | None = None
    ) -> Tensor:
        """swiglu(input)."""
        return bias_swiglu_impl(input, None, fp8_input_store, cpu_offload_input, clamp_value)


class BiasSwiGLUFunction:
    """Megatron's handle: `BiasSwiGLUFunction.apply(input, bias, fp8_input_store, cpu_offload_input, clamp_value)`."""

    @staticmethod
    def apply(
        input: Tensor,
        bias: Tensor,
        fp8_input_store: bool = False,
        cpu_offload_input: bool = False,
        clamp_value: float | None = None,
    ) -> Tensor:
        """swiglu(input + bias)."""
        return bias_swiglu_impl(input, bias, fp8_input_store, cpu_offload_input, clamp_value)


class WeightedSwiGLUFunction:
    """Megatron's handle: `WeightedSwiGLUFunction.apply(input, weights, fp8_input_store, clamp_value)`."""

    @staticmethod
    def apply(input: Tensor, weights: Tensor, fp8_input_store: bool = False, clamp_value: float | None = None) -> Tensor:
        """swiglu(input) * weights."""
        return weighted_bias_swiglu_impl(input, None, weights, fp8_input_store, clamp_value)


def bias_swiglu_impl(
    input: Tensor,
    bias: Tensor | None,
    fp8_input_store: bool = False,
    cpu_offload_input: bool = False,
    clamp_value: float | None = None,
) -> Tensor:
    """swiglu(input + bias) of [s, b, 2h] or [n, 2h]. `cpu_offload_input` is a hint that nothing here needs."""
    assert input.dim() in (2, 3), f"expected 2 or 3 dimensions, got {list(input.shape)}"
    return compiled(input, bias, clamp=_positive(clamp_value), fp8_input_store=fp8_input_store)


def weighted_bias_swiglu_impl(
    input: Tensor, bias: Tensor | None, weights: Tensor, fp8_input_store: bool = False, clamp_value: float | None = None
) -> Tensor:
    """swiglu(input) * weights of [n, 2h] (or [s, b, 2h], n = s b) and [n, 1].

    Raises NotImplementedError with a bias, as Megatron's does.
    """
    assert input.dim() in (2, 3), f"expected 2 or 3 dimensions, got {list(input.shape)}"
    if bias is not None:
        raise NotImplementedError("Bias is not supported for weighted swiglu fusion")
    flat = input.reshape(-1, input.shape[-1])
    y = compiled(flat, None, weights.reshape(-1, 1), clamp=_positive(clamp_value), fp8_input_store=fp8_input_store)
    return y.view(*input.shape[:-1], -1)


def _positive(clamp: float | None) -> float | None:
    """Megatron's rule: a clamp that isn't above 0 is no clamp."""
    return clamp if clamp is not None and clamp > 0 else None
