"""Expert indices to one column per expert: the kernels of fused_indices_converter. A program takes a block of tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusions.kernels import Kernels
from fusions.triton.launch import on_device_of

_TOKENS = 16


@triton.jit
def _forward_kernel(
    indices_ptr, probs_ptr, multihot_ptr, out_ptr, n, top_k, experts,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    columns = tl.arange(0, EXPERTS)
    chosen = tl.zeros([TOKENS, EXPERTS], dtype=tl.int32)
    probs = tl.zeros([TOKENS, EXPERTS], dtype=tl.float32)
    for k in range(top_k):
        index = tl.load(indices_ptr + tokens * top_k + k, mask=tokens < n, other=-1)
        prob = tl.load(probs_ptr + tokens * top_k + k, mask=tokens < n, other=0.0).to(tl.float32)
        hit = index[:, None] == columns[None, :]
        chosen = tl.where(hit, 1, chosen)
        probs = tl.where(hit, prob[:, None], probs)
    at = tokens[:, None] * experts + columns[None, :]
    mask = (tokens < n)[:, None] & (columns < experts)[None, :]
    tl.store(multihot_ptr + at, chosen.to(tl.int8), mask=mask)
    tl.store(out_ptr + at, probs.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(grad_ptr, indices_ptr, out_ptr, count, top_k, experts, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices_ptr + at, mask=at < count, other=-1)
    grad = tl.load(grad_ptr + (at // top_k) * experts + index, mask=(at < count) & (index >= 0), other=0.0)
    tl.store(out_ptr + at, grad, mask=at < count)


def _forward(indices: Tensor, probs: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    n, top_k = indices.shape
    multihot = torch.empty(n, num_experts, dtype=torch.int8, device=indices.device)
    out = torch.empty(n, num_experts, dtype=probs.dtype, device=probs.device)
    with on_device_of(probs):
        _forward_kernel[(triton.cdiv(n, _TOKENS),)](
            indices.contiguous(), probs.contiguous(), multihot, out, n, top_k, num_experts,
            TOKENS=_TOKENS, EXPERTS=triton.next_power_of_2(num_experts),
        )  # fmt: skip
    return multihot.view(torch.bool), out


def _backward(grad: Tensor, indices: Tensor) -> Tensor:
    out = torch.empty(indices.shape, dtype=grad.dtype, device=grad.device)
    with on_device_of(grad):
        _backward_kernel[(triton.cdiv(indices.numel(), 1024),)](
            grad.contiguous(), indices.contiguous(), out, indices.numel(), indices.shape[1], grad.shape[1], BLOCK=1024
        )
    return out


KERNELS = Kernels(_forward, _backward)
