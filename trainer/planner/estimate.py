"""The seconds of a walked step on a device: compute, memory and communication apart.

    matrix product     the longer of FLOPs / rate and bytes / bandwidth
    anything else      bytes / bandwidth
    collective         ring: (n - 1)/n of the whole tensor's bytes through each rank's link, twice for an all-reduce
                       (Thakur et al. 2005; what nccl-tests call bus bandwidth). Latency is not in it.

All rates are peaks unless measured, so a real step takes longer; the parts are good for seeing what bounds a layout, and for
comparing layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from configs.run import RunConfig
from trainer.planner.devices import Device
from trainer.planner.walk import Walk

_DATA_GROUPS = ("shards", "copies")


@dataclass(frozen=True)
class Estimate:
    """Seconds of one step of one rank."""

    compute: float  # matrix products that are bound by arithmetic
    memory: float  # everything bound by memory
    tensor_parallel: float  # communication that products wait for
    data_parallel: float  # communication that can hide behind compute and memory

    @property
    def exposed(self) -> float:
        """Data-parallel communication that nothing is left to hide."""
        return max(0.0, self.data_parallel - self.compute - self.memory)

    @property
    def step(self) -> float:
        """The whole: nothing of the tensor-parallel communication hidden, as much as possible of the data-parallel."""
        return self.compute + self.memory + self.tensor_parallel + self.exposed

    def as_dict(self) -> dict[str, float]:
        """Plain data, the whole among it."""
        return vars(self) | {"exposed": self.exposed, "step": self.step}


def estimate(walk: Walk, config: RunConfig, device: Device) -> Estimate:
    """The step on the device."""
    rate, bandwidth = device.gemm_rate(config.training.precision), 1e9 * device.memory_gbs
    compute = memory = 0.0
    for (flops, moved), calls in walk.operations.items():
        arithmetic, traffic = flops / rate, moved / bandwidth
        compute += calls * arithmetic if arithmetic >= traffic else 0.0
        memory += calls * traffic if arithmetic < traffic else 0.0
    times = {c["group"]: 0.0 for c in walk.collectives}
    for collective in walk.collectives:
        times[collective["group"]] += seconds_of(collective, config, device)
    data = sum(t for group, t in times.items() if group in _DATA_GROUPS)
    return Estimate(compute, memory, sum(times.values()) - data, data)


def seconds_of(collective: dict[str, Any], config: RunConfig, device: Device) -> float:
    """All calls of a collective."""
    n, times = collective["ranks"], 2 if collective["kind"] == "all-reduce" else 1
    return times * (n - 1) / n * collective["bytes"] / (1e9 * _link(collective["group"], n, config, device))


def _link(group: str, ranks: int, config: RunConfig, device: Device) -> float:
    """10^9 bytes/s of each rank. A ring over nodes leaves a node once, by the adapters of all its members there."""
    t = config.parallel.tensor_parallel_size
    stride = {"shards": t, "copies": t * config.parallel.shard_size}.get(group, 1)
    if device.holds(stride * ranks, config.parallel.processes):
        return device.link_gbs
    return min(device.link_gbs, max(1, device.per_node // stride) * device.network_gbs)
