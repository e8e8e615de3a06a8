"""Rotary embedding of multi-latent attention: the kernels of fused_mla_yarn_rope_apply. A program takes a block of heads.

Of key_value the rotation is ours; the split, the copy to every head and the sum over heads are torch's own operations.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusions.kernels import Kernels
from fusions.triton.launch import on_device_of

_HEADS = 8


@triton.jit
def _kernel(
    x_ptr, out_ptr, cos_ptr, sin_ptr, num_heads, per_token, batch, table_batch, width, out_width, start, out_start, half, sign,
    PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr, BACK: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Turns x[..., start : start + 2 half] into out[..., out_start:]; x is [tokens, per_token, width]."""
    heads = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, PAIRS)
    mask = (heads < num_heads)[:, None] & (columns < half)[None, :]
    token = heads // per_token
    row = (token // batch) * table_batch + (token % batch) % table_batch
    cos_at, sin_at = (
        cos_ptr + (row * 2 * half)[:, None] + columns[None, :],
        sin_ptr + (row * 2 * half)[:, None] + columns[None, :],
    )
    cos_l, cos_r = tl.load(cos_at, mask=mask, other=0.0), tl.load(cos_at + half, mask=mask, other=0.0)
    sin_l, sin_r = sign * tl.load(sin_at, mask=mask, other=0.0), sign * tl.load(sin_at + half, mask=mask, other=0.0)
    in_1 = 2 * columns if PAIRS_IN else columns
    in_2 = 2 * columns + 1 if PAIRS_IN else columns + half
    x_at = x_ptr + (heads * width + start)[:, None]
    first = tl.load(x_at + in_1[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_at + in_2[None, :], mask=mask, other=0.0).to(tl.float32)
    if BACK:
        o1, o2 = first * cos_l + second * sin_r, second * cos_r - first * sin_l
    else:
        o1, o2 = first * cos_l - second * sin_l, second * cos_r + first * sin_r
    out_1 = 2 * columns if PAIRS_OUT else columns
    out_2 = 2 * columns + 1 if PAIRS_OUT else columns + half
    out_at = out_ptr + (heads * out_width + out_start)[:, None]
    tl.store(out_at + out_1[None, :], o1.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_at + out_2[None, :], o2.to(out_ptr.dtype.element_ty), mask=mask)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, emb: int, rule: Any, back: bool, out: Tensor) -> None:
    """The last emb dimensions of x [s, b, n, d], turned into the last emb of `out`; one order of pairs in, the other out."""
    _, inverse, remove_interleaving = rule
    s, b, n, width = x.shape
    half, heads = emb // 2, s * b * n
    tables = (
        cos.float().expand(-1, cos.shape[1], 1, -1).contiguous(),
        sin.float().expand(-1, sin.shape[1], 1, -1).contiguous(),
    )
    with on_device_of(x):
        _kernel[(triton.cdiv(heads, _HEADS),)](
            x, out, *tables, heads, n, b, cos.shape[1], width, out.shape[-1], width - emb, out.shape[-1] - emb, half,
            -1.0 if inverse else 1.0, PAIRS_IN=remove_interleaving if back else True,
            PAIRS_OUT=True if back else remove_interleaving, BACK=back, PAIRS=triton.next_power_of_2(half), HEADS=_HEADS,
        )  # fmt: skip


def _query(t: Tensor, cos: Tensor, sin: Tensor, rule: Any, back: bool) -> Tensor:
    t = t.contiguous()
    out = t.clone()
    _turn(t, cos, sin, rule[0], rule, back, out)
    return out


def _forward(t: Tensor, cos: Tensor, sin: Tensor, rule: Any) -> Tensor:
    return _query(t, cos, sin, rule, False)


def _backward(grad: Tensor, cos: Tensor, sin: Tensor, rule: Any) -> Tensor:
    return _query(grad, cos, sin, rule, True)


def _forward_kv(kv: Tensor, k_pos_emb: Tensor, cos: Tensor, sin: Tensor, rule: Any) -> tuple[Tensor, Tensor]:
    k_dim, emb = rule[0], k_pos_emb.shape[-1]
    turned = torch.empty_like(k_pos_emb, memory_format=torch.contiguous_format)
    _turn(k_pos_emb.contiguous(), cos, sin, emb, rule, False, turned)
    return torch.cat([kv[..., :k_dim], turned.expand(*kv.shape[:-1], emb)], -1), kv[..., k_dim:].contiguous()


def _backward_kv(dkey: Tensor, dvalue: Tensor, cos: Tensor, sin: Tensor, rule: Any) -> tuple[Tensor, Tensor]:
    k_dim = rule[0]
    over_heads = dkey[..., k_dim:].float().sum(2, keepdim=True)
    dk_pos_emb = torch.empty_like(over_heads)
    _turn(over_heads.contiguous(), cos, sin, over_heads.shape[-1], rule, True, dk_pos_emb)
    return torch.cat([dkey[..., :k_dim], dvalue], -1), dk_pos_emb.to(dkey.dtype)


KERNELS = Kernels(_forward, _backward)
KEY_VALUE = Kernels(_forward_kv, _backward_kv)
