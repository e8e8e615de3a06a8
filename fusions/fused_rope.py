"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of queries and keys, apart or packed as QKV.

    halves        (x_i, x_{i + d_rot/2})  ->  (x_i cos_i - x_{i + d_rot/2} sin_i,  x_{i + d_rot/2} cos_j + x_i sin_j)
    interleaved   the same for the pairs (x_{2i}, x_{2i + 1})

Shapes: x [s, b, n, d]; cos, sin fp32 [s, b or 1, 1, d_rot] (b: positions per sample); the leading d_rot dimensions are rotated,
the rest passes. Computed in fp32, the result has x's dtype. YaRN's magnitude is part of cos and sin.
qkv_rope: mixed [s, b, g, (n/g + 2) d] (per group its query heads, its key, its value) and its bias of that width, or None,
-> q [s, b, n, d], k and v [s, b, g, d]: bias, rotation and split in one pass.
Saved for the backward, per element of x: nothing. The reference saves x in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusions import apex, transformer_engine
from fusions.column_sum import block_sums, row_block
from fusions.jit import jit_fuser
from fusions.kernels import Kernels, triton_kernels, wide

QKV = tuple[Tensor, Tensor, Tensor]


def reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The definition, in plain PyTorch."""
    rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    u = wide(rotated)
    u = u * cos + _rotate_half(u, interleaved) * sin
    return torch.cat([u.to(x.dtype), rest], -1) if rest.shape[-1] else u.to(x.dtype)


def _rotate_half(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def compiled(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The same in one pass forward and one backward."""
    return _Rope.apply(x, cos, sin, interleaved, _COMPILED)


def triton(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The same with Triton kernels."""
    return _Rope.apply(x, cos, sin, interleaved, triton_kernels("rope"))


class _Rope(torch.autograd.Function):
    """Kernels: forward and backward (x or its gradient, cos, sin, interleaved) -> rotated forth, or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.kernels = interleaved, kernels
        return kernels.forward(x, cos, sin, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        return ctx.kernels.backward(grad, cos, sin, ctx.interleaved), None, None, None, None


def reference_qkv(
    mixed: Tensor, bias: Tensor | None, head_dim: int, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> QKV:
    """The definition of qkv_rope: add, split, rotate q and k."""
    mixed = mixed if bias is None else mixed + bias.view(mixed.shape[-2:])
    q, k, v = split_qkv(mixed, head_dim)
    return reference(q, cos, sin, interleaved), reference(k, cos, sin, interleaved), v


def split_qkv(mixed: Tensor, head_dim: int) -> QKV:
    """mixed [s, b, g, (n/g + 2) d] -> q [s, b, n, d], k and v [s, b, g, d]."""
    heads = mixed.unflatten(-1, (-1, head_dim))  # [s, b, g, n/g + 2, d]
    q, k, v = heads.split([heads.shape[3] - 2, 1, 1], 3)  # not slices: their backward fills a whole tensor with zeros each
    return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)


def compiled_qkv(
    mixed: Tensor, bias: Tensor | None, head_dim: int, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> QKV:
    """The same in one pass forward and one backward."""
    return _QKVRope.apply(mixed, bias, head_dim, cos, sin, interleaved, _COMPILED_QKV)


def triton_qkv(
    mixed: Tensor, bias: Tensor | None, head_dim: int, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> QKV:
    """The same with Triton kernels."""
    return _QKVRope.apply(mixed, bias, head_dim, cos, sin, interleaved, triton_kernels("rope", "QKV_KERNELS"))


def _transformer_engine_qkv(
    mixed: Tensor, bias: Tensor | None, head_dim: int, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> QKV:
    split = (mixed.shape[-1] - 2 * head_dim, head_dim, head_dim)
    q, k, v = transformer_engine.qkv_rope(mixed, split, cos, sin, interleaved)
    return q, k, v


class _QKVRope(torch.autograd.Function):
    """Kernels: forward(mixed, bias, d, cos, sin, interleaved) -> (q, k, v); backward(dq, dk, dv, cos, sin, interleaved, bias:

    bool) -> (dmixed, dbias or None).
    """

    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, bias: Any, head_dim: int, cos: Tensor, sin: Tensor, interleaved: bool, kernels: Kernels
    ) -> QKV:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.kernels, ctx.bias = interleaved, kernels, None if bias is None else (bias.shape, bias.dtype)
        return kernels.forward(mixed, bias, head_dim, cos, sin, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dmixed, dbias = ctx.kernels.backward(dq, dk, dv, cos, sin, ctx.interleaved, ctx.bias is not None)
        dbias = None if ctx.bias is None else dbias.view(ctx.bias[0]).to(ctx.bias[1])
        return dmixed, dbias, None, None, None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """x rotated by the angles, or back, as one pure expression; for use inside a compiled function."""
    width = cos.shape[-1]
    rotated, rest = wide(x[..., :width]), x[..., width:]
    if interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
        cos_1, cos_2, sin_1, sin_2 = cos[..., ::2], cos[..., 1::2], sin[..., ::2], sin[..., 1::2]
    else:
        (first, second), (cos_1, cos_2), (sin_1, sin_2) = rotated.chunk(2, -1), cos.chunk(2, -1), sin.chunk(2, -1)
    if back:
        out = (first * cos_1 + second * sin_2, second * cos_2 - first * sin_1)
    else:
        out = (first * cos_1 - second * sin_1, second * cos_2 + first * sin_2)
    joined = torch.stack(out, -1).flatten(-2) if interleaved else torch.cat(out, -1)
    return torch.cat([joined.to(x.dtype), rest], -1) if rest.shape[-1] else joined.to(x.dtype)


@jit_fuser
def _forward(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return _rotate(x, cos, sin, interleaved, False)


@jit_fuser
def _backward(grad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return _rotate(grad, cos, sin, interleaved, True)


@jit_fuser
def _forward_qkv(mixed: Tensor, bias: Any, head_dim: int, cos: Tensor, sin: Tensor, interleaved: bool) -> QKV:
    s, b, g, width = mixed.shape
    heads = (mixed if bias is None else mixed + bias.view(g, width)).view(s, b, g, width // head_dim, head_dim)
    q = _rotate(heads[:, :, :, :-2], cos[..., None, :], sin[..., None, :], interleaved, False)
    k = _rotate(heads[:, :, :, -2], cos, sin, interleaved, False)
    return q.reshape(s, b, g * (width // head_dim - 2), head_dim), k, heads[:, :, :, -1].contiguous()


def _backward_qkv(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, bias: bool
) -> tuple[Tensor, Tensor | None]:
    dmixed, sums = _backward_qkv_kernel(dq, dk, dv, cos, sin, interleaved, row_block_of(dk) if bias else 0)
    return dmixed, None if sums is None else sums.sum(0)


def row_block_of(k: Tensor) -> int:
    """Tokens to sum at a time for the gradient of the bias; k is [s, b, g, d]."""
    return row_block(k[:, :, 0])


@jit_fuser
def _backward_qkv_kernel(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, block: int
) -> tuple[Tensor, Tensor | None]:
    s, b, g, d = dk.shape
    q = _rotate(dq.view(s, b, g, dq.shape[2] // g, d), cos[..., None, :], sin[..., None, :], interleaved, True)
    k = _rotate(dk, cos, sin, interleaved, True)
    dmixed = torch.cat([q, k[:, :, :, None], dv[:, :, :, None]], 3).flatten(3)  # [s, b, g, (n/g + 2) d]
    return dmixed, block_sums(wide(dmixed).flatten(2), block) if block else None


_COMPILED = Kernels(_forward, _backward)
_COMPILED_QKV = Kernels(_forward_qkv, _backward_qkv)
BACKENDS: dict[str, dict[str, Callable[..., Any]]] = {
    "rope": {
        "reference": reference,
        "compile": compiled,
        "triton": triton,
        "apex": apex.rope,
        "transformer_engine": transformer_engine.rope,
    },
    "qkv_rope": {
        "reference": reference_qkv,
        "compile": compiled_qkv,
        "triton": triton_qkv,
        "transformer_engine": _transformer_engine_qkv,
    },
}


# ---- Megatron's names -------------------------------------------------------------------------------------------------


def fused_apply_rotary_pos_emb(t: Tensor, freqs: Tensor, interleaved: bool = False) -> Tensor:
    """t [s, b, n, d] rotated by the angles freqs [s, 1, 1, d_rot]."""
    return compiled(t, freqs.float().cos(), freqs.float().sin(), interleaved)


def fused_single_qkv_rope(
    mixed_qkv: Tensor, q_freqs: Tensor, k_freqs: Tensor, qkv_split_arg_list: list[int], interleaved: bool = False
) -> QKV:
    """q, k, v of packed [s, b, g, sum of the split], q and k rotated by freqs [s, 1, 1, d_rot] (the same for both here)."""
    head_dim = qkv_split_arg_list[1]
    if q_freqs is not k_freqs and not torch.equal(q_freqs, k_freqs):
        raise ValueError("q_freqs and k_freqs differ; pass one tensor for both")
    return compiled_qkv(mixed_qkv, None, head_dim, q_freqs.float().cos(), q_freqs.float().sin(), interleaved)
