"""residual + dropout(x + bias, prob).

Shapes: x, residual [s, b, h]; bias [h] or None (any shapes that broadcast work). x and bias are cast to the residual's
dtype, and the output has it. Saved for the backward, per element: the reference 1 byte (the boolean mask); the fused forms
nothing (the mask is recomputed from 8 bytes per row). With the norm that follows: fused_residual_norm.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusions.column_sum import block_sums, row_block
from fusions.jit import jit_fuser
from fusions.kernels import Kernels, as_row, triton_kernels, wide
from fusions.random import (
    MaskKey,
    column_counters,
    drop_threshold,
    dropout,
    keep_mask_expression,
    keep_scale,
    random_mask_key,
)


def reference(
    x: Tensor, bias: Tensor | None, residual: Tensor, prob: float, training: bool, mask_key: MaskKey | None = None
) -> Tensor:
    """The definition. `mask_key` None draws one from torch's generator; prob 0, or not training, draws nothing."""
    x, bias = _cast(x, bias, residual)
    if bias is not None:
        x = x + bias
    if training and prob > 0:
        x = dropout(x, prob, mask_key or random_mask_key(x))
    return residual + x


def compiled(
    x: Tensor, bias: Tensor | None, residual: Tensor, prob: float, training: bool, mask_key: MaskKey | None = None
) -> Tensor:
    """The same in one pass forward and one backward."""
    return _fused(_COMPILED, x, bias, residual, prob, training, mask_key)


def triton(
    x: Tensor, bias: Tensor | None, residual: Tensor, prob: float, training: bool, mask_key: MaskKey | None = None
) -> Tensor:
    """The same with Triton kernels. Raises ValueError for shapes that only match by broadcasting, which have none."""
    if x.shape != residual.shape or (bias is not None and as_row(bias, x.shape[-1]).dim() != 1):  # pyright: ignore
        shapes = [None if t is None else list(t.shape) for t in (x, bias, residual)]
        raise ValueError(f"x, bias and residual are {shapes}; the Triton kernel needs x and residual of one shape, bias [h]")
    return _fused(triton_kernels("bias_dropout"), x, bias, residual, prob, training, mask_key)


def _fused(
    kernels: Kernels, x: Tensor, bias: Any, residual: Tensor, prob: float, training: bool, mask_key: MaskKey | None
) -> Tensor:
    x, bias = _cast(x, bias, residual)
    bias = as_row(bias, x.shape[-1])
    if not (training and prob > 0):
        return _BiasAdd.apply(x, bias, residual, kernels)
    key = mask_key or random_mask_key(x)
    return _BiasDropoutAdd.apply(x, bias, residual, key.first, key.second, prob, kernels)


class _BiasDropoutAdd(torch.autograd.Function):
    """Saves the row keys: 8 bytes per row of x.

    Kernels: forward(x, bias, residual, first, second, prob) -> sum; backward(grad, first, second, prob, bias: bool) ->
    (dx, dbias or None).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Any, residual: Tensor, first: Tensor, second: Tensor, prob: float, kernels: Kernels
    ) -> Tensor:
        ctx.save_for_backward(first, second)
        ctx.prob, ctx.kernels = prob, kernels
        ctx.shapes = (x.shape, None if bias is None else bias.shape, residual.shape)
        return kernels.forward(x, bias, residual, first, second, prob)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, second = ctx.saved_tensors
        x_shape, bias_shape, residual_shape = ctx.shapes
        row_bias = bias_shape is not None and len(bias_shape) == 1
        dx, dbias = ctx.kernels.backward(grad, first, second, ctx.prob, row_bias)
        if bias_shape is not None and not row_bias:
            dbias = dx.sum_to_size(bias_shape)
        return dx.sum_to_size(x_shape), dbias, grad.sum_to_size(residual_shape), None, None, None, None


class _BiasAdd(torch.autograd.Function):
    """Without dropout: saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Any, residual: Tensor, kernels: Kernels) -> Tensor:
        ctx.shapes = (x.shape, None if bias is None else bias.shape, residual.shape)
        return kernels.forward(x, bias, residual, None, None, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = zip(ctx.shapes, ctx.needs_input_grad[:3], strict=True)
        return (*(grad.sum_to_size(shape) if shape is not None and needed else None for shape, needed in wanted), None)


def _forward(x: Tensor, bias: Any, residual: Tensor, first: Any, second: Any, prob: float) -> Tensor:
    if first is None:
        return _forward_no_dropout(x, bias, residual)
    return _forward_dropout(x, bias, residual, *drop_rule(x, first, second, prob))


def _backward(grad: Tensor, first: Tensor, second: Tensor, prob: float, bias: bool) -> tuple[Tensor, Tensor | None]:
    dx, sums = _backward_dropout(grad, *drop_rule(grad, first, second, prob), row_block(grad) if bias else 0)
    return dx, None if sums is None else sums.sum(0).to(grad.dtype)


def drop_rule(x: Tensor, first: Tensor, second: Tensor, prob: float) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """(counters, row keys, threshold, 1 / (1 - prob)): what keep_mask_expression and the scaling need."""
    return column_counters(x.shape[-1], x.device), first, second, drop_threshold(prob, x.device), keep_scale(prob)


@jit_fuser
def _forward_dropout(
    x: Tensor, bias: Any, residual: Tensor, counters: Tensor, first: Tensor, second: Tensor, threshold: Tensor, scale: float
) -> Tensor:
    v = wide(x) if bias is None else wide(x) + bias
    keep = keep_mask_expression(counters, first, second, threshold)
    return (residual + torch.where(keep, v * scale, 0.0)).to(residual.dtype)


@jit_fuser
def _backward_dropout(
    grad: Tensor, counters: Tensor, first: Tensor, second: Tensor, threshold: Tensor, scale: float, block: int
) -> tuple[Tensor, Tensor | None]:
    dx = torch.where(keep_mask_expression(counters, first, second, threshold), wide(grad) * scale, 0.0)
    return dx.to(grad.dtype), block_sums(dx, block) if block else None


@jit_fuser
def _forward_no_dropout(x: Tensor, bias: Any, residual: Tensor) -> Tensor:
    return (residual + (wide(x) if bias is None else wide(x) + bias)).to(residual.dtype)


def _cast(x: Tensor, bias: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor | None]:
    return x.to(residual.dtype), None if bias is None else bias.to(residual.dtype)


_COMPILED = Kernels(_forward, _backward)
BACKENDS = {"bias_dropout_add": {"reference": reference, "compile": compiled, "triton": triton}}


# ---- Megatron's names -------------------------------------------------------------------------------------------------

XWithBias = tuple[Tensor, Tensor | None]


def _bias_dropout_add_func(
    x_with_bias: XWithBias, residual: Tensor, prob: float, training: bool, mask_key: MaskKey | None = None
) -> Tensor:
    """`reference` with Megatron's arguments. In inference, when nothing needs a gradient, the sum is written into x."""
    x, bias = x_with_bias
    if _may_overwrite(x, bias, residual, training):
        return _add_into(x, bias, residual)
    return reference(x, bias, residual, prob, training, mask_key)


def bias_dropout_add_unfused(training: bool) -> Callable[..., Tensor]:
    """The plain operation as `f((x, bias), residual, prob, mask_key=None)`."""

    def call(x_with_bias: XWithBias, residual: Tensor, prob: float, mask_key: MaskKey | None = None) -> Tensor:
        return _bias_dropout_add_func(x_with_bias, residual, prob, training, mask_key)

    return call


def bias_dropout_add_fused_train(
    x_with_bias: XWithBias, residual: Tensor, prob: float, mask_key: MaskKey | None = None
) -> Tensor:
    """The compiled operation with dropout."""
    return compiled(*x_with_bias, residual, prob, training=True, mask_key=mask_key)


def bias_dropout_add_fused_inference(
    x_with_bias: XWithBias, residual: Tensor, prob: float, mask_key: MaskKey | None = None
) -> Tensor:
    """The compiled operation without dropout; in place like the plain one."""
    x, bias = x_with_bias
    if _may_overwrite(x, bias, residual, training=False):
        return _add_into(x, bias, residual)
    return compiled(x, bias, residual, prob, training=False, mask_key=mask_key)


def get_bias_dropout_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    """The operation for a layer's slot: `f((x, bias), residual, prob)`."""
    if not fused:
        return bias_dropout_add_unfused(training)
    return bias_dropout_add_fused_train if training else bias_dropout_add_fused_inference


def _may_overwrite(x: Tensor, bias: Tensor | None, residual: Tensor, training: bool) -> bool:
    tensors = (x, residual) if bias is None else (x, residual, bias)
    needs_grad = any(t.requires_grad for t in tensors)  # also under no_grad: a parameter is never written
    storage = x.untyped_storage().data_ptr()
    shared = any(t.untyped_storage().data_ptr() == storage for t in tensors[1:])
    same = x.dtype == residual.dtype and x.shape == residual.shape and x.is_contiguous()
    return same and not (training or needs_grad or shared)


def _add_into(x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    if bias is not None:
        x.add_(bias)
    return x.add_(residual)
