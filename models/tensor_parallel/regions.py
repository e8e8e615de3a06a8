"""The borders between regions in which activations have one sharding. Each function says "X forward, Y backward".

A tensor region holds a slice of the last dimension (heads, inner MLP width), a sequence region a slice of dimension 0.
`group` None is tensor-parallel size 1: every function is then the identity.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None

# torch 2.13 renamed these two and warns at each call of the old names; 2.11 has only those.
all_gather_single: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def copy_to_tensor_parallel_region(x: Tensor, group: Group) -> Tensor:
    """Identity forward, all-reduce backward."""
    return x if group is None else _Copy.apply(x, group)


def reduce_from_tensor_parallel_region(x: Tensor, group: Group) -> Tensor:
    """All-reduce forward, identity backward."""
    return x if group is None else _Reduce.apply(x, group)


def gather_from_tensor_parallel_region(x: Tensor, group: Group) -> Tensor:
    """All-gather of the last dimension forward, own slice backward."""
    return x if group is None else _GatherLast.apply(x, group)


def scatter_to_sequence_parallel_region(x: Tensor, group: Group) -> Tensor:
    """Own slice of dimension 0 forward, all-gather backward."""
    return x if group is None else _Scatter.apply(x, group)


def gather_from_sequence_parallel_region(x: Tensor, group: Group) -> Tensor:
    """All-gather of dimension 0 forward, reduce-scatter backward (each rank's gradient is one part of a sum)."""
    return x if group is None else _Gather.apply(x, group)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, group: Group) -> Tensor:
    """Reduce-scatter of dimension 0 forward, all-gather backward."""
    return x if group is None else _ReduceScatter.apply(x, group)


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the group, in a new tensor: autograd may still need the input."""
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[s/t, ...] of each rank -> [s, ...]."""
    out = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    all_gather_single(out, x.contiguous(), group=group)
    return out


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[s, ...] summed over the ranks -> own [s/t, ...]."""
    size = dist.get_world_size(group)
    if x.shape[0] % size:
        raise ValueError(f"dimension 0 of {list(x.shape)} is not divisible by the group's {size} ranks")
    out = x.new_empty(x.shape[0] // size, *x.shape[1:])
    reduce_scatter_single(out, x.contiguous(), group=group)
    return out


def own_slice(x: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """This rank's equal share of a dimension."""
    size = dist.get_world_size(group)
    if x.shape[dim] % size:
        raise ValueError(f"dimension {dim} of {list(x.shape)} is not divisible by the group's {size} ranks")
    return x.chunk(size, dim)[dist.get_rank(group)].contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return all_gather(x.movedim(-1, 0), group).movedim(0, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return own_slice(grad, ctx.group, -1), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return own_slice(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group), None
