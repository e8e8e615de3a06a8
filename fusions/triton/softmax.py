"""dropout(softmax(scale * scores, masked)), with causal, window and boolean masks and a sink: the kernels of fused_softmax.

One program per row. A row that fits a program's registers is read once; a longer one twice forward (a running maximum and sum
first) and twice backward.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusions.kernels import Kernels
from fusions.random import drop_threshold_value, keep_scale
from fusions.triton.launch import WARPS, autotune, block, on_device_of
from fusions.triton.random import keep


@triton.jit
def _scores(
    x_ptr, mask_row_ptr, row, query, columns, sq, sk, stride_mask, scale, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """scale * x, -inf where masked or beyond the row."""
    inside = columns < sk
    x = tl.load(x_ptr + row * sk + columns, mask=inside, other=0.0).to(tl.float32) * scale
    visible = inside
    if CAUSAL:
        distance = query + (sk - sq) - columns
        visible = visible & (distance >= 0)
        if WINDOW:
            visible = visible & (distance < window)
    if MASK:
        visible = visible & (tl.load(mask_row_ptr + columns * stride_mask, mask=inside, other=1) == 0)
    return tl.where(visible, x, float("-inf"))


@triton.jit
def _mask_row(mask_ptr, row, sq, heads, stride_b, stride_n, stride_q):
    query, head_row = row % sq, row // sq
    return mask_ptr + (head_row // heads) * stride_b + (head_row % heads) * stride_n + query * stride_q


@autotune(WARPS, key=["sk"])
@triton.jit
def _forward_kernel(
    x_ptr, mask_ptr, sink_ptr, first_ptr, second_ptr, out_ptr, probs_ptr, peak_ptr, share_ptr, sq, sk, heads, sinks,
    stride_b, stride_n, stride_q, stride_k, scale, window, threshold, keep_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, SINK: tl.constexpr, DROP: tl.constexpr,
    SAVE: tl.constexpr, BLOCK: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    query = (row % sq).to(tl.int32)
    mask_row_ptr = _mask_row(mask_ptr, row, sq, heads, stride_b, stride_n, stride_q)
    columns = tl.arange(0, BLOCK)
    sink = float("-inf")
    if SINK:
        sink = tl.load(sink_ptr + ((row // sq) % heads) % sinks).to(tl.float32)
    if ONE_BLOCK:
        x = _scores(x_ptr, mask_row_ptr, row, query, columns, sq, sk, stride_k, scale, window, CAUSAL, WINDOW, MASK)
        peak = tl.maximum(tl.max(x, 0), sink)
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp(x - peak)
        total = tl.sum(weights, 0)
    else:
        peaks = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        totals = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, sk, BLOCK):
            at = start + columns
            x = _scores(x_ptr, mask_row_ptr, row, query, at, sq, sk, stride_k, scale, window, CAUSAL, WINDOW, MASK)
            higher = tl.maximum(peaks, x)
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            totals = totals * tl.exp(peaks - safe) + tl.exp(x - safe)
            peaks = higher
        peak = tl.maximum(tl.max(peaks, 0), sink)
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        total = tl.sum(totals * tl.exp(peaks - peak), 0)
    if SINK:
        total += tl.exp(sink - peak)
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    tl.store(peak_ptr + row, peak)
    tl.store(share_ptr + row, share)
    for start in range(0, sk, BLOCK):
        at = start + columns
        if not ONE_BLOCK:
            x = _scores(x_ptr, mask_row_ptr, row, query, at, sq, sk, stride_k, scale, window, CAUSAL, WINDOW, MASK)
            weights = tl.exp(x - peak)
        probs = weights * share
        if SAVE:
            tl.store(probs_ptr + row * sk + at, probs.to(probs_ptr.dtype.element_ty), mask=at < sk)
        if DROP:
            probs = probs.to(out_ptr.dtype.element_ty).to(tl.float32)
            kept = keep(at, tl.load(first_ptr + row), tl.load(second_ptr + row), threshold)
            probs = tl.where(kept, probs * keep_scale, 0.0)
        tl.store(out_ptr + row * sk + at, probs.to(out_ptr.dtype.element_ty), mask=at < sk)


@triton.jit
def _probs_and_grad(
    grad_ptr, saved_ptr, mask_row_ptr, first_ptr, second_ptr, row, query, columns, sq, sk, stride_k, scale, window, peak, share,
    threshold, keep_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    if HALF:
        x = _scores(saved_ptr, mask_row_ptr, row, query, columns, sq, sk, stride_k, scale, window, CAUSAL, WINDOW, MASK)
        probs = tl.exp(x - peak) * share
    else:
        probs = tl.load(saved_ptr + row * sk + columns, mask=columns < sk, other=0.0).to(tl.float32)
    g = tl.load(grad_ptr + row * sk + columns, mask=columns < sk, other=0.0).to(tl.float32)
    if DROP:
        kept = keep(columns, tl.load(first_ptr + row), tl.load(second_ptr + row), threshold)
        g = tl.where(kept, g * keep_scale, 0.0)
    return probs, g


@autotune(WARPS, key=["sk"])
@triton.jit
def _backward_kernel(
    grad_ptr, saved_ptr, mask_ptr, sink_ptr, first_ptr, second_ptr, peak_ptr, share_ptr, dx_ptr, dsink_ptr, sq, sk, heads,
    sinks, stride_b, stride_n, stride_q, stride_k, scale, window, threshold, keep_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, SINK: tl.constexpr, DROP: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    query = (row % sq).to(tl.int32)
    mask_row_ptr = _mask_row(mask_ptr, row, sq, heads, stride_b, stride_n, stride_q)
    peak, share = tl.load(peak_ptr + row), tl.load(share_ptr + row)
    columns = tl.arange(0, BLOCK)
    if ONE_BLOCK:  # names that are first bound inside a loop do not exist after it, so the two forms are apart
        probs, g = _probs_and_grad(
            grad_ptr, saved_ptr, mask_row_ptr, first_ptr, second_ptr, row, query, columns, sq, sk, stride_k, scale,
            window, peak, share, threshold, keep_scale, CAUSAL, WINDOW, MASK, DROP, HALF,
        )  # fmt: skip
        through = tl.sum(probs * g, 0)
        dx = scale * probs * (g - through)
        tl.store(dx_ptr + row * sk + columns, dx.to(dx_ptr.dtype.element_ty), mask=columns < sk)
    else:
        products = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, sk, BLOCK):
            probs, g = _probs_and_grad(
                grad_ptr, saved_ptr, mask_row_ptr, first_ptr, second_ptr, row, query, start + columns, sq, sk, stride_k, scale,
                window, peak, share, threshold, keep_scale, CAUSAL, WINDOW, MASK, DROP, HALF,
            )  # fmt: skip
            products += probs * g
        through = tl.sum(products, 0)
        for start in range(0, sk, BLOCK):
            at = start + columns
            probs, g = _probs_and_grad(
                grad_ptr, saved_ptr, mask_row_ptr, first_ptr, second_ptr, row, query, at, sq, sk, stride_k, scale,
                window, peak, share, threshold, keep_scale, CAUSAL, WINDOW, MASK, DROP, HALF,
            )  # fmt: skip
            dx = scale * probs * (g - through)
            tl.store(dx_ptr + row * sk + at, dx.to(dx_ptr.dtype.element_ty), mask=at < sk)
    if SINK:
        sink = tl.load(sink_ptr + ((row // sq) % heads) % sinks).to(tl.float32)
        tl.store(dsink_ptr + row, -tl.exp(sink - peak) * share * through)


def _common(shape: torch.Size, mask: Any, sink: Any, drop: Any, rule: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    _, heads, sq, sk = shape
    scale, causal, window = rule
    strides = (0, 0, 0, 0) if mask is None else mask.expand(shape).stride()
    prob = 0.0 if drop is None else drop[2]
    sizes = (sq, sk, heads, 1 if sink is None else sink.numel(), *strides, scale, window or 0, drop_threshold_value(prob))
    flags = {"CAUSAL": causal, "WINDOW": window is not None, "MASK": mask is not None, "SINK": sink is not None,
             "DROP": drop is not None, "BLOCK": block(sk), "ONE_BLOCK": block(sk) >= sk}  # fmt: skip
    return (*sizes, keep_scale(prob)), flags


def _forward(scores: Tensor, mask: Any, sink: Any, drop: Any, rule: Any) -> tuple[Any, ...]:
    shape = scores.shape
    half = scores.dtype != torch.float32
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    probs = out if half or drop is None else torch.empty_like(out)
    peak, share = (torch.empty(*shape[:-1], 1, dtype=torch.float32, device=scores.device) for _ in range(2))
    mask = None if mask is None else mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    sizes, flags = _common(shape, mask, sink, drop, rule)
    first, second = (None, None) if drop is None else drop[:2]
    with on_device_of(scores):
        _forward_kernel[(shape[0] * shape[1] * shape[2],)](
            scores.contiguous(), scores if mask is None else mask, sink, first, second, out, probs, peak, share, *sizes, **flags,
            SAVE=not half and drop is not None,
        )  # fmt: skip
    return out, None if half else probs, peak, share


def _backward(
    grad: Tensor, saved: Tensor, mask: Any, sink: Any, peak: Tensor, share: Tensor, drop: Any, rule: Any, half: bool
) -> tuple[Tensor, Tensor | None]:
    shape = saved.shape
    dx = torch.empty(shape, dtype=grad.dtype, device=grad.device)
    dsink = None if sink is None else torch.empty_like(peak)
    mask = None if mask is None else mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    sizes, flags = _common(shape, mask, sink, drop, rule)
    first, second = (None, None) if drop is None else drop[:2]
    with on_device_of(grad):
        _backward_kernel[(shape[0] * shape[1] * shape[2],)](
            grad.contiguous(),
            saved.contiguous(),
            grad if mask is None else mask,
            sink,
            first,
            second,
            peak,
            share,
            dx,
            dsink,
            *sizes,
            **flags,
            HALF=half,
        )
    return dx, dsink


KERNELS = Kernels(_forward, _backward)
