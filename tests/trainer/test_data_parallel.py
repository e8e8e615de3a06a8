"""Data parallel against one process, per parameter (DESIGN section 9): every sharding, with tensor parallel, accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.distributed import run_ranks
from tests.models.build import build, optimizer_of, run_config, samples_of
from tests.models.test_tensor_parallel import same_training, whole
from trainer.data.families import make_batch
from trainer.loop import train_step
from trainer.meshes import Meshes, make_meshes


def train_data_parallel(overrides: dict[str, Any], fused: Any = False, iterations: int = 20) -> dict[str, Any]:
    """As `train` of test_tensor_parallel, over the ranks there are: t from the overrides, the rest is data parallel."""
    config = run_config(overrides, fused)
    meshes = Meshes()
    if dist.is_initialized() and dist.get_world_size() > 1:
        config = config.for_processes(dist.get_world_size())
        assert config.problems(dist.get_world_size()) == []
        meshes = make_meshes(config.parallel, "cpu")
    model, counters = build(config, meshes=meshes)
    optimizer = optimizer_of(config, model, counters)
    initial = {n: whole(p) for n, p in model.named_parameters()}
    micro, size, step = config.training.micro_batch_size, config.training.global_batch_size, 0
    generator = torch.Generator().manual_seed(0)
    losses, gradients = [], {}
    for iteration in range(1, iterations + 1):
        samples = samples_of(config, size, generator)
        batches = [
            make_batch(samples[i : i + micro], list(range(i, i + micro)), config)
            for i in range(meshes.data_rank * micro, size, micro * meshes.data_size)
        ]
        step = len(batches)
        losses.append(train_step(model, optimizer, batches, config, iteration).loss.item())
        if iteration == 1:
            gradients = {n: whole(p.grad) for n, p in zip(optimizer.names.values(), optimizer.parameters, strict=True)}
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in optimizer.parameters)
    return {"losses": losses, "gradients": gradients, "initial": initial, "held": held, "accumulation": step}


BATCH = {"training.micro_batch_size": 2, "training.global_batch_size": 8}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train_data_parallel(BATCH)


CASES: list[tuple[int, dict[str, Any]]] = [
    *((2, {"parallel.data_sharding": kind}) for kind in ("none", "optimizer", "full")),
    *((4, {"parallel.data_sharding": kind, "parallel.tensor_parallel_size": 2}) for kind in ("none", "optimizer", "full")),
    (4, {"parallel.data_sharding": "full", "parallel.data_shard_size": 2}),
    (4, {"parallel.data_sharding": "full", "parallel.tensor_parallel_size": 2, "parallel.sequence_parallel": True}),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "overrides"), CASES, ids=str)
def test_the_same_training_however_it_is_shared_out(ranks: int, overrides: dict[str, Any], alone: dict[str, Any]) -> None:
    for result in run_ranks(ranks, train_data_parallel, BATCH | overrides):
        same_training(result, alone)
        for name, weight in result["initial"].items():
            assert torch.equal(weight, alone["initial"][name]), name
