"""Statistics and gradient of vocabulary-parallel cross entropy: the kernels of fused_cross_entropy.

Forward: one program per row reads its logits once, in pieces, with a running maximum and sum. Backward: a program per piece.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusions.kernels import Kernels
from fusions.triton.launch import autotune, on_device_of, rows_of

_FORWARD = [{"BLOCK": b, "num_warps": w} for b, w in ((4096, 8), (2048, 4), (8192, 16), (16384, 32))]
_BACKWARD = [{"BLOCK": b, "num_warps": w} for b, w in ((2048, 4), (1024, 4), (4096, 8))]


@triton.jit
def _tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@autotune(_FORWARD, key=["columns"])
@triton.jit
def _forward_kernel(
    x_ptr, peak_ptr, sum_ptr, total_ptr, width, columns, soft_cap,
    TOTAL: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    peaks = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    totals = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * width + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        if CAP:
            x = tl.where(at < columns, soft_cap * _tanh(x / soft_cap), float("-inf"))
        higher = tl.maximum(peaks, x)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp(peaks - safe) + tl.exp(x - safe)
        peaks = higher
        if TOTAL:
            totals += tl.where(at < columns, x, 0.0)
    peak = tl.max(peaks, 0)
    peak = tl.where(peak == float("-inf"), -3.4028234663852886e38, peak)  # all -inf: the sum is 0, not nan
    tl.store(peak_ptr + row, peak)
    tl.store(sum_ptr + row, tl.sum(sums * tl.exp(peaks - peak), 0))
    if TOTAL:
        tl.store(total_ptr + row, tl.sum(totals, 0))


@autotune(_BACKWARD, key=["columns"])
@triton.jit
def _backward_kernel(
    x_ptr, local_ptr, peak_ptr, factor_ptr, grad_ptr, dx_ptr, width, columns, smoothing, per_column, soft_cap,
    SMOOTH: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * width + at, mask=at < columns, other=float("-inf")).to(tl.float32)
    if CAP:
        bend = _tanh(x / soft_cap)
        x = tl.where(at < columns, soft_cap * bend, float("-inf"))
    grad = tl.load(grad_ptr + row)
    d = tl.exp(x - tl.load(peak_ptr + row)) * tl.load(factor_ptr + row)
    if SMOOTH:
        d -= per_column * grad
    d -= tl.where(at == tl.load(local_ptr + row), (1.0 - smoothing) * grad, 0.0)
    if CAP:
        d = d * (1.0 - bend * bend)
    d = tl.where(at < columns, d, 0.0)  # padding
    tl.store(dx_ptr + row * width + at, d.to(dx_ptr.dtype.element_ty), mask=at < width)


def _forward(logits: Tensor, rule: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    flat, width = rows_of(logits), logits.shape[-1]
    peak, sums, total = (torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device) for _ in range(3))
    smooth = rule.label_smoothing > 0
    with on_device_of(logits):
        _forward_kernel[(flat.shape[0],)](
            flat, peak, sums, total, width, rule.columns, rule.soft_cap or 1.0, TOTAL=smooth, CAP=rule.soft_cap is not None
        )
    return peak, sums, total if smooth else None


def _backward(logits: Tensor, local: Tensor, peak: Tensor, factor: Tensor, grad: Tensor, rule: Any) -> Tensor:
    flat, width = rows_of(logits), logits.shape[-1]
    dx = torch.empty_like(logits, memory_format=torch.contiguous_format)
    with on_device_of(logits):
        _backward_kernel[lambda meta: (flat.shape[0], triton.cdiv(width, meta["BLOCK"]))](
            flat, local.contiguous(), peak.contiguous(), factor.contiguous(), grad.contiguous().float(), dx, width,
            rule.columns, rule.label_smoothing, rule.smoothing_per_column, rule.soft_cap or 1.0,
            SMOOTH=rule.label_smoothing > 0, CAP=rule.soft_cap is not None,
        )  # fmt: skip
    return dx


KERNELS = Kernels(_forward, _backward)
