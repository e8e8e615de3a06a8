"""Between backward and the optimizer: partial gradients summed; the global norm and the step's losses. Two collectives."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.tensor_parallel.params import ParallelModule


def partial_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of which each tensor-parallel rank gets one part of the gradient (see ParallelModule.add_parameter)."""
    return [
        module.get_parameter(name)
        for module in model.modules()
        if isinstance(module, ParallelModule)
        for name in sorted(module.partial_gradients)
    ]


@torch.no_grad()
def reduce_partial_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Sum the gradients of `partial_parameters` over the tensor-parallel group, in place: bit-equal on its ranks afterwards.

    One flattened all-reduce per dtype; under data parallel of this rank's shards only.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        grad = local_gradient(parameter)
        by_dtype.setdefault(grad.dtype, []).append(grad)
    for grads in by_dtype.values():
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat, group=group)
        totals = [total.view(g.shape) for g, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True)]
        torch._foreach_copy_(grads, totals)


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient."""
    grad = parameter.grad
    assert grad is not None, "a parameter without gradient: every parameter takes part in every step"
    return grad.to_local() if isinstance(grad, DTensor) else grad


def sum_over_data(values: Tensor, tensor_parallel_size: int) -> Tensor:
    """Sums over the data-parallel ranks of values that are equal on the ranks of a tensor-parallel group, fp32.

    Over the whole job, so that no group of its own is needed: each value is counted once per tensor-parallel rank.
    """
    if not dist.is_initialized():
        return values
    dist.all_reduce(values)
    return values / tensor_parallel_size


def norm_and_sums(parameters: list[nn.Parameter], sums: Tensor, tensor_parallel_size: int) -> tuple[Tensor, Tensor]:
    """(L2 norm of the whole model's gradient, fp32 scalar; `sums` [n] summed over the data-parallel ranks), bit-equal on all
    ranks, in one all-reduce. Call after reduce_partial_gradients.

    A gradient with equal copies on several ranks is counted by 1 / copies on each.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        local = local_gradient(parameter)
        if local.numel():  # a rank may have nothing of a small parameter
            by_copies.setdefault(_copies(parameter), []).append(local)
    squares = [torch.stack(torch._foreach_norm(grads)).square().sum() / copies for copies, grads in by_copies.items()]
    total = torch.stack(squares).sum()
    if not dist.is_initialized():
        return total.sqrt(), sums
    values = torch.cat([total.reshape(1), sums / tensor_parallel_size])
    dist.all_reduce(values)
    return values[0].sqrt(), values[1:]


def _copies(parameter: nn.Parameter) -> int:
    """Ranks that hold the same part of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh, copies = parameter.device_mesh, 1
    for dim, placement in enumerate(parameter.placements):
        copies *= mesh.size(dim) if placement.is_replicate() else 1
    return copies
