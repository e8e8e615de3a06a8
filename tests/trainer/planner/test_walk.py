"""A planned step against the same step for real: memory, collectives and FLOPs, on 1, 2 and 4 processes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from configs.run import RunConfig
from fusions.machine import probe
from models.fusion_sites import fusion_plan
from tests.distributed import run_ranks
from tests.models.build import BERT, T5, build, optimizer_of, run_config, samples_of
from trainer.data.families import make_batch
from trainer.flops import memory_estimate_gib, num_parameters
from trainer.loop import train_step
from trainer.meshes import Meshes, make_meshes
from trainer.planner import walk as walk_module
from trainer.planner.devices import DEVICES
from trainer.planner.estimate import estimate
from trainer.planner.layers import walk_by_layers
from trainer.planner.live import ACTIVATIONS, COPIES, GRADIENTS, OPTIMIZER_STATE, PARAMETERS
from trainer.planner.measure import measured_step
from trainer.planner.walk import walk, walkable

CPU = probe("cpu")
BATCH = {"training.micro_batch_size": 2, "training.global_batch_size": 16}
SDPA = {"transformer.attention_dropout": 0.0, "transformer.attention_backend": "sdpa"}
TP = {"parallel.tensor_parallel_size": 2, "parallel.sequence_parallel": True}
FULL = {"parallel.data_sharding": "full"}
RECOMPUTE = {"training.recompute": "full"}


def configured(overrides: dict[str, Any], processes: int = 1, fused: Any = False) -> RunConfig:
    config = run_config(BATCH | overrides, fused).for_processes(processes)
    assert config.problems(processes) == []
    return config


def really(configs: list[RunConfig]) -> list[dict[str, Any]]:
    """Measured on the ranks there are."""
    alone = not dist.is_initialized()
    return [measured_step(c, Meshes() if alone else make_meshes(c.parallel, "cpu")) for c in configs]


def check(config: RunConfig, real: dict[str, Any]) -> None:
    planned = walk(config, CPU)
    assert planned.collectives == real["collectives"]
    assert planned.flops == real["flops"]
    assert planned.peak == pytest.approx(sum(real["memory"].values()), rel=0.1)
    for kind in (PARAMETERS, OPTIMIZER_STATE):
        assert planned.memory[kind] == real["memory"][kind], kind


ALONE: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({}, True),
    ({"training.micro_batch_size": 16}, False),
    ({"training.recompute": "selective"}, False),
    (RECOMPUTE, False),
    (RECOMPUTE | {"training.recompute_num_layers": 1}, False),
    (SDPA | {"training.precision": "bf16"}, False),
]


@pytest.mark.parametrize(("overrides", "fused"), ALONE, ids=str)
def test_a_planned_step_is_the_real_one(overrides: dict[str, Any], fused: bool) -> None:
    config = configured(overrides, fused=fused)
    check(config, really([config])[0])


TOGETHER: dict[int, list[dict[str, Any]]] = {
    2: [FULL, {"parallel.data_sharding": "optimizer", "training.precision": "bf16"}, RECOMPUTE, BERT | TP, T5 | TP],
    4: [TP | FULL, FULL | {"parallel.data_shard_size": 2, "training.recompute": "selective"}],
}


@pytest.mark.parametrize("ranks", TOGETHER)
def test_a_planned_step_is_the_real_one_of_several_processes(ranks: int) -> None:
    configs = [configured(overrides, ranks) for overrides in TOGETHER[ranks]]
    for config, real in zip(configs, run_ranks(ranks, really, configs)[0], strict=True):
        check(config, real)


@pytest.mark.parametrize("overrides", [{}, FULL], ids=str)
def test_micro_batches_between_the_first_and_the_last_are_alike(
    overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(overrides, processes=2)
    assert config.num_microbatches() == 4
    short = walk(config, CPU)
    monkeypatch.setattr(walk_module, "_WALKED", 4)
    assert walk(config, CPU) == short


@pytest.mark.parametrize(
    ("processes", "overrides"),
    [
        (1, {"training.micro_batch_size": 16}),  # the peak is where the gradients are complete
        (1, RECOMPUTE | {"training.global_batch_size": 4}),
        (64, FULL | RECOMPUTE | TP | {"training.global_batch_size": 128}),
        (1, T5 | {"transformer.num_layers": 6, "training.global_batch_size": 4}),
    ],
    ids=str,
)
def test_layers_are_alike(processes: int, overrides: dict[str, Any]) -> None:
    config = configured({"transformer.num_layers": 7} | overrides, processes)
    whole, few = walk(config, CPU), walk_by_layers(config, CPU)
    assert few.memory == whole.memory
    assert few.collectives == whole.collectives
    assert few.flops == whole.flops
    device = DEVICES["a100-80g"]
    assert estimate(few, config, device).step == pytest.approx(estimate(whole, config, device).step, rel=1e-9)


def test_recompute_trades_activations_for_flops() -> None:
    walks = {mode: walk(configured({"training.recompute": mode}), CPU) for mode in ("none", "selective", "full")}
    activations = [walks[mode].memory[ACTIVATIONS] for mode in walks]
    assert activations == sorted(activations, reverse=True) and len(set(activations)) == 3
    assert walks["none"].flops < walks["selective"].flops < walks["full"].flops


def test_4096_processes_share_what_one_would_hold() -> None:
    config = configured(FULL | TP | {"training.global_batch_size": 4096}, processes=4096)
    found, parameters = walk(config, CPU), num_parameters(config)
    held = found.memory[PARAMETERS]
    # Each of 2048 ranks has its rows of each split parameter, at least one, and one filler where the rows are fewer.
    assert parameters * 4 / 4096 < held < parameters * 4 / 20
    assert found.memory[OPTIMIZER_STATE] == pytest.approx(2 * held, rel=0.05)
    assert {c["ranks"] for c in found.collectives} >= {2, 2048}
    assert not dist.is_initialized()


def test_a_fusion_keeps_in_the_plan_what_it_keeps_in_a_job() -> None:
    fused = configured({}, fused=True)
    plan = walkable(fusion_plan(fused, dataclasses.replace(CPU, device="cuda", compile_problem="")))
    assert {d.runs for d in plan.decisions} <= {"reference", "compile", "addmm", "torch"}
    assert walk(fused, CPU).memory[ACTIVATIONS] < walk(configured({}), CPU).memory[ACTIVATIONS]


def test_a_walk_leaves_nothing_behind_that_a_real_step_would_meet() -> None:
    config = configured({}, fused=("masked_softmax_fusion", "bias_dropout_fusion"))

    def losses() -> list[float]:
        model, counters = build(config)
        optimizer = optimizer_of(config, model, counters)
        samples = samples_of(config, 2, torch.Generator().manual_seed(0))
        batch = make_batch(samples, [0, 1], config)
        return [train_step(model, optimizer, [batch], config, i).loss.item() for i in (1, 2)]

    before = losses()
    walk(config, CPU)
    assert losses() == before


@pytest.mark.parametrize("sharding", ["none", "optimizer", "full"])
def test_gradients_between_micro_batches_are_gradients(sharding: str) -> None:
    """fully_shard keeps them whole until the last micro-batch; none of that is an activation."""
    sizes = {"parallel.data_sharding": sharding, "training.micro_batch_size": 2}
    one, two = (walk(configured(sizes | {"training.global_batch_size": 16 * n}, 8), CPU).memory for n in (1, 2))
    assert two[GRADIENTS] == pytest.approx(4 * num_parameters(configured({})), rel=0.05)
    assert two[ACTIVATIONS] < 1.05 * one[ACTIVATIONS]


def test_copies_are_those_of_the_layers_at_work() -> None:
    """ZeRO-3 gathers a layer before it is needed and gives it back; ZeRO-2 keeps all of them till the backward."""
    kinds = ("full", "optimizer", "none")
    found = {kind: walk(configured({"parallel.data_sharding": kind}, processes=2), CPU).memory for kind in kinds}
    assert found["full"][COPIES] < found["optimizer"][COPIES] == found["none"][COPIES]
    assert found["full"][PARAMETERS] == found["optimizer"][PARAMETERS] < found["none"][PARAMETERS]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_the_formula_of_explain_is_near_the_walk(mode: str) -> None:
    config = configured({"training.recompute": mode})
    formula = memory_estimate_gib(config)["activations (estimate)"] * 2**30
    assert formula == pytest.approx(walk(config, CPU).memory[ACTIVATIONS], rel=0.35)
