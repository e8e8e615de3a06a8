"""Data parallel against one process, per parameter (DESIGN section 9): every sharding, with tensor parallel, accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.distributed import run_ranks
from tests.models.build import BERT, T5, build, optimizer_of, run_config, samples_of
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
    return {
        "losses": losses,
        "gradients": gradients,
        "initial": initial,
        "held": held,
        "accumulation": step,
        "counters": counters.as_dict(),
    }


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


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_accumulation_1_2_4_gives_the_same(micro: int, alone: dict[str, Any]) -> None:
    for result in run_ranks(2, train_data_parallel, BATCH | {"training.micro_batch_size": micro}):
        assert result["accumulation"] == 4 // micro
        same_training(result, alone)


@pytest.mark.parametrize("family", [BERT, T5], ids=["bert", "t5"])
def test_bert_and_t5(family: dict[str, Any]) -> None:
    shared = BATCH | family
    expected = train_data_parallel(shared, False, 5)
    options = {"parallel.tensor_parallel_size": 2, "parallel.sequence_parallel": True, "parallel.data_sharding": "full"}
    for result in run_ranks(4, train_data_parallel, shared | options, False, 5):
        same_training(result, expected)


def test_T02_T17_all_fusions_and_compiled_layers(alone: dict[str, Any]) -> None:
    """gradient_accumulation_fusion too: in fp32 it adds into fully_shard's own copies."""
    options = {"parallel.data_sharding": "optimizer"}
    for result in run_ranks(2, train_data_parallel, BATCH | options, True):
        same_training(result, alone)
        assert result["counters"]["gradient_accumulation_fusion @ linear_fc2"]["fused"] > 0
    compiled = {"training.compile_layers": True, "parallel.data_sharding": "full"}
    for result in run_ranks(2, train_data_parallel, BATCH | compiled, ("residual_norm_fusion", "masked_softmax_fusion")):
        same_training(result, alone)


def test_what_each_sharding_holds(alone: dict[str, Any]) -> None:
    """Elements of parameters at rest on one rank, and so of each of AdamW's moments: all, or half."""
    for kind, share in (("none", 1.0), ("optimizer", 0.5), ("full", 0.5)):
        for result in run_ranks(2, train_data_parallel, BATCH | {"parallel.data_sharding": kind}, False, 1):
            assert result["held"] == pytest.approx(share * alone["held"], rel=0.02)
