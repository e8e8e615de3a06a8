"""The processes of a job and the mesh they form."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from configs.run import ParallelConfig
from models.tensor_parallel.params import TensorParallel
from trainer.errors import UserError


@dataclass(frozen=True)
class Meshes:
    """The ranks as (copies, shards of a copy, tensor parallel), row by row: ranks that share a layer are neighbours.

    `data` is the part of fully_shard: the dimension of the shards, or copies and shards (HSDP); None at data-parallel size 1.
    Pipeline stages would be one more dimension in front; context parallel one between shards and tensor parallel.
    """

    tp: TensorParallel = field(default_factory=TensorParallel)
    data: DeviceMesh | None = None
    data_size: int = 1
    data_rank: int = 0


def world_size() -> int:
    """Processes of this job, from torchrun's environment; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def restart_note() -> str:
    """A warning where a restart of the job may hang, "" elsewhere: agents of several nodes that share their store between
    restarts leave the last attempt's addresses in it (pytorch/pytorch#135712)."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    nodes, restarts = os.environ.get("GROUP_WORLD_SIZE", "1"), os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if not shared or nodes == "1" or restarts == "0":
        return ""
    return (
        "note: after a failure the restarted ranks may wait for ever; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
    )


def pick_device(kind: str) -> torch.device:
    """The device of this process. Raises UserError where there are fewer GPUs than processes."""
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count <= local_rank():
        raise UserError(
            f"LOCAL_RANK {local_rank()} needs GPU number {local_rank()}, but this machine shows {count}; start at most that "
            "many processes here, or set run.device=cpu"
        )
    device = torch.device("cuda", local_rank())
    torch.cuda.set_device(device)
    return device


def start_processes(parallel: ParallelConfig, device: torch.device) -> Meshes:
    """Join the job's process group; one process needs none. CPU tensors always have a group too (gloo)."""
    if world_size() == 1:
        return Meshes()
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=parallel.timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )
    return make_meshes(parallel, device.type)


def make_meshes(parallel: ParallelConfig, device_type: str) -> Meshes:
    """The meshes of a job whose process group is there. Raises ValueError where the sizes don't multiply to the world's."""
    t, dp, shards = parallel.tensor_parallel_size, parallel.data_parallel, parallel.shard_size
    if dp * t != dist.get_world_size() or dp % shards:
        raise ValueError(
            f"{dp // shards} copies x {shards} shards x {t} tensor parallel are not {dist.get_world_size()} ranks"
        )
    sizes = {"copies": dp // shards, "shards": shards, "tp": t}
    # A dimension of size 1 would cost a collective among one, except that of the shards, which fully_shard can't do without.
    names = [n for n in sizes if sizes[n] > 1 or (n == "shards" and dp > 1)]
    mesh = init_device_mesh(device_type, tuple(sizes[n] for n in names), mesh_dim_names=tuple(names))
    data_names = tuple(n for n in names if n != "tp")
    return Meshes(
        TensorParallel(mesh["tp"], parallel.sequence_parallel) if t > 1 else TensorParallel(),
        mesh[data_names] if dp > 1 else None,
        dp,
        dist.get_rank() // t,
    )


def stop_processes() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank; every rank must call it. A CPU collective: no device is waited for."""
    if not dist.is_initialized():
        return flag
    value = torch.tensor([int(flag)])
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return bool(value.item())


def agree(name: str, value: str) -> None:
    """Raise UserError on every rank, naming the odd ones, unless all ranks have the same value."""
    if not dist.is_initialized():
        return
    values: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(values, value)
    if len(set(values)) > 1:
        common = max(set(values), key=values.count)
        odd = [rank for rank, v in enumerate(values) if v != common]
        raise UserError(f"{name} differs between ranks: rank {odd} has {values[odd[0]]}, the others {common}")
