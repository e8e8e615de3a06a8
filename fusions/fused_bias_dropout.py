"""residual + dropout(x + bias, prob).

Shapes: x, residual [s, b, h]; bias [h] or None (any shapes that broadcast work). x and bias are cast to the residual's
dtype, and the output has it. Saved for the backward, per element: reference 1 byte (the boolean mask); compile nothing
(the mask is recomputed from 8 bytes per row).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusions.column_sum import block_sums, row_block
from fusions.jit import jit_fuser
from fusions.random import MaskKey, column_counters, drop_threshold, dropout, keep_mask_expression, random_mask_key


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
    x, bias = _cast(x, bias, residual)
    if not (training and prob > 0):
        return _BiasAdd.apply(x, bias, residual)
    key = mask_key or random_mask_key(x)
    return _BiasDropoutAdd.apply(x, bias, residual, key.first, key.second, prob)


class _BiasDropoutAdd(torch.autograd.Function):
    """Saves the row keys: 8 bytes per row of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Any, residual: Tensor, first: Tensor, second: Tensor, prob: float) -> Tensor:
        ctx.save_for_backward(first, second)
        ctx.prob, ctx.shapes = prob, (x.shape, None if bias is None else bias.shape, residual.shape)
        counters, threshold = column_counters(x.shape[-1], x.device), drop_threshold(prob, x.device)
        return _forward(x, bias, residual, counters, first, second, threshold, 1.0 / (1.0 - prob))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, second = ctx.saved_tensors
        x_shape, bias_shape, residual_shape = ctx.shapes
        counters, threshold = column_counters(grad.shape[-1], grad.device), drop_threshold(ctx.prob, grad.device)
        rule = (counters, first, second, threshold, 1.0 / (1.0 - ctx.prob))
        if bias_shape is not None and len(bias_shape) == 1:
            dx, sums = _backward_with_bias(grad, *rule, row_block(grad))
            dbias = sums.sum(0).to(grad.dtype)
        else:
            dx = _backward(grad, *rule)
            dbias = None if bias_shape is None else dx.sum_to_size(bias_shape)
        return (
            dx.sum_to_size(x_shape),
            dbias,
            grad.sum_to_size(residual_shape),
            None,
            None,
            None,
        )


class _BiasAdd(torch.autograd.Function):
    """Without dropout: saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Any, residual: Tensor) -> Tensor:
        ctx.shapes = (x.shape, None if bias is None else bias.shape, residual.shape)
        return _forward_no_dropout(x, bias, residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(
            grad.sum_to_size(shape) if shape is not None and needed else None
            for shape, needed in zip(ctx.shapes, ctx.needs_input_grad, strict=True)
        )


@jit_fuser
def _forward(
    x: Tensor, bias: Any, residual: Tensor, counters: Tensor, first: Tensor, second: Tensor, threshold: Tensor, scale: float
) -> Tensor:
    if bias is not None:
        x = x + bias
    keep = keep_mask_expression(counters, first, second, threshold)
    return residual + torch.where(keep, x * scale, 0.0)


@jit_fuser
def _backward(grad: Tensor, counters: Tensor, first: Tensor, second: Tensor, threshold: Tensor, scale: float) -> Tensor:
    return torch.where(keep_mask_expression(counters, first, second, threshold), grad * scale, 0.0)


@jit_fuser
def _backward_with_bias(
    grad: Tensor, counters: Tensor, first: Tensor, second: Tensor, threshold: Tensor, scale: float, block: int
) -> tuple[Tensor, Tensor]:
    dx = torch.where(keep_mask_expression(counters, first, second, threshold), grad * scale, 0.0)
    return dx, block_sums(dx.float() if dx.dtype in (torch.bfloat16, torch.float16) else dx, block)


@jit_fuser
def _forward_no_dropout(x: Tensor, bias: Any, residual: Tensor) -> Tensor:
    return residual + (x if bias is None else x + bias)


def _cast(x: Tensor, bias: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor | None]:
    return x.to(residual.dtype), None if bias is None else bias.to(residual.dtype)


BACKENDS = {"bias_dropout_add": {"reference": reference, "compile": compiled}}


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
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    storage = x.untyped_storage().data_ptr()
    shared = any(t.untyped_storage().data_ptr() == storage for t in tensors[1:])
    same = x.dtype == residual.dtype and x.shape == residual.shape and x.is_contiguous()
    return same and not (training or needs_grad or shared)


def _add_into(x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    if bias is not None:
        x.add_(bias)
    return x.add_(residual)
