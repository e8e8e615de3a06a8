"""Rotary embedding of multi-latent attention (DeepSeek-V2, arXiv:2405.04434): only the last emb_dim of each head turn.

Pairs are read interleaved, (x0, x1), (x2, x3)…, and written as halves, unless `remove_interleaving` asks for pairs again:

    o1 = x1 cos_L - x2 sin_L,   o2 = x2 cos_R + x1 sin_R        L, R: first and second half of the tables' last dimension

query      t [s, b, n, nope + emb] -> the same shape, the first nope dimensions as they are
key_value  kv [s, b, n, k + v], k_pos_emb [s, b, 1, emb] -> key [s, b, n, k + emb] (the turned k_pos_emb for every head),
           value [s, b, n, v]
cos, sin: [rows, 1, 1, emb], one row per position of the sequence. `inverse` turns back. Saved: cos and sin, nothing per element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusions.jit import jit_fuser
from fusions.kernels import Kernels, triton_kernels, wide


def reference(
    t: Tensor, cos: Tensor, sin: Tensor, emb_dim: int, *, inverse: bool = False, remove_interleaving: bool = False
) -> Tensor:
    """The definition of `query`."""
    nope, emb = t[..., : t.shape[-1] - emb_dim], wide(t[..., t.shape[-1] - emb_dim :])
    first, second = emb[..., ::2], emb[..., 1::2]
    (cos_l, cos_r), (sin_l, sin_r) = cos.chunk(2, -1), sin.chunk(2, -1)
    if inverse:
        sin_l, sin_r = -sin_l, -sin_r
    out = (first * cos_l - second * sin_l, second * cos_r + first * sin_r)
    turned = torch.stack(out, -1).flatten(-2) if remove_interleaving else torch.cat(out, -1)
    return torch.cat([nope, turned.to(t.dtype)], -1)


def reference_key_value(
    kv: Tensor,
    k_pos_emb: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_dim: int,
    *,
    inverse: bool = False,
    remove_interleaving: bool = False,
) -> tuple[Tensor, Tensor]:
    """The definition of `key_value`."""
    turned = reference(k_pos_emb, cos, sin, k_pos_emb.shape[-1], inverse=inverse, remove_interleaving=remove_interleaving)
    return torch.cat([kv[..., :k_dim], turned.expand(*kv.shape[:-1], -1)], -1), kv[..., k_dim:].contiguous()


def compiled(t: Tensor, cos: Tensor, sin: Tensor, emb_dim: int, **options: bool) -> Tensor:
    """`query` in one pass forward and one backward, out of place."""
    return _query(_COMPILED, t, cos, sin, emb_dim, **options)


def triton(t: Tensor, cos: Tensor, sin: Tensor, emb_dim: int, **options: bool) -> Tensor:
    """`query` with Triton kernels, out of place."""
    return _query(triton_kernels("mla_rope"), t, cos, sin, emb_dim, **options)


def compiled_key_value(
    kv: Tensor, k_pos_emb: Tensor, cos: Tensor, sin: Tensor, k_dim: int, **options: bool
) -> tuple[Tensor, Tensor]:
    """`key_value` in one pass forward and one backward."""
    return _key_value(_COMPILED_KV, kv, k_pos_emb, cos, sin, k_dim, **options)


def triton_key_value(
    kv: Tensor, k_pos_emb: Tensor, cos: Tensor, sin: Tensor, k_dim: int, **options: bool
) -> tuple[Tensor, Tensor]:
    """`key_value` with Triton kernels."""
    return _key_value(triton_kernels("mla_rope", "KEY_VALUE"), kv, k_pos_emb, cos, sin, k_dim, **options)


def _query(
    kernels: Kernels,
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    emb_dim: int,
    *,
    inverse: bool = False,
    remove_interleaving: bool = False,
    in_place: bool = False,
) -> Tensor:
    _check(t, cos, emb_dim)
    return _Query.apply(t, cos, sin, (emb_dim, inverse, remove_interleaving), in_place, kernels)


def _key_value(
    kernels: Kernels,
    kv: Tensor,
    k_pos_emb: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_dim: int,
    *,
    inverse: bool = False,
    remove_interleaving: bool = False,
) -> tuple[Tensor, Tensor]:
    _check(k_pos_emb, cos, k_pos_emb.shape[-1])
    return _KeyValue.apply(kv, k_pos_emb, cos, sin, (k_dim, inverse, remove_interleaving), kernels)


def _check(t: Tensor, cos: Tensor, emb_dim: int) -> None:
    if emb_dim % 2 or emb_dim > t.shape[-1] or cos.shape[-1] != emb_dim:
        raise ValueError(
            f"emb_dim {emb_dim} must be even, at most the head's {t.shape[-1]} dimensions and the width of cos, {cos.shape[-1]}"
        )


class _Query(torch.autograd.Function):
    """Kernels: forward and backward (t or its gradient, cos, sin, (emb_dim, inverse, remove_interleaving)) -> turned."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor, rule: Any, in_place: bool, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.rule, ctx.kernels = rule, kernels
        out = kernels.forward(t, cos, sin, rule)
        if in_place:
            t.copy_(out)
            ctx.mark_dirty(t)
            return t
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return ctx.kernels.backward(grad, cos, sin, ctx.rule), None, None, None, None, None


class _KeyValue(torch.autograd.Function):
    """Kernels: forward(kv, k_pos_emb, cos, sin, rule) -> (key, value); backward(dkey, dvalue, cos, sin, rule) -> (dkv,
    dk_pos_emb)."""

    @staticmethod
    def forward(
        ctx: Any, kv: Tensor, k_pos_emb: Tensor, cos: Tensor, sin: Tensor, rule: Any, kernels: Kernels
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.rule, ctx.kernels = rule, kernels
        return kernels.forward(kv, k_pos_emb, cos, sin, rule)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dkey: Tensor, dvalue: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return (*ctx.kernels.backward(dkey, dvalue, cos, sin, ctx.rule), None, None, None, None)


@jit_fuser
def _forward(t: Tensor, cos: Tensor, sin: Tensor, rule: tuple[int, bool, bool]) -> Tensor:
    return reference(t, cos, sin, rule[0], inverse=rule[1], remove_interleaving=rule[2])


@jit_fuser
def _backward(grad: Tensor, cos: Tensor, sin: Tensor, rule: tuple[int, bool, bool]) -> Tensor:
    return torch.cat(
        [grad[..., : grad.shape[-1] - rule[0]], _turn_back(grad[..., grad.shape[-1] - rule[0] :], cos, sin, rule)], -1
    )


@jit_fuser
def _forward_kv(kv: Tensor, k_pos_emb: Tensor, cos: Tensor, sin: Tensor, rule: Any) -> tuple[Tensor, Tensor]:
    return reference_key_value(kv, k_pos_emb, cos, sin, rule[0], inverse=rule[1], remove_interleaving=rule[2])


@jit_fuser
def _backward_kv(dkey: Tensor, dvalue: Tensor, cos: Tensor, sin: Tensor, rule: Any) -> tuple[Tensor, Tensor]:
    k_dim = rule[0]
    over_heads = wide(dkey[..., k_dim:]).sum(2, keepdim=True)
    return torch.cat([dkey[..., :k_dim], dvalue], -1), _turn_back(over_heads, cos, sin, rule).to(dkey.dtype)


def _turn_back(g: Tensor, cos: Tensor, sin: Tensor, rule: tuple[int, bool, bool]) -> Tensor:
    """The gradient of the turned part, in the input's order of pairs."""
    _, inverse, remove_interleaving = rule
    first, second = (wide(g[..., ::2]), wide(g[..., 1::2])) if remove_interleaving else wide(g).chunk(2, -1)
    (cos_l, cos_r), (sin_l, sin_r) = cos.chunk(2, -1), sin.chunk(2, -1)
    if inverse:
        sin_l, sin_r = -sin_l, -sin_r
    return torch.stack([first * cos_l + second * sin_r, second * cos_r - first * sin_l], -1).flatten(-2).to(g.dtype)


_COMPILED = Kernels(_forward, _backward)
_COMPILED_KV = Kernels(_forward_kv, _backward_kv)
BACKENDS = {
    "mla_rope_query": {"reference": reference, "compile": compiled, "triton": triton},
    "mla_rope_key_value": {
        "reference": reference_key_value,
        "compile": compiled_key_value,
        "triton": triton_key_value,
    },
}


# ---- Megatron's names -------------------------------------------------------------------------------------------------


def rows_for_tokens(table: Tensor, tokens: int, cu_seqlens: Tensor | None, cp_rank: int, cp_size: int) -> Tensor:
    """The table's rows for packed tokens [T, n, d]: each sequence starts at position 0.

    Under context parallelism a rank holds the chunks cp_rank and 2 cp_size - 1 - cp_rank of each sequence's 2 cp_size.
    """
    if cu_seqlens is None:
        return table[:tokens]
    starts = (cu_seqlens // cp_size).long()
    place = torch.arange(tokens, device=table.device)
    sequence = (torch.searchsorted(starts, place, right=True) - 1).clamp(max=len(starts) - 2)  # padding: the last one's
    position, length = place - starts[sequence], (starts[1:] - starts[:-1])[sequence]
    if cp_size > 1:
        half = length // 2
        early, late = cp_rank * half, (2 * cp_size - 1 - cp_rank) * half
        position = torch.where(position < half, early + position, late + position - half)
    return table[position.clamp(max=len(table) - 1)]


def _tables(
    t: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Any, cp: tuple[int, int], position_ids: Any
) -> tuple[Tensor, Tensor]:
    """cos and sin [s, b or 1, 1, emb] for t [s, b, n, d] (or [T, 1, 1, emb] for t [T, n, d], to be seen as [T, 1, n, d])."""
    if position_ids is not None:  # [b, s], or [T]
        index = position_ids.t() if position_ids.dim() == 2 else position_ids[:, None]
        return cos[:, 0, 0][index][:, :, None], sin[:, 0, 0][index][:, :, None]
    rows = t.shape[0]
    return rows_for_tokens(cos, rows, cu_seqlens, *cp), rows_for_tokens(sin, rows, cu_seqlens, *cp)


def fused_mla_rope_inplace(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    nope_dim: int,
    emb_dim: int,
    cu_seqlens_q: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
    inverse: bool = False,
    remove_interleaving: bool = False,
    position_ids: Tensor | None = None,
) -> Tensor:
    """`query` written into t [s, b, n, nope + emb] (or packed [T, n, nope + emb]), which is marked dirty for autograd."""
    options = {"inverse": inverse, "remove_interleaving": remove_interleaving, "in_place": True}
    return _megatron_query(
        t, cos, sin, (nope_dim, emb_dim), (cu_seqlens_q, cp_rank, cp_size, rotary_interleaved, position_ids), options
    )


def fused_mla_rope_out_of_place(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    nope_dim: int,
    emb_dim: int,
    cu_seqlens_q: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
    inverse: bool = False,
    remove_interleaving: bool = False,
    position_ids: Tensor | None = None,
) -> Tensor:
    """`query` in a new tensor."""
    options = {"inverse": inverse, "remove_interleaving": remove_interleaving, "in_place": False}
    return _megatron_query(
        t, cos, sin, (nope_dim, emb_dim), (cu_seqlens_q, cp_rank, cp_size, rotary_interleaved, position_ids), options
    )


def _megatron_query(
    t: Tensor, cos: Tensor, sin: Tensor, dims: tuple[int, int], where: tuple[Any, ...], options: Any
) -> Tensor:
    cu_seqlens, cp_rank, cp_size, rotary_interleaved, position_ids = where
    assert not rotary_interleaved, "rotary_interleaved is not defined for MLA: its pairs are always read interleaved"
    assert t.shape[-1] == sum(dims), f"the last dimension {t.shape[-1]} is not nope_dim {dims[0]} + emb_dim {dims[1]}"
    cos, sin = _tables(t, cos, sin, cu_seqlens, (cp_rank, cp_size), position_ids)
    if t.dim() == 4:
        return _query(_COMPILED, t, cos, sin, dims[1], **options)
    turned = _query(_COMPILED, t[:, None], cos, sin, dims[1], **(options | {"in_place": False}))[:, 0]
    return t.copy_(turned) if options["in_place"] else turned


def fused_mla_rope_kv_split(
    kv: Tensor,
    k_pos_emb: Tensor,
    cos: Tensor,
    sin: Tensor,
    emb_dim: int,
    k_dim: int,
    v_dim: int,
    cu_seqlens_kv: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
    inverse: bool = False,
    remove_interleaving: bool = False,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`key_value` of kv [s, b, n, k + v] (or [T, n, k + v]) and k_pos_emb [s, b, 1, emb] (or [T, 1, emb])."""
    assert not rotary_interleaved, "rotary_interleaved is not defined for MLA: its pairs are always read interleaved"
    assert kv.shape[-1] == k_dim + v_dim, f"the last dimension {kv.shape[-1]} is not k_dim {k_dim} + v_dim {v_dim}"
    assert k_pos_emb.shape[-1] == emb_dim, f"k_pos_emb has {k_pos_emb.shape[-1]} dimensions, expected {emb_dim}"
    cos, sin = _tables(kv, cos, sin, cu_seqlens_kv, (cp_rank, cp_size), position_ids)
    packed = kv.dim() == 3
    if packed:
        kv, k_pos_emb = kv[:, None], k_pos_emb.view(-1, 1, 1, emb_dim)
    options = {"inverse": inverse, "remove_interleaving": remove_interleaving}
    key, value = _key_value(_COMPILED_KV, kv, k_pos_emb, cos, sin, k_dim, **options)
    return (key[:, 0], value[:, 0]) if packed else (key, value)


fused_apply_mla_rope_for_q = fused_mla_rope_inplace
fused_apply_mla_rope_for_kv = fused_mla_rope_kv_split
