"""The residual add and the norm after it as one: sum = residual + dropout(x + bias), y = norm(sum).

Shapes: x, residual [..., h] of one shape; bias, weight, norm_bias [h] or None. Returns (sum, y), both in the residual's dtype;
y is the norm of the sum as rounded to that dtype, as it is when the two are apart. Saved for the backward, per element: the
sum (its own bytes, which the next layer holds anyway), 4 or 8 bytes of statistics and 8 of mask key per row. The backward
reads both gradients and writes both, in one pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusions import fused_bias_dropout, fused_layer_norm
from fusions.column_sum import block_sums, row_block, total
from fusions.fused_bias_dropout import drop_rule
from fusions.fused_layer_norm import gradient_expression, layer_norm_expression, rms_norm_expression
from fusions.jit import jit_fuser
from fusions.kernels import Kernels, as_row, triton_kernels, wide
from fusions.random import MaskKey, keep_mask_expression, random_mask_key

Pair = tuple[Tensor, Tensor]


def reference(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    *,
    prob: float,
    training: bool,
    eps: float,
    rms: bool,
    mask_key: MaskKey | None = None,
) -> Pair:
    """The definition: one operation after the other."""
    total = fused_bias_dropout.reference(x, bias, residual, prob, training, mask_key)
    norm = fused_layer_norm.reference_rms_norm if rms else fused_layer_norm.reference_layer_norm
    return total, norm(total, weight, norm_bias, eps)


def compiled(x: Tensor, bias: Any, residual: Tensor, weight: Any, norm_bias: Any, **options: Any) -> Pair:
    """The same in one pass forward and one backward."""
    return _fused(_COMPILED, x, bias, residual, weight, norm_bias, **options)


def triton(x: Tensor, bias: Any, residual: Tensor, weight: Any, norm_bias: Any, **options: Any) -> Pair:
    """The same with Triton kernels."""
    return _fused(triton_kernels("norm", "RESIDUAL_NORM"), x, bias, residual, weight, norm_bias, **options)


def _fused(
    kernels: Kernels,
    x: Tensor,
    bias: Any,
    residual: Tensor,
    weight: Any,
    norm_bias: Any,
    *,
    prob: float,
    training: bool,
    eps: float,
    rms: bool,
    mask_key: MaskKey | None = None,
) -> Pair:
    if x.shape != residual.shape:
        raise ValueError(f"x {list(x.shape)} and residual {list(residual.shape)} must have one shape")
    bias = None if bias is None else as_row(bias.to(residual.dtype), x.shape[-1])
    key = (mask_key or random_mask_key(x)) if training and prob > 0 else None
    first, second, prob = (None, None, 0.0) if key is None else (key.first, key.second, prob)
    return _ResidualNorm.apply(
        x.to(residual.dtype), bias, residual, weight, norm_bias, (first, second, prob), (eps, rms, kernels)
    )


class _ResidualNorm(torch.autograd.Function):
    """Kernels: forward(x, (bias, residual, first, second, prob), weight, norm_bias, eps, rms) -> (sum, y, mean, rstd);

    backward(grad of y, sum, weight, norm_bias, mean, rstd, False, (grad of sum, has bias, first, second, prob)) -> (gradient of
    the sum, of x, partial sums of dweight, dnorm_bias, dbias).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Any, residual: Tensor, weight: Any, norm_bias: Any, drop: Any, rule: Any) -> Pair:
        eps, rms, kernels = rule
        out, y, mean, rstd = kernels.forward(x, (bias, residual, *drop), weight, norm_bias, eps, rms)
        ctx.save_for_backward(out, bias, weight, norm_bias, mean, rstd)
        ctx.drop, ctx.kernels = drop, kernels
        return out, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        out, bias, weight, norm_bias, mean, rstd = ctx.saved_tensors
        add = (grad_sum, bias is not None, *ctx.drop)
        dsum, dx, dweight, dnorm_bias, dbias = ctx.kernels.backward(grad_y, out, weight, norm_bias, mean, rstd, False, add)
        return dx, total(dbias, bias), dsum, total(dweight, weight), total(dnorm_bias, norm_bias), None, None


def _forward(x: Tensor, add: Any, weight: Any, norm_bias: Any, eps: float, rms: bool) -> tuple[Any, ...]:
    bias, residual, first, second, prob = add
    drop = None if first is None else drop_rule(x, first, second, prob)
    return _forward_kernel(x, bias, residual, drop, weight, norm_bias, eps, rms)


def _backward(
    grad: Tensor, saved: Tensor, weight: Any, norm_bias: Any, mean: Any, rstd: Tensor, from_output: bool, add: Any
) -> tuple[Any, ...]:
    grad_sum, has_bias, first, second, prob = add
    drop = None if first is None else drop_rule(saved, first, second, prob)
    return _backward_kernel(grad, grad_sum, saved, weight, mean, rstd, drop, has_bias, row_block(saved))


@jit_fuser
def _forward_kernel(
    x: Tensor, bias: Any, residual: Tensor, drop: Any, weight: Any, norm_bias: Any, eps: float, rms: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    v = wide(x) if bias is None else wide(x) + bias
    if drop is not None:
        v = torch.where(keep_mask_expression(*drop[:4]), v * drop[4], 0.0)
    out = (residual + v).to(residual.dtype)
    if rms:
        y, mean, rstd = rms_norm_expression(wide(out), weight, eps)
    else:
        y, mean, rstd = layer_norm_expression(wide(out), weight, norm_bias, eps)
    return out, y.to(residual.dtype), mean, rstd


@jit_fuser
def _backward_kernel(
    grad: Tensor, grad_sum: Tensor, saved: Tensor, weight: Any, mean: Any, rstd: Tensor, drop: Any, bias: bool, block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    g, s = wide(grad), wide(saved)
    normalised = s * rstd if mean is None else (s - mean) * rstd
    dsum = gradient_expression(g, normalised, weight, rstd, mean is None) + grad_sum
    dx = dsum if drop is None else torch.where(keep_mask_expression(*drop[:4]), dsum * drop[4], 0.0)
    sums = block_sums(dx, block) if bias else None
    return dsum.to(saved.dtype), dx.to(saved.dtype), block_sums(g * normalised, block), block_sums(g, block), sums


_COMPILED = Kernels(_forward, _backward)
BACKENDS = {"residual_norm": {"reference": reference, "compile": compiled, "triton": triton}}
