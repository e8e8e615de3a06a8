"""Rotary embedding of x, and of packed QKV with its bias: the kernels of fused_rope. A program takes a block of heads.

Packed, a head is one of the n/g + 2 of its group: queries and the key are rotated, the value is copied, each to its tensor.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusions.kernels import Kernels
from fusions.triton.launch import autotune, on_device_of

_CONFIGS = [{"HEADS": h, "num_warps": w} for h, w in ((8, 4), (4, 4), (16, 8), (32, 8))]


@triton.jit
def _pair(columns, HALF_WIDTH, INTERLEAVED: tl.constexpr):
    """The dimensions of each pair's two elements."""
    if INTERLEAVED:
        return 2 * columns, 2 * columns + 1
    return columns, columns + HALF_WIDTH


@triton.jit
def _turn(first, second, cos_1, cos_2, sin_1, sin_2, BACK: tl.constexpr):
    if BACK:
        return first * cos_1 + second * sin_2, second * cos_2 - first * sin_1
    return first * cos_1 - second * sin_1, second * cos_2 + first * sin_2


@triton.jit
def _angles(table_ptr, token, batch, table_batch, half, at_1, at_2, mask):
    row = (token // batch) * table_batch + (token % batch) % table_batch
    base = table_ptr + (row * 2 * half)[:, None]
    return tl.load(base + at_1[None, :], mask=mask, other=0.0), tl.load(base + at_2[None, :], mask=mask, other=0.0)


@autotune(_CONFIGS, key=["d"])
@triton.jit
def _kernel(
    x_ptr, bias_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, num_heads, per_token, per_group, batch, table_batch, half, d,
    PACKED: tl.constexpr, BIAS: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr, PAIRS: tl.constexpr,
    REST: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """x [tokens, per_token, d] to q of that shape; PACKED: to q, k, v (or, BACK, from q, k, v to x)."""
    heads = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    inside = heads < num_heads
    token, within = heads // per_token, heads % per_token
    is_query, is_key, is_value = inside, heads < 0, heads < 0
    q_base, k_base = heads * d, heads * d
    if PACKED:
        group, place = within // per_group, within % per_group
        groups = per_token // per_group
        is_query, is_key = inside & (place < per_group - 2), inside & (place == per_group - 2)
        is_value = inside & (place == per_group - 1)
        q_base = ((token * groups + group) * (per_group - 2) + place) * d
        k_base = (token * groups + group) * d
    columns = tl.arange(0, PAIRS)
    at_1, at_2 = _pair(columns, half, INTERLEAVED)
    pairs = (columns < half)[None, :]
    mask = inside[:, None] & pairs
    cos_1, cos_2 = _angles(cos_ptr, token, batch, table_batch, half, at_1, at_2, mask)
    sin_1, sin_2 = _angles(sin_ptr, token, batch, table_batch, half, at_1, at_2, mask)
    x_at = x_ptr + (heads * d)[:, None]
    q_at, k_at, v_at = q_ptr + q_base[:, None], k_ptr + k_base[:, None], v_ptr + k_base[:, None]
    mask_q, mask_k, mask_v = is_query[:, None] & pairs, is_key[:, None] & pairs, is_value[:, None] & pairs
    if BACK and PACKED:
        first = tl.load(q_at + at_1[None, :], mask=mask_q, other=0.0).to(tl.float32)
        second = tl.load(q_at + at_2[None, :], mask=mask_q, other=0.0).to(tl.float32)
        first += tl.load(k_at + at_1[None, :], mask=mask_k, other=0.0).to(tl.float32)
        second += tl.load(k_at + at_2[None, :], mask=mask_k, other=0.0).to(tl.float32)
        first += tl.load(v_at + at_1[None, :], mask=mask_v, other=0.0).to(tl.float32)
        second += tl.load(v_at + at_2[None, :], mask=mask_v, other=0.0).to(tl.float32)
    else:
        first = tl.load(x_at + at_1[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x_at + at_2[None, :], mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        first += tl.load(bias_ptr + (within * d)[:, None] + at_1[None, :], mask=mask, other=0.0).to(tl.float32)
        second += tl.load(bias_ptr + (within * d)[:, None] + at_2[None, :], mask=mask, other=0.0).to(tl.float32)
    out_1, out_2 = _turn(first, second, cos_1, cos_2, sin_1, sin_2, BACK)
    if PACKED:
        out_1, out_2 = tl.where(is_value[:, None], first, out_1), tl.where(is_value[:, None], second, out_2)
    dtype = q_ptr.dtype.element_ty
    if BACK and PACKED:
        tl.store(x_at + at_1[None, :], out_1.to(dtype), mask=mask)
        tl.store(x_at + at_2[None, :], out_2.to(dtype), mask=mask)
    else:
        tl.store(q_at + at_1[None, :], out_1.to(dtype), mask=mask_q)
        tl.store(q_at + at_2[None, :], out_2.to(dtype), mask=mask_q)
        if PACKED:
            tl.store(k_at + at_1[None, :], out_1.to(dtype), mask=mask_k)
            tl.store(k_at + at_2[None, :], out_2.to(dtype), mask=mask_k)
            tl.store(v_at + at_1[None, :], out_1.to(dtype), mask=mask_v)
            tl.store(v_at + at_2[None, :], out_2.to(dtype), mask=mask_v)
    if REST > 0:  # the dimensions beyond d_rot pass
        rest = 2 * half + tl.arange(0, REST)
        mask_q = is_query[:, None] & (rest < d)[None, :]
        mask_k, mask_v = is_key[:, None] & (rest < d)[None, :], is_value[:, None] & (rest < d)[None, :]
        mask = inside[:, None] & (rest < d)[None, :]
        if BACK and PACKED:
            value = tl.load(q_at + rest[None, :], mask=mask_q, other=0.0)
            value += tl.load(k_at + rest[None, :], mask=mask_k, other=0.0)
            value += tl.load(v_at + rest[None, :], mask=mask_v, other=0.0)
            tl.store(x_at + rest[None, :], value, mask=mask)
        else:
            value = tl.load(x_at + rest[None, :], mask=mask, other=0.0).to(tl.float32)
            if BIAS:
                value += tl.load(bias_ptr + (within * d)[:, None] + rest[None, :], mask=mask, other=0.0).to(tl.float32)
            tl.store(q_at + rest[None, :], value.to(dtype), mask=mask_q)
            if PACKED:
                tl.store(k_at + rest[None, :], value.to(dtype), mask=mask_k)
                tl.store(v_at + rest[None, :], value.to(dtype), mask=mask_v)


def _launch(x: Tensor, bias: Any, outs: tuple[Any, Any, Any], cos: Tensor, sin: Tensor, sizes: tuple[int, int, int, int],
            packed: bool, interleaved: bool, back: bool) -> None:  # fmt: skip
    per_token, per_group, batch, d = sizes
    half = cos.shape[-1] // 2
    rest = d - 2 * half
    heads = x.numel() // d
    table_batch = cos.shape[1]
    with on_device_of(x):
        _kernel[lambda meta: (triton.cdiv(heads, meta["HEADS"]),)](
            x, bias, *outs, cos.float().contiguous(), sin.float().contiguous(), heads, per_token, per_group, batch,
            table_batch, half, d, PACKED=packed, BIAS=bias is not None, INTERLEAVED=interleaved, BACK=back,
            PAIRS=triton.next_power_of_2(max(1, half)), REST=triton.next_power_of_2(rest) if rest else 0,
        )  # fmt: skip


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, None, (out, out, out), cos, sin, (x.shape[2], 1, x.shape[1], x.shape[3]), False, interleaved, back)
    return out


def _forward(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return _rotate(x, cos, sin, interleaved, False)


def _backward(grad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return _rotate(grad, cos, sin, interleaved, True)


def _forward_qkv(mixed: Tensor, bias: Any, d: int, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    s, b, g, width = mixed.shape
    per_group = width // d
    q = mixed.new_empty(s, b, g * (per_group - 2), d)
    k, v = (mixed.new_empty(s, b, g, d) for _ in range(2))
    sizes = (g * per_group, per_group, b, d)
    _launch(
        mixed.contiguous(), None if bias is None else bias.contiguous(), (q, k, v), cos, sin, sizes, True, interleaved, False
    )
    return q, k, v


def _backward_qkv(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, bias: bool
) -> tuple[Tensor, Tensor | None]:
    s, b, g, d = dk.shape
    per_group = dq.shape[2] // g + 2
    dmixed = dk.new_empty(s, b, g, per_group * d)
    sizes = (g * per_group, per_group, b, d)
    _launch(dmixed, None, (dq.contiguous(), dk.contiguous(), dv.contiguous()), cos, sin, sizes, True, interleaved, True)
    return dmixed, dmixed.float().sum((0, 1)) if bias else None


KERNELS = Kernels(_forward, _backward)
QKV_KERNELS = Kernels(_forward_qkv, _backward_qkv)
