"""What a step sends is what the scheme needs, to the byte: the formulas are Megatron's and fully_shard's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.distributed import run_ranks
from tests.models.build import build, optimizer_of, run_config, samples_of
from trainer.communication import CommunicationCounter
from trainer.data.families import make_batch
from trainer.loop import train_step
from trainer.meshes import make_meshes


def traffic(overrides: dict[str, Any], fused: Any = False) -> dict[str, Any]:
    """{kind: (calls, bytes)} of the second step, and the sizes the formulas need."""
    config = run_config(overrides, fused).for_processes(dist.get_world_size())
    meshes = make_meshes(config.parallel, "cpu")
    model, counters = build(config, meshes=meshes)
    optimizer = optimizer_of(config, model, counters)
    micro, size = config.training.micro_batch_size, config.training.global_batch_size
    generator, counter = torch.Generator().manual_seed(0), CommunicationCounter(meshes)
    for iteration in (1, 2):
        samples = samples_of(config, size, generator)
        starts = range(meshes.data_rank * micro, size, micro * meshes.data_size)
        batches = [make_batch(samples[i : i + micro], list(range(i, i + micro)), config) for i in starts]
        if iteration == 1:
            train_step(model, optimizer, batches, config, iteration)
        else:
            with counter:
                train_step(model, optimizer, batches, config, iteration)
    names = {id(p): n for n, p in zip(optimizer.names.values(), optimizer.parameters, strict=True)}
    elements = {names[id(p)]: p.numel() // (meshes.tp.size if _split_by_tp(p) else 1) for p in optimizer.parameters}
    by_kind: dict[str, tuple[int, int]] = {}
    for collective, sent in counter.found.items():
        calls, size = by_kind.get(collective.kind, (0, 0))
        by_kind[collective.kind] = calls + sent.calls, size + sent.bytes
    return {
        "found": by_kind,
        "by_group": [(c.kind, c.group) for c in counter.found],
        "layers": sum(n for name, n in elements.items() if ".layers." in name),
        "rest": sum(n for name, n in elements.items() if ".layers." not in name),
        "partial": sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in optimizer.partial),
        "micro_batches": len(batches),
    }


def _split_by_tp(parameter: Any) -> bool:
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and mesh.mesh_dim_names[-1] == "tp" and not parameter.placements[-1].is_replicate()


LAYERS, S, H, B, T = 3, 32, 64, 2, 2
BATCH = {"training.micro_batch_size": B, "training.global_batch_size": 8}


def test_tensor_parallel_with_sequence_parallel() -> None:
    """A layer: 2 gathers and 2 reduce-scatters forward; in the backward the mirror of the 2 reduce-scatters, 2 gathers of inputs
    anew, and the mirror of the 2 gathers. Embedding: one reduce-scatter and its mirror. Output layer: one gather, one anew, one
    reduce-scatter. The loss (reference): three all-reduces of a number per token. Once a step: partial gradients; the norm with
    the loss; the count."""
    shared = BATCH | {"parallel.tensor_parallel_size": T, "parallel.sequence_parallel": True}
    for result in run_ranks(2, traffic, shared):
        n, whole = result["micro_batches"], S * B * H * 4
        assert result["found"] == {
            "all-gather": (n * (6 * LAYERS + 3), n * (6 * LAYERS + 3) * whole),
            "reduce-scatter": (n * (4 * LAYERS + 2), n * (4 * LAYERS + 2) * whole),
            "all-reduce": (n * 3 + 3, n * 3 * S * B * 4 + result["partial"] * 4 + 4 + 8),
        }


def test_tensor_parallel_without_sequence_parallel_and_a_fused_loss() -> None:
    """A layer: 2 all-reduces each way. Embedding: one forward; output layer: one backward. The loss, fused: a maximum, and one
    packed sum of exponentials and target logits. Once a step: the norm with the loss; the count."""
    shared = BATCH | {"parallel.tensor_parallel_size": T}
    for result in run_ranks(2, traffic, shared, ("cross_entropy_loss_fusion",)):
        n, whole = result["micro_batches"], S * B * H * 4
        calls, moved = n * (4 * LAYERS + 2 + 2) + 2, n * (4 * LAYERS + 2) * whole + n * 3 * S * B * 4 + 4 + 8
        assert result["found"] == {"all-reduce": (calls, moved)}


@pytest.mark.parametrize("sharding", ["none", "optimizer", "full"])
def test_data_parallel(sharding: str) -> None:
    """none: one all-reduce of the gradients. optimizer: one gather of the parameters and one reduce-scatter of the gradients.
    full: layers are gathered twice each micro-batch, since they are given back after their forward. Gradients are summed once a
    step, however many micro-batches there are."""
    for result in run_ranks(2, traffic, BATCH | {"parallel.data_sharding": sharding}):
        layers, rest, n = 4 * result["layers"], 4 * result["rest"], result["micro_batches"]
        assert n == 2
        groups, small = LAYERS + 1, (2, 4 + 8)
        if sharding == "none":
            assert result["found"] == {"all-reduce": (groups + 2, layers + rest + 12)}
            continue
        gathers = (groups, layers + rest) if sharding == "optimizer" else (n * 2 * LAYERS + n, n * 2 * layers + n * rest)
        expected = {"all-gather": gathers, "reduce-scatter": (groups, layers + rest), "all-reduce": small}
        assert result["found"] == expected


def test_the_table_names_the_groups() -> None:
    shared = BATCH | {"parallel.tensor_parallel_size": T, "parallel.data_sharding": "full"}
    for result in run_ranks(4, traffic, shared):
        assert set(result["by_group"]) == {("all-reduce", "all"), ("all-reduce", "tensor parallel"), ("all-gather", "shards"),
                                           ("reduce-scatter", "shards")}  # fmt: skip
