"""Activations, plain and gated: the kernels of fused_bias_gelu, _geglu, _swiglu and _squared_relu. Mathematics: activation.py.

A program owns a block of columns and walks over tiles of rows. Gradients of the bias are summed over its tiles in registers
and leave as one row per program; gradients of the weights as one column per block: two small sums finish them, without atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusions.activation import Rule
from fusions.kernels import Kernels
from fusions.triton.launch import autotune, on_device_of, packed, programs, rows_of

_ACTS = {"gelu": 0, "gelu_tanh": 1, "quick_gelu": 2, "silu": 3, "relu": 4, "squared_relu": 5}
_CONFIGS = [{"COLUMNS": c, "ROWS": r, "num_warps": w} for c, r, w in ((256, 4, 4), (512, 4, 8), (1024, 1, 4), (1024, 4, 8))]


@triton.jit
def _sigmoid(v):
    inverse = tl.exp(-tl.maximum(v, -80.0))
    gate = 1.0 / (1.0 + inverse)
    return gate, gate * gate * inverse


@triton.jit
def _clip(u, clamp):
    """Into [-clamp, clamp]; nan stays nan, as torch.clamp has it."""
    low = tl.maximum(u, -clamp, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(low, clamp, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _gate_and_slope(u, ACT: tl.constexpr):
    if ACT == 0:
        density = tl.exp(-0.5 * u * u) * 0.3989422804014327
        slope = density
        t = 1.0 / (1.0 + 0.23164189 * tl.abs(u))
        series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
        tail = series * density * 1.2533141373155001
        gate = tl.where(u > 0, 1.0 - tail, tail)
    elif ACT == 1:
        gate, slope = _sigmoid(u * (1.5957691216057308 + 0.07135481282553487 * u * u))
        slope = slope * (1.5957691216057308 + 0.2140644384766046 * u * u)
    elif ACT == 2:
        gate, slope = _sigmoid(1.702 * u)
        slope = slope * 1.702
    elif ACT == 3:
        gate, slope = _sigmoid(u)
    elif ACT == 4:
        gate = tl.where(u > 0, 1.0, 0.0)
        slope = gate * 0.0
    else:
        slope = tl.where(u > 0, 1.0, 0.0)
        gate = u * slope
    return gate, slope


@triton.jit
def _load(x_ptr, bias_ptr, rows, columns, mask, width, BIAS: tl.constexpr):
    u = tl.load(x_ptr + rows[:, None] * width + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        u += tl.load(bias_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    return u


@autotune(_CONFIGS, key=["half", "ACT"])
@triton.jit
def _forward_kernel(
    x_ptr, bias_ptr, weights_ptr, y_ptr, num_rows, width, half, clamp, offset,
    ACT: tl.constexpr, GATED: tl.constexpr, CLAMP: tl.constexpr, BIAS: tl.constexpr, WEIGHTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < num_rows)[:, None] & (columns < half)[None, :]
    first = _load(x_ptr, bias_ptr, rows, columns, mask, width, BIAS)
    if CLAMP:
        first = tl.minimum(first, clamp, propagate_nan=tl.PropagateNan.ALL)
    gate, _ = _gate_and_slope(first, ACT)
    y = first * gate
    if GATED:
        second = _load(x_ptr, bias_ptr, rows, columns + half, mask, width, BIAS)
        if CLAMP:
            second = _clip(second, clamp)
        y = y * (second + offset)
    if WEIGHTS:
        y = y * tl.load(weights_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)[:, None]
    tl.store(y_ptr + rows[:, None] * half + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    grad_ptr, x_ptr, bias_ptr, weights_ptr, dx_ptr, dbias_ptr, dweights_ptr, num_rows, width, half, clamp, offset,
    ACT: tl.constexpr, GATED: tl.constexpr, CLAMP: tl.constexpr, BIAS: tl.constexpr, WEIGHTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    pid, block = tl.program_id(0), tl.program_id(1)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    sum_first = tl.zeros([COLUMNS], dtype=tl.float32)
    sum_second = tl.zeros([COLUMNS], dtype=tl.float32)
    for tile in range(pid, tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (rows < num_rows)[:, None] & (columns < half)[None, :]
        g = tl.load(grad_ptr + rows[:, None] * half + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        raw = _load(x_ptr, bias_ptr, rows, columns, mask, width, BIAS)
        first = raw
        if CLAMP:
            first = tl.minimum(raw, clamp, propagate_nan=tl.PropagateNan.ALL)
        gate, slope = _gate_and_slope(first, ACT)
        activated = first * gate
        linear = tl.full([ROWS, COLUMNS], 1.0, dtype=tl.float32)
        if GATED:
            raw_second = _load(x_ptr, bias_ptr, rows, columns + half, mask, width, BIAS)
            linear = raw_second
            if CLAMP:
                linear = _clip(raw_second, clamp)
            linear = linear + offset
        if WEIGHTS:
            product = tl.where(mask, g * (activated * linear).to(dx_ptr.dtype.element_ty).to(tl.float32), 0.0)
            tl.store(dweights_ptr + rows * tl.num_programs(1) + block, tl.sum(product, 1), mask=rows < num_rows)
            g = g * tl.load(weights_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)[:, None]
        dfirst = g * linear * (gate + first * slope)
        if CLAMP:
            dfirst = tl.where(raw <= clamp, dfirst, 0.0)
        out = dx_ptr + rows[:, None] * width + columns[None, :]
        tl.store(out, dfirst.to(dx_ptr.dtype.element_ty), mask=mask)
        if BIAS:
            sum_first += tl.sum(tl.where(mask, dfirst, 0.0), 0)
        if GATED:
            dsecond = g * activated
            if CLAMP:
                dsecond = tl.where(tl.abs(raw_second) <= clamp, dsecond, 0.0)
            tl.store(out + half, dsecond.to(dx_ptr.dtype.element_ty), mask=mask)
            if BIAS:
                sum_second += tl.sum(tl.where(mask, dsecond, 0.0), 0)
    if BIAS:
        tl.store(dbias_ptr + pid * width + columns, sum_first, mask=columns < half)
        if GATED:
            tl.store(dbias_ptr + pid * width + half + columns, sum_second, mask=columns < half)


def _options(bias: Any, weights: Any, rule: Rule) -> dict[str, Any]:
    return {
        "ACT": _ACTS[rule.act], "GATED": rule.gated, "CLAMP": rule.clamp is not None,
        "BIAS": bias is not None, "WEIGHTS": weights is not None,
    }  # fmt: skip


def _forward(x: Tensor, bias: Any, weights: Any, rule: Rule) -> Tensor:
    flat, width = rows_of(x), x.shape[-1]
    half = width // 2 if rule.gated else width
    y = x.new_empty(*x.shape[:-1], half)
    weights = None if weights is None else weights.expand(*x.shape[:-1], 1).contiguous()
    with on_device_of(x):
        _forward_kernel[lambda meta: (triton.cdiv(flat.shape[0], meta["ROWS"]), triton.cdiv(half, meta["COLUMNS"]))](
            flat,
            packed(bias),
            weights,
            y,
            flat.shape[0],
            width,
            half,
            rule.clamp or 0.0,
            rule.offset,
            **_options(bias, weights, rule),
        )
    return y


def _backward(grad: Tensor, x: Tensor, bias: Any, weights: Any, rule: Rule) -> tuple[Tensor, Tensor | None, Tensor | None]:
    flat, width = rows_of(x), x.shape[-1]
    half = width // 2 if rule.gated else width
    rows, columns = 4, 256  # fixed, since the partial sums are allocated by them
    blocks, count = triton.cdiv(half, columns), programs(x, triton.cdiv(flat.shape[0], rows))
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dbias = None if bias is None else torch.empty(count, width, dtype=torch.float32, device=x.device)
    factors = None if weights is None else weights.expand(*x.shape[:-1], 1).contiguous()
    dweights = None if weights is None else torch.empty(flat.shape[0], blocks, dtype=torch.float32, device=x.device)
    with on_device_of(x):
        _backward_kernel[(count, blocks)](
            rows_of(grad), flat, packed(bias), factors, dx, dbias, dweights, flat.shape[0], width, half, rule.clamp or 0.0,
            rule.offset, **_options(bias, weights, rule), ROWS=rows, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
    bias_grad = None if dbias is None else dbias.sum(0).to(bias.dtype)
    if dweights is None:
        return dx, bias_grad, None
    return dx, bias_grad, dweights.sum(-1).view(*x.shape[:-1], 1).sum_to_size(weights.shape).to(weights.dtype)


KERNELS = Kernels(_forward, _backward)
