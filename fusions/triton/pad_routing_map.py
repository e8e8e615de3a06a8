"""Padding of a routing map: the kernel of fused_pad_routing_map. One program per expert, over its column in pieces."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusions.triton.launch import on_device_of


@triton.jit
def _kernel(map_ptr, out_ptr, tokens, experts, multiple, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    count = 0
    for start in range(0, tokens, BLOCK):
        rows = (start + tl.arange(0, BLOCK)).to(tl.int64)
        count += tl.sum(tl.load(map_ptr + rows * experts + expert, mask=rows < tokens, other=0).to(tl.int32), 0)
    missing = (multiple - count % multiple) % multiple
    seen = 0
    for start in range(0, tokens, BLOCK):
        rows = (start + tl.arange(0, BLOCK)).to(tl.int64)
        one = tl.load(map_ptr + rows * experts + expert, mask=rows < tokens, other=1).to(tl.int32)
        rank = seen + tl.cumsum(1 - one, 0)
        filled = tl.where((one == 0) & (rank <= missing), 1, one)
        tl.store(out_ptr + rows * experts + expert, filled.to(out_ptr.dtype.element_ty), mask=rows < tokens)
        seen += tl.sum(1 - one, 0)


def pad(routing_map: Tensor, pad_multiple: int) -> Tensor:
    ones = routing_map.contiguous().to(torch.int8)
    out = torch.empty_like(ones)
    tokens, experts = ones.shape
    with on_device_of(ones):
        _kernel[(experts,)](ones, out, tokens, experts, pad_multiple, BLOCK=1024)
    return out.to(routing_map.dtype)
