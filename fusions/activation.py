"""The activations of an MLP: their arithmetic once, for the modules fused_bias_gelu, _geglu, _swiglu and _squared_relu.

Each is u * gate(u); a gated one multiplies the first half of the last dimension, activated, with the second:

    plain   y = act(x + bias) * weights                                        x [..., h]  -> y [..., h]
    gated   y = act(min(u1, c)) * (clip(u2, -c, c) + offset) * weights         x [..., 2h] -> y [..., h]
            [u1 | u2] = x + bias

`bias` [width of x] or None; `weights` [..., 1] (one factor per token) or None; the clamp c comes after the bias, and its
gradient is that of torch.clamp (1 at the bound). Half precision is computed in fp32 and rounded once, at the end; the
gradient of the weights is that of the rounded activation, as it is when the product with them is an operation of its own.
Saved for the backward, per element of x: x itself, or 1 byte (float8_e4m3fn, without a scale) with `fp8_input_store`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusions.column_sum import block_sums, row_block, total
from fusions.jit import jit_fuser
from fusions.kernels import Kernels, as_row, wide

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
GATES = ("gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "squared_relu")


@dataclass(frozen=True)
class Rule:
    """Which activation, whether it gates, and the clamp and offset of the gated form."""

    act: str
    gated: bool = False
    clamp: float | None = None
    offset: float = 0.0


def bias_activation(
    kernels: Kernels,
    x: Tensor,
    bias: Tensor | None,
    rule: Rule,
    weights: Tensor | None = None,
    fp8_input_store: bool = False,
) -> Tensor:
    """The operation with one backend's kernels. Raises ValueError if a gated x has an odd width."""
    if rule.gated and x.shape[-1] % 2:
        raise ValueError(f"the last dimension of {list(x.shape)} is odd; a gated activation splits it into two halves")
    bias = as_row(bias, x.shape[-1])
    if bias is not None and bias.dim() != 1:
        x, bias = x + bias, None
    return _BiasActivation.apply(x, bias, weights, rule, kernels, fp8_input_store)


class _BiasActivation(torch.autograd.Function):
    """Kernels: forward(x, bias, weights, rule) -> y; backward(grad, x, bias, weights, rule) -> (dx, dbias, dweights)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Any, weights: Any, rule: Rule, kernels: Kernels, fp8_input_store: bool) -> Tensor:
        ctx.save_for_backward(x.to(torch.float8_e4m3fn) if fp8_input_store else x, bias, weights)
        ctx.rule, ctx.kernels, ctx.dtype = rule, kernels, x.dtype
        return kernels.forward(x, bias, weights, rule)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, weights = ctx.saved_tensors
        dx, dbias, dweights = ctx.kernels.backward(grad, x.to(ctx.dtype), bias, weights, ctx.rule)
        return dx, dbias, dweights, None, None, None


def _forward(x: Tensor, bias: Any, weights: Any, rule: Rule) -> Tensor:
    return _forward_kernel(x, bias, weights, rule.act, rule.gated, rule.clamp, rule.offset)


def _backward(grad: Tensor, x: Tensor, bias: Any, weights: Any, rule: Rule) -> tuple[Tensor, Tensor | None, Tensor | None]:
    block = 0 if bias is None else row_block(x)
    dx, sums, dweights = _backward_kernel(grad, x, bias, weights, rule.act, rule.gated, rule.clamp, rule.offset, block)
    return dx, total(sums, bias), dweights


@jit_fuser
def _forward_kernel(x: Tensor, bias: Any, weights: Any, act: str, gated: bool, clamp: float | None, offset: float) -> Tensor:
    u = wide(x) if bias is None else wide(x) + bias
    if not gated:
        y = u * gate_and_slope(u, act)[0]
    else:
        first, second = u.chunk(2, -1)
        if clamp is not None:
            first, second = first.clamp(max=clamp), second.clamp(-clamp, clamp)
        y = first * gate_and_slope(first, act)[0] * (second + offset if offset else second)
    if weights is not None:
        y = y * weights
    return y.to(x.dtype)


@jit_fuser
def _backward_kernel(
    grad: Tensor, x: Tensor, bias: Any, weights: Any, act: str, gated: bool, clamp: float | None, offset: float, block: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    u = wide(x) if bias is None else wide(x) + bias
    g, dweights = wide(grad), None
    if not gated:
        gate, slope = gate_and_slope(u, act)
        if weights is not None:
            dweights = (g * wide((u * gate).to(x.dtype))).sum(-1, keepdim=True).to(weights.dtype)
            g = g * weights
        du = g * (gate + u * slope)
        sums = block_sums(du, block) if block else None
        return du.to(x.dtype), sums, dweights
    raw_first, raw_second = u.chunk(2, -1)
    first, second = raw_first, raw_second
    if clamp is not None:
        first, second = first.clamp(max=clamp), second.clamp(-clamp, clamp)
    linear = second + offset if offset else second
    gate, slope = gate_and_slope(first, act)
    activated = first * gate
    if weights is not None:
        dweights = (g * wide((activated * linear).to(x.dtype))).sum(-1, keepdim=True).to(weights.dtype)
        g = g * weights
    dfirst, dsecond = g * linear * (gate + first * slope), g * activated
    if clamp is not None:
        dfirst = torch.where(raw_first <= clamp, dfirst, 0.0)
        dsecond = torch.where(raw_second.abs() <= clamp, dsecond, 0.0)
    du = torch.cat([dfirst, dsecond], -1)
    sums = block_sums(du, block) if block else None
    return du.to(x.dtype), sums, dweights


def gate_and_slope(u: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """The factor that u is multiplied with, and its derivative."""
    if act == "gelu":
        return _normal_distribution(u)
    if act == "gelu_tanh":  # 0.5 (1 + tanh v) = sigmoid(2 v), and exp is cheaper than tanh in vector code
        k = 2 * _SQRT_2_OVER_PI
        gate, slope = _sigmoid(u * (k + (k * 0.044715) * (u * u)))
        return gate, slope * (k + (3 * k * 0.044715) * (u * u))
    if act == "quick_gelu":
        gate, slope = _sigmoid(1.702 * u)
        return gate, 1.702 * slope
    if act == "silu":
        return _sigmoid(u)
    positive = (u > 0).to(u.dtype)
    return (positive, torch.zeros_like(u)) if act == "relu" else (u * positive, positive)


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


COMPILED = Kernels(_forward, _backward)
