"""AdamW over all tensors of a group in one launch: the kernel of fused_adam. A program takes one chunk of one tensor.

Tensors are found through a table of addresses, so that their number doesn't matter. The step counters are advanced afterwards,
by a program each.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusions.triton.launch import on_device_of

_BLOCK = 2048


@triton.jit
def _at(addresses_ptr, row, count, tensor, offsets, TYPE: tl.constexpr):
    return tl.load(addresses_ptr + row * count + tensor).to(tl.pointer_type(TYPE)) + offsets


@triton.jit
def _kernel(
    addresses_ptr, sizes_ptr, tensor_ptr, chunk_ptr, scale_ptr, skip_ptr, count, lr, beta1, beta2, eps, weight_decay,
    COPY: tl.constexpr, BF16: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skip_ptr) == 0:
        tensor = tl.load(tensor_ptr + tl.program_id(0))
        offsets = tl.load(chunk_ptr + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < tl.load(sizes_ptr + tensor)
        p_at = _at(addresses_ptr, 0, count, tensor, offsets, tl.float32)
        m_at = _at(addresses_ptr, 2, count, tensor, offsets, tl.float32)
        v_at = _at(addresses_ptr, 3, count, tensor, offsets, tl.float32)
        g = tl.load(_at(addresses_ptr, 1, count, tensor, offsets, tl.float32), mask=mask, other=0.0) / tl.load(scale_ptr)
        m = beta1 * tl.load(m_at, mask=mask, other=0.0) + (1.0 - beta1) * g
        v = beta2 * tl.load(v_at, mask=mask, other=0.0) + (1.0 - beta2) * g * g
        t = tl.load(_at(addresses_ptr, 4, count, tensor, 0, tl.float32)) + 1.0
        correction1 = 1.0 - tl.exp(t * tl.log(beta1))
        correction2 = 1.0 - tl.exp(t * tl.log(beta2))
        p = tl.load(p_at, mask=mask, other=0.0) * (1.0 - lr * weight_decay)
        p -= lr * (m / correction1) / (tl.sqrt(v / correction2) + eps)
        tl.store(p_at, p, mask=mask)
        tl.store(m_at, m, mask=mask)
        tl.store(v_at, v, mask=mask)
        if COPY:
            if BF16:
                tl.store(_at(addresses_ptr, 5, count, tensor, offsets, tl.bfloat16), p.to(tl.bfloat16), mask=mask)
            else:
                tl.store(_at(addresses_ptr, 5, count, tensor, offsets, tl.float16), p.to(tl.float16), mask=mask)


@triton.jit
def _advance_kernel(addresses_ptr, skip_ptr, count):
    at = _at(addresses_ptr, 4, count, tl.program_id(0), 0, tl.float32)
    if tl.load(skip_ptr) == 0:
        tl.store(at, tl.load(at) + 1.0)


@functools.lru_cache(maxsize=16)
def _chunks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(sizes, the tensor of each program, its chunk of that tensor)."""
    counts = torch.tensor([triton.cdiv(size, _BLOCK) for size in sizes])
    tensors = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)[:-1]])
    chunks = torch.arange(len(tensors)) - starts[tensors]
    return torch.tensor(sizes, device=device), tensors.to(device, torch.int32), chunks.to(device, torch.int32)


def step(group: Any, lr: float, betas: tuple[float, float], eps: float, scale: Tensor, skip: Tensor) -> None:
    """One update; see fused_adam.py."""
    parameters = group.parameters
    if not all(t.is_contiguous() for ts in (parameters, group.exp_avgs, group.exp_avg_sqs, group.copies) for t in ts):
        raise ValueError("parameters, their state and their copies must be contiguous")
    if any(copy.dtype not in (torch.bfloat16, torch.float16) for copy in group.copies):
        raise ValueError(f"copies are {group.copies[0].dtype}; expected bfloat16 or float16")
    gradients = [g.float().contiguous() for g in group.gradients]
    rows = [parameters, gradients, group.exp_avgs, group.exp_avg_sqs, group.steps, *([group.copies] if group.copies else [])]
    addresses = torch.tensor([[t.data_ptr() for t in row] for row in rows], dtype=torch.int64)
    addresses = addresses.to(parameters[0].device, non_blocking=True)
    sizes, tensors, chunks = _chunks(tuple(p.numel() for p in parameters), parameters[0].device)
    bf16 = bool(group.copies) and group.copies[0].dtype == torch.bfloat16
    with on_device_of(parameters[0]):
        _kernel[(len(tensors),)](
            addresses, sizes, tensors, chunks, scale, skip, len(parameters), lr, betas[0], betas[1], eps, group.weight_decay,
            COPY=bool(group.copies), BF16=bf16, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
        _advance_kernel[(len(parameters),)](addresses, skip, len(parameters))
