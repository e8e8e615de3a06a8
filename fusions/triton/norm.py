"""LayerNorm and RMSNorm, alone or of the sum residual + dropout(x + bias): kernels of fused_layer_norm and fused_residual_norm.

One program per row forward; backward a few programs walk over the rows, so that the gradients of weight and biases are sums
of one row per program, without atomics. A row that fits a program's registers (ONE_BLOCK) is read once, a longer one in
pieces, twice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusions.kernels import Kernels
from fusions.random import drop_threshold_value, keep_scale
from fusions.triton.launch import WARPS, autotune, block, on_device_of, packed, programs, rows_of
from fusions.triton.random import keep


@triton.jit
def _drop(v, columns, row, first_ptr, second_ptr, threshold, keep_scale):
    first, second = tl.load(first_ptr + row), tl.load(second_ptr + row)
    return tl.where(keep(columns, first, second, threshold), v * keep_scale, 0.0)


@triton.jit
def _sum_of(
    row, columns, mask, x_ptr, bias_ptr, residual_ptr, first_ptr, second_ptr, out_ptr, width, threshold, keep_scale,
    ADD: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """What is normalised: x, or residual + dropout(x + bias), which is stored and rounded as stored."""
    v = tl.load(x_ptr + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        if BIAS:
            v += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        if DROP:
            v = _drop(v, columns, row, first_ptr, second_ptr, threshold, keep_scale)
        v += tl.load(residual_ptr + row * width + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = v.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * width + columns, rounded, mask=mask)
        v = tl.where(mask, rounded.to(tl.float32), 0.0)
    return v


@triton.jit
def _affine(v, columns, mask, weight_ptr, nbias_ptr, WEIGHT: tl.constexpr, NBIAS: tl.constexpr):
    if WEIGHT:
        v = v * tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if NBIAS:
        v = v + tl.load(nbias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    return v


@autotune(WARPS, key=["width", "ADD"])
@triton.jit
def _forward_kernel(
    x_ptr, bias_ptr, residual_ptr, first_ptr, second_ptr, weight_ptr, nbias_ptr, out_ptr, y_ptr, mean_ptr, rstd_ptr,
    width, eps, threshold, keep_scale,
    RMS: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr, WEIGHT: tl.constexpr,
    NBIAS: tl.constexpr, BLOCK: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mean = 0.0
    if ONE_BLOCK:
        mask = columns < width
        v = _sum_of(row, columns, mask, x_ptr, bias_ptr, residual_ptr, first_ptr, second_ptr, out_ptr, width, threshold,
                    keep_scale, ADD, BIAS, DROP)  # fmt: skip
        if not RMS:
            mean = tl.sum(v, 0) / width
            v = tl.where(mask, v - mean, 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(v * v, 0) / width + eps)
        y = _affine(v * rstd, columns, mask, weight_ptr, nbias_ptr, WEIGHT, NBIAS)
        tl.store(y_ptr + row * width + columns, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, width, BLOCK):
            mask = start + columns < width
            total += _sum_of(row, start + columns, mask, x_ptr, bias_ptr, residual_ptr, first_ptr, second_ptr, out_ptr,
                             width, threshold, keep_scale, ADD, BIAS, DROP)  # fmt: skip
        source_ptr = out_ptr if ADD else x_ptr
        tl.debug_barrier()  # what was stored above is read again below
        if not RMS:
            mean = tl.sum(total, 0) / width
        squares = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, width, BLOCK):
            mask = start + columns < width
            v = tl.load(source_ptr + row * width + start + columns, mask=mask, other=0.0).to(tl.float32)
            v = tl.where(mask, v - mean, 0.0)
            squares += v * v
        rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + eps)
        for start in range(0, width, BLOCK):
            mask = start + columns < width
            v = tl.load(source_ptr + row * width + start + columns, mask=mask, other=0.0).to(tl.float32)
            y = _affine((v - mean) * rstd, start + columns, mask, weight_ptr, nbias_ptr, WEIGHT, NBIAS)
            tl.store(y_ptr + row * width + start + columns, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd)
    if not RMS:
        tl.store(mean_ptr + row, mean)


@triton.jit
def _normalised(
    row, columns, mask, saved_ptr, weight_ptr, nbias_ptr, mean, rstd, width,
    WEIGHT: tl.constexpr, NBIAS: tl.constexpr, FROM_OUTPUT: tl.constexpr,
):  # fmt: skip
    """(x - mean) * rstd, from x or, undoing the affine part, from the output."""
    v = tl.load(saved_ptr + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    if FROM_OUTPUT:
        if NBIAS:
            v = v - tl.load(nbias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        if WEIGHT:
            v = v / tl.load(weight_ptr + columns, mask=mask, other=1.0).to(tl.float32)
    else:
        v = (v - mean) * rstd
    return tl.where(mask, v, 0.0)


@triton.jit
def _backward_kernel(
    grad_ptr, dout_ptr, saved_ptr, weight_ptr, nbias_ptr, mean_ptr, rstd_ptr, first_ptr, second_ptr,
    dsum_ptr, dx_ptr, dweight_ptr, dnbias_ptr, dbias_ptr, num_rows, width, threshold, keep_scale,
    RMS: tl.constexpr, ADD: tl.constexpr, DOUT: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr, WEIGHT: tl.constexpr,
    NBIAS: tl.constexpr, FROM_OUTPUT: tl.constexpr, BLOCK: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    for piece in range(0, width, BLOCK):  # this program's row of each table of sums
        at = piece + columns
        zero = tl.zeros([BLOCK], dtype=tl.float32)
        tl.store(dweight_ptr + pid * width + at, zero, mask=at < width)
        tl.store(dnbias_ptr + pid * width + at, zero, mask=at < width)
        if BIAS:
            tl.store(dbias_ptr + pid * width + at, zero, mask=at < width)
    sum_weight = tl.zeros([BLOCK], dtype=tl.float32)
    sum_nbias = tl.zeros([BLOCK], dtype=tl.float32)
    sum_bias = tl.zeros([BLOCK], dtype=tl.float32)
    for number in range(pid, num_rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        rstd = tl.load(rstd_ptr + row)
        mean = 0.0
        if not RMS:
            mean = tl.load(mean_ptr + row)
        through_mean = tl.zeros([BLOCK], dtype=tl.float32)
        through_scale = tl.zeros([BLOCK], dtype=tl.float32)
        for piece in range(0, width, BLOCK):
            at = piece + columns
            mask = at < width
            n = _normalised(row, at, mask, saved_ptr, weight_ptr, nbias_ptr, mean, rstd, width, WEIGHT, NBIAS, FROM_OUTPUT)
            g = tl.load(grad_ptr + row * width + at, mask=mask, other=0.0).to(tl.float32)
            g = _affine(g, at, mask, weight_ptr, nbias_ptr, WEIGHT, False)
            through_mean += g
            through_scale += g * n
        c_mean = 0.0
        if not RMS:
            c_mean = tl.sum(through_mean, 0) / width
        c_scale = tl.sum(through_scale, 0) / width
        for piece in range(0, width, BLOCK):  # a row of one block is still in registers or the first-level cache
            at = piece + columns
            mask = at < width
            n = _normalised(row, at, mask, saved_ptr, weight_ptr, nbias_ptr, mean, rstd, width, WEIGHT, NBIAS, FROM_OUTPUT)
            grad = tl.load(grad_ptr + row * width + at, mask=mask, other=0.0).to(tl.float32)
            g = _affine(grad, at, mask, weight_ptr, nbias_ptr, WEIGHT, False)
            dv = (g - c_mean - n * c_scale) * rstd
            if DOUT:
                dv += tl.load(dout_ptr + row * width + at, mask=mask, other=0.0).to(tl.float32)
            dv = tl.where(mask, dv, 0.0)
            tl.store(dsum_ptr + row * width + at, dv.to(dsum_ptr.dtype.element_ty), mask=mask)
            dx = dv
            if DROP:
                dx = _drop(dv, at, row, first_ptr, second_ptr, threshold, keep_scale)
                tl.store(dx_ptr + row * width + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if ONE_BLOCK:
                sum_weight += grad * n
                sum_nbias += grad
                sum_bias += dx
            else:
                own = pid * width + at
                tl.store(dweight_ptr + own, tl.load(dweight_ptr + own, mask=mask, other=0.0) + grad * n, mask=mask)
                tl.store(dnbias_ptr + own, tl.load(dnbias_ptr + own, mask=mask, other=0.0) + grad, mask=mask)
                if BIAS:
                    tl.store(dbias_ptr + own, tl.load(dbias_ptr + own, mask=mask, other=0.0) + dx, mask=mask)
    if ONE_BLOCK:
        own, mask = pid * width + columns, columns < width
        tl.store(dweight_ptr + own, sum_weight, mask=mask)
        tl.store(dnbias_ptr + own, sum_nbias, mask=mask)
        if BIAS:
            tl.store(dbias_ptr + own, sum_bias, mask=mask)


def _launch_forward(
    x: Tensor, add: tuple[Any, Tensor, Any, Any, float] | None, weight: Any, nbias: Any, eps: float, rms: bool
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor]:
    bias, residual, first, second, prob = add or (None, None, None, None, 0.0)
    flat, width = rows_of(x), x.shape[-1]
    like = x if residual is None else residual
    out = None if residual is None else torch.empty_like(residual, memory_format=torch.contiguous_format)
    y = torch.empty_like(like, memory_format=torch.contiguous_format)
    mean, rstd = (torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device) for _ in range(2))
    with on_device_of(x):
        _forward_kernel[(flat.shape[0],)](
            flat, packed(bias), None if residual is None else rows_of(residual), first, second, packed(weight),
            packed(nbias), out, y, mean, rstd,
            width, eps, drop_threshold_value(prob), keep_scale(prob), RMS=rms, ADD=residual is not None,
            BIAS=bias is not None, DROP=first is not None, WEIGHT=weight is not None, NBIAS=nbias is not None,
            BLOCK=block(width), ONE_BLOCK=block(width) >= width,
        )  # fmt: skip
    return out, y, None if rms else mean, rstd


def _launch_backward(
    grad: Tensor, saved: Tensor, weight: Any, nbias: Any, mean: Any, rstd: Tensor, from_output: bool,
    add: tuple[Any, bool, Any, Any, float] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(gradient of the sum, of x, block sums of weight, of the norm's bias, of the bias)."""
    dout, has_bias, first, second, prob = add or (None, False, None, None, 0.0)
    flat, width = rows_of(saved), saved.shape[-1]
    count = programs(saved, flat.shape[0])
    dsum = torch.empty_like(saved, memory_format=torch.contiguous_format)
    dx = dsum if first is None else torch.empty_like(dsum)
    tables = [torch.empty(count, width, dtype=torch.float32, device=saved.device) for _ in range(3 if has_bias else 2)]
    with on_device_of(saved):
        _backward_kernel[(count,)](
            rows_of(grad), None if dout is None else rows_of(dout), flat, packed(weight), packed(nbias), mean, rstd,
            first, second,
            dsum, dx, tables[0], tables[1], tables[2] if has_bias else None, flat.shape[0], width,
            drop_threshold_value(prob), keep_scale(prob), RMS=mean is None, ADD=add is not None, DOUT=dout is not None,
            BIAS=has_bias, DROP=first is not None, WEIGHT=weight is not None, NBIAS=nbias is not None,
            FROM_OUTPUT=from_output, BLOCK=block(width), ONE_BLOCK=block(width) >= width,
            num_warps=min(16, max(4, block(width) // 1024)),
        )  # fmt: skip
    return dsum, dx, tables[0], tables[1], tables[2] if has_bias else None


def _norm_forward(x: Tensor, weight: Any, bias: Any, eps: float, rms: bool) -> tuple[Tensor, Any, Tensor]:
    _, y, mean, rstd = _launch_forward(x, None, weight, bias, eps, rms)
    return y, mean, rstd


def _norm_backward(
    grad: Tensor, saved: Tensor, weight: Any, bias: Any, mean: Any, rstd: Tensor, from_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx, _, dweight, dbias, _ = _launch_backward(grad, saved, weight, bias, mean, rstd, from_output)
    return dx, dweight, dbias


KERNELS = Kernels(_norm_forward, _norm_backward)
RESIDUAL_NORM = Kernels(_launch_forward, _launch_backward)
