"""residual + dropout(x + bias): the kernels of fused_bias_dropout. A program owns a block of columns and walks over rows."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusions.kernels import Kernels
from fusions.random import drop_threshold_value, keep_scale
from fusions.triton.launch import autotune, on_device_of, packed, programs, rows_of
from fusions.triton.random import keep

_CONFIGS = [{"COLUMNS": c, "ROWS": r, "num_warps": w} for c, r, w in ((512, 4, 8), (1024, 1, 4), (1024, 4, 8), (2048, 2, 8))]


@autotune(_CONFIGS, key=["width"])
@triton.jit
def _forward_kernel(
    x_ptr, bias_ptr, residual_ptr, first_ptr, second_ptr, out_ptr, num_rows, width, threshold, keep_scale,
    BIAS: tl.constexpr, DROP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = rows < num_rows
    mask = inside[:, None] & (columns < width)[None, :]
    at = rows[:, None] * width + columns[None, :]
    v = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        v += tl.load(bias_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    if DROP:
        first = tl.load(first_ptr + rows, mask=inside, other=0)[:, None]
        second = tl.load(second_ptr + rows, mask=inside, other=0)[:, None]
        v = tl.where(keep(columns[None, :], first, second, threshold), v * keep_scale, 0.0)
    v += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, v.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    grad_ptr, first_ptr, second_ptr, dx_ptr, dbias_ptr, num_rows, width, threshold, keep_scale,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for tile in range(pid, tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = rows < num_rows
        mask = inside[:, None] & (columns < width)[None, :]
        at = rows[:, None] * width + columns[None, :]
        g = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        first = tl.load(first_ptr + rows, mask=inside, other=0)[:, None]
        second = tl.load(second_ptr + rows, mask=inside, other=0)[:, None]
        g = tl.where(keep(columns[None, :], first, second, threshold), g * keep_scale, 0.0)
        tl.store(dx_ptr + at, g.to(dx_ptr.dtype.element_ty), mask=mask)
        if BIAS:
            total += tl.sum(g, 0)
    if BIAS:
        tl.store(dbias_ptr + pid * width + columns, total, mask=columns < width)


def _forward(x: Tensor, bias: Any, residual: Tensor, first: Any, second: Any, prob: float) -> Tensor:
    flat, out = rows_of(x), torch.empty_like(residual, memory_format=torch.contiguous_format)
    rows, width = flat.shape
    with on_device_of(x):
        _forward_kernel[lambda meta: (triton.cdiv(rows, meta["ROWS"]), triton.cdiv(width, meta["COLUMNS"]))](
            flat, packed(bias), rows_of(residual), first, second, out, rows, width, drop_threshold_value(prob), keep_scale(prob),
            BIAS=bias is not None, DROP=first is not None,
        )  # fmt: skip
    return out


def _backward(grad: Tensor, first: Tensor, second: Tensor, prob: float, bias: bool) -> tuple[Tensor, Tensor | None]:
    flat, dx = rows_of(grad), torch.empty_like(grad, memory_format=torch.contiguous_format)
    rows, width = flat.shape
    count = programs(grad, triton.cdiv(rows, 4))
    sums = torch.empty(count, width, dtype=torch.float32, device=grad.device) if bias else None
    with on_device_of(grad):
        _backward_kernel[(count, triton.cdiv(width, 512))](
            flat, first, second, dx, sums, rows, width, drop_threshold_value(prob), keep_scale(prob),
            BIAS=bias, ROWS=4, COLUMNS=512, num_warps=8,
        )  # fmt: skip
    return dx, None if sums is None else sums.sum(0).to(grad.dtype)


KERNELS = Kernels(_forward, _backward)
