"""Between backward and the optimizer: partial gradients summed, the global norm, in two collectives a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


def reduce_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients that each rank has a part of (norms and row-parallel biases under sequence parallel).

    A layer marks such a gradient Partial by the placement it hands its local tensor out with; all of them go into one
    flattened all-reduce per dtype, and come back replicated and bit-equal on all ranks.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and grad.placements[0].is_partial():
            by_dtype.setdefault(grad.dtype, []).append(parameter)
    for partial in by_dtype.values():
        grads = [local_gradient(p) for p in partial]
        flat = torch.cat([g.reshape(-1) for g in grads])
        mesh = partial[0].grad.device_mesh  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        dist.all_reduce(flat, group=mesh.get_group())
        for parameter, total in zip(partial, flat.split([g.numel() for g in grads]), strict=True):
            local = total.view(parameter.shape)
            parameter.grad = DTensor.from_local(local, mesh, [Replicate()], run_check=False)


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient."""
    grad = parameter.grad
    assert grad is not None, "a parameter without gradient: every parameter takes part in every step"
    return grad.to_local() if isinstance(grad, DTensor) else grad


def global_norm(parameters: list[nn.Parameter]) -> Tensor:
    """L2 norm of the whole model's gradient, fp32 scalar, bit-equal on all ranks. Call after reduce_partial_gradients.

    Sharded gradients are summed over the ranks in one all-reduce; replicated ones, equal on all, are counted once.
    """
    sharded, replicated, group = [], [], None
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and grad.placements[0].is_shard():
            sharded.append(local_gradient(parameter))
            group = grad.device_mesh.get_group()
        else:
            replicated.append(local_gradient(parameter))
    total = _sum_of_squares(sharded)
    if total is not None and group is not None:
        dist.all_reduce(total, group=group)
    rest = _sum_of_squares(replicated)
    parts = [part for part in (total, rest) if part is not None]
    return torch.stack(parts).sum().sqrt()


def _sum_of_squares(tensors: list[Tensor]) -> Tensor | None:
    if not tensors:
        return None
    return torch.stack(torch._foreach_norm(tensors)).square().sum()
