"""Parameters at rest: fp32 DTensors on the tensor-parallel mesh, ordinary tensors at size 1."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from models.init import InitRule


@dataclass(frozen=True)
class TensorParallel:
    """The tensor-parallel mesh of a model, and whether the sequence is sharded over it outside the matmuls.

    `mesh` None is size 1: no process group is needed or used.
    """

    mesh: DeviceMesh | None = None
    sequence_parallel: bool = False

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the mesh."""
        return None if self.mesh is None else self.mesh.get_group()

    @property
    def size(self) -> int:
        """t."""
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return 0 if self.mesh is None else self.mesh.get_local_rank()


class ParallelModule(nn.Module):
    """A module that owns parameters. It knows how each is sharded and how it starts."""

    def __init__(self, tp: TensorParallel, device: torch.device):
        super().__init__()
        self.tp, self._device = tp, device
        self.init_rules: dict[str, InitRule] = {}
        self.partial_gradients: set[str] = set()

    def add_parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        rule: InitRule,
        shard_dim: int | None = None,
        on_sharded_tokens: bool = False,
    ) -> None:
        """Register a parameter of the global `shape`; `shard_dim` None replicates it. Filled by `initialise`.

        A replicated parameter that sees only this rank's share of the tokens (`on_sharded_tokens`: under sequence parallel) gets
        a gradient that is one part of a sum over the tensor-parallel ranks; its name is kept in `partial_gradients`, and
        trainer/gradients.py adds the parts up once a step. Other parameters need no sum.
        """
        assert not (on_sharded_tokens and shard_dim is not None), "a sharded parameter has a gradient of its own"
        self.init_rules[name] = rule
        if on_sharded_tokens:
            self.partial_gradients.add(name)
        local_shape = list(shape)
        if shard_dim is not None:
            local_shape[shard_dim] //= self.tp.size
        device = torch.device("meta") if _WITHOUT_MEMORY else self._device
        local = torch.empty(local_shape, dtype=torch.float32, device=device)
        if self.tp.mesh is not None:
            placement = Replicate() if shard_dim is None else Shard(shard_dim)
            local = DTensor.from_local(local, self.tp.mesh, [placement], run_check=False)
        self.register_parameter(name, nn.Parameter(local))

    def local(self, name: str, dtype: torch.dtype) -> Tensor:
        """This rank's part of a parameter, in the dtype of the computation."""
        return local_tensor(self.get_parameter(name)).to(dtype)


def local_tensor(parameter: Tensor) -> Tensor:
    """The local tensor of a parameter; its gradient is placed as the parameter is (fully_shard would sum a Partial one by a
    collective of its own, for each parameter and micro-batch)."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


_WITHOUT_MEMORY: list[bool] = []


@contextlib.contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Parameters made inside are on the meta device: they are sharded further before they get any memory."""
    _WITHOUT_MEMORY.append(True)
    try:
        yield
    finally:
        _WITHOUT_MEMORY.pop()


class ParameterGradient:
    """The gradient slot of a sharded weight, seen as [out/t, in]: for products that add to it themselves."""

    def __init__(self, parameter: nn.Parameter):
        self.parameter = parameter

    def read(self) -> Tensor | None:
        """The local gradient so far, as a view; None before the first product of a step."""
        grad = self.parameter.grad
        if grad is None:
            return None
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        return local.view(-1, local.shape[-1])

    def write(self, total: Tensor) -> None:
        """Make `total` the gradient."""
        parameter = self.parameter
        if isinstance(parameter, DTensor):
            local = total.view(parameter.to_local().shape)
            parameter.grad = DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False)
        else:
            parameter.grad = total.view(parameter.shape)
