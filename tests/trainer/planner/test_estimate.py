"""Device rates, the estimate's formulas, and the search: what fits, with as little recompute as does."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import yaml

from fusions.machine import probe
from tests.models.build import run_config
from trainer.errors import UserError
from trainer.planner.devices import DEVICES, RATES, Device, find_device
from trainer.planner.estimate import Estimate, estimate, seconds_of
from trainer.planner.layers import walk_by_layers
from trainer.planner.search import layouts_of_size, search
from trainer.planner.walk import Walk, walk

# 1 TFLOP/s, 100 GB/s, links of 10 GB/s within 4 devices and 1 GB/s each beyond.
ROUND = Device("round", 1, 0.5, 100, 1, 10, 1, 4, "made up")


def made_up(operations: dict[tuple[int, int], int], collectives: tuple[tuple[str, str, int, int], ...] = ()) -> Walk:
    found = [{"kind": k, "group": g, "ranks": n, "calls": 1, "bytes": b} for k, g, n, b in collectives]
    return Walk(({"activations": 1},), found, operations, 1)


def test_a_product_takes_the_longer_of_arithmetic_and_traffic() -> None:
    config = run_config({})
    found = estimate(made_up({(10**12, 10**9): 3, (10**6, 10**9): 2, (0, 10**10): 1}), config, ROUND)
    assert found.compute == pytest.approx(3 * 10**12 / 0.5e12)  # fp32
    assert found.memory == pytest.approx(2 * 0.01 + 0.1)
    assert found.step == pytest.approx(6.12)
    half = estimate(made_up({(10**12, 10**9): 3}), run_config({"training.precision": "bf16"}), ROUND)
    assert half.compute == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("tensor", "kind", "group", "ranks", "seconds"),
    [
        (2, "all-gather", "tensor parallel", 2, 1 / 2 / 10),  # within a node
        (2, "all-reduce", "tensor parallel", 2, 2 * 1 / 2 / 10),
        (1, "reduce-scatter", "shards", 4, 3 / 4 / 10),
        (1, "reduce-scatter", "shards", 64, 63 / 64 / 4),  # a node's four adapters share its traffic
        (2, "all-gather", "shards", 64, 63 / 64 / 2),  # two rings leave each node
        (4, "all-gather", "shards", 16, 15 / 16 / 1),
        (8, "all-gather", "tensor parallel", 8, 7 / 8 / 4),
    ],
)
def test_a_ring_is_bound_by_its_slowest_link(tensor: int, kind: str, group: str, ranks: int, seconds: float) -> None:
    config = run_config(
        {"parallel.tensor_parallel_size": tensor, "transformer.num_query_groups": 8, "training.global_batch_size": 1024}
    )
    config = config.for_processes(ranks * (tensor if group == "shards" else 1))
    sent = {"kind": kind, "group": group, "ranks": ranks, "calls": 3, "bytes": 10**9}
    assert seconds_of(sent, config, ROUND) == pytest.approx(seconds)


def test_data_parallel_traffic_hides_behind_the_rest_and_tensor_parallel_does_not() -> None:
    assert Estimate(compute=2.0, memory=1.0, tensor_parallel=0.5, data_parallel=2.5).step == 3.5
    assert Estimate(compute=2.0, memory=1.0, tensor_parallel=0.5, data_parallel=4.0).step == 4.5
    split = estimate(
        made_up({}, (("all-gather", "shards", 2, 10**9), ("all-reduce", "tensor parallel", 2, 10**9))), run_config({}), ROUND
    )
    assert (split.data_parallel, split.tensor_parallel) == pytest.approx((0.05, 0.1))


def test_rates_can_be_given() -> None:
    device = find_device("h100-sxm", ["half_tflops=700", "per_node=16"])
    assert (device.half_tflops, device.per_node, device.memory_gbs) == (700, 16, DEVICES["h100-sxm"].memory_gbs)
    assert "half_tflops=700 as given" in device.source


@pytest.mark.parametrize("override", ["speed=3", "half_tflops=fast", "half_tflops=0", "half_tflops=-1", "half_tflops", "name=3", "half_tflops=nan", "link_gbs=inf", "per_node=0.5", "per_node=2.5"])  # fmt: skip
def test_a_rate_that_is_none_is_refused(override: str) -> None:
    with pytest.raises(UserError) as error:
        find_device("h100-sxm", [override])
    assert f"--rate {override}" in str(error.value) and RATES[0] in str(error.value)


def test_this_machine_is_measured() -> None:
    cpu = find_device("cpu", [])
    assert 1e-3 < cpu.fp32_tflops < 100 and 0.1 < cpu.memory_gbs < 2000 and cpu.memory_gib > 1


JOB = {
    "training.micro_batch_size": 3,
    "training.global_batch_size": 24,
    "transformer.num_query_groups": 4,
    "model.make_vocab_size_divisible_by": 8,
}


def test_the_search_recomputes_as_little_as_fits() -> None:
    config, cpu = run_config(JOB), probe("cpu")

    @functools.cache
    def peak(micro: int, mode: str) -> int:
        changes = {"micro_batch_size": micro, "recompute": mode}
        return walk_by_layers(config.model_copy(update={"training": config.training.model_copy(update=changes)}), cpu).peak

    # 1, 2 and 3 samples fit as they are; 4 with selective recompute, 8 with full.
    fits = max(peak(3, "none"), peak(4, "selective"), peak(8, "full"))
    assert fits < min(peak(4, "none"), peak(8, "selective"))
    device = dataclasses.replace(DEVICES["h100-sxm"], memory_gib=fits / 2**30)
    found = layouts_of_size(config, cpu, device, 1)
    assert [(layout.micro_batch, layout.recompute) for layout in found] == [
        (1, "none"), (2, "none"), (3, "none"), (4, "selective"), (8, "full")
    ]  # fmt: skip
    assert [layout.peak for layout in found] == [peak(m.micro_batch, m.recompute) for m in found]


def test_the_search_ranks_every_size_that_divides() -> None:
    config = run_config(JOB | {"training.micro_batch_size": 2}).for_processes(8)
    said: list[str] = []
    found = search(config, probe("cpu"), DEVICES["h100-sxm"], said.append)
    assert len(said) == 4
    # 8 does not divide the 4 groups of keys and values; a rank has 24 / data parallel samples.
    sizes = {(x.tensor_parallel, x.data_parallel, x.micro_batch) for x in found}
    assert sizes == {(1, 8, 1), (2, 4, 1), (2, 4, 2), (4, 2, 1), (4, 2, 2), (4, 2, 4)}
    assert [x.estimate.step for x in found] == sorted(x.estimate.step for x in found)
    assert all("parallel.sequence_parallel=true" in x.overrides for x in found if x.tensor_parallel > 1)


def test_overrides_say_what_differs_and_lead_to_the_layout() -> None:
    config = run_config(
        JOB | {"training.compile_layers": True, "parallel.data_parallel_size": 2, "training.micro_batch_size": 2}
    )
    found = layouts_of_size(config, probe("cpu"), DEVICES["h100-sxm"], 2)
    assert found[-1].overrides == (
        "parallel.tensor_parallel_size=2", "parallel.data_parallel_size=1", "parallel.sequence_parallel=true",
        "training.micro_batch_size=8", "training.compile_layers=false",
    )  # fmt: skip
    again = run_config(JOB | {key: yaml.safe_load(v) for key, v in (o.split("=") for o in found[-1].overrides)})
    assert walk(again, probe("cpu")).peak == found[-1].peak


def test_a_micro_batch_that_is_no_power_of_two_is_not_left_out() -> None:
    config = run_config(JOB | {"training.micro_batch_size": 5, "training.global_batch_size": 10})
    found = layouts_of_size(config, probe("cpu"), DEVICES["h100-sxm"], 1)
    assert [layout.micro_batch for layout in found] == [1, 2, 5]


@pytest.mark.parametrize(
    ("ranks", "world", "within"), [(2, 24, True), (3, 24, False), (4, 24, True), (3, 3, True), (8, 24, False)]
)
def test_a_group_is_within_a_node_where_its_size_divides_one(ranks: int, world: int, within: bool) -> None:
    assert ROUND.holds(ranks, world) == within
