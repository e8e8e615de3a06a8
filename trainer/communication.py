"""What a step sends: collectives by kind and group, with their bytes, seen where they are dispatched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.log import Log
from trainer.meshes import Meshes

_KINDS = {
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "broadcast": "broadcast",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
}


@dataclass(frozen=True)
class Collective:
    """One kind of collective over one group of ranks."""

    kind: str
    group: str  # tensor parallel, shards, copies, all
    ranks: int


@dataclass
class Traffic:
    """How often, and how much: bytes of the whole tensors, that is after an all-gather, before a reduce-scatter."""

    calls: int = 0
    bytes: int = 0


class CommunicationCounter(TorchDispatchMode):
    """Counts the collectives of this rank while it is active; those among one rank, which move nothing, are left out."""

    def __init__(self, meshes: Meshes):
        super().__init__()
        self.names = _group_names(meshes)
        self.found: dict[Collective, Traffic] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """It changes nothing, so functions stay compiled under it (a layer compiled as a whole does not: configs refuse that)."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        name = func.__name__.lstrip("_")
        kind = next((words for start, words in _KINDS.items() if name.startswith(start)), None)
        group = _group_of([*args, *kwargs.values()])
        if kind is None or group is None or group.size() == 1:
            return
        sizes = [leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # The functional form has its input only, which an all-gather makes as many times larger.
        whole = max(sizes) * (group.size() if func.namespace == "_c10d_functional" and kind == "all-gather" else 1)
        label = self.names.get(group.group_name, "all" if group.size() == dist.get_world_size() else "other")
        traffic = self.found.setdefault(Collective(kind, label, group.size()), Traffic())
        traffic.calls += 1
        traffic.bytes += whole

    def show(self, log: Log, iteration: int) -> None:
        """As a table, the most bytes first."""
        ordered = sorted(self.found.items(), key=lambda item: -item[1].bytes)
        rows = [(c.kind, c.group, str(c.ranks), str(t.calls), f"{t.bytes / 2**20:,.3f}") for c, t in ordered]
        log.table(f"Communication of iteration {iteration}, of one rank", ("kind", "over", "ranks", "calls", "MiB"), rows)

    def as_dict(self) -> list[dict[str, Any]]:
        """Plain data, in the order of first use."""
        return [{**vars(c), **vars(t)} for c, t in self.found.items()]


def _group_of(arguments: list[Any]) -> dist.ProcessGroup | None:
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(argument)
            except RuntimeError:  # the operation's reduction is such an object too
                continue
    names: list[Any] = [a for a in arguments if isinstance(a, str)]  # the functional form names its group last
    return dist.distributed_c10d._resolve_process_group(names[-1]) if names else None


def _group_names(meshes: Meshes) -> dict[str, str]:
    found: dict[str, str] = {} if meshes.tp.group is None else {meshes.tp.group.group_name: "tensor parallel"}
    if meshes.data is not None:
        for number, name in enumerate(meshes.data.mesh_dim_names or ()):
            found[meshes.data.get_group(number).group_name] = name
    return found
