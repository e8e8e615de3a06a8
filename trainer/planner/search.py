"""Other layouts of the same job: tensor x data parallel x micro-batch x recompute, each walked, the fastest that fits first."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from configs.run import RunConfig
from fusions.machine import Machine
from fusions.registry import FusionError
from trainer.planner.devices import Device
from trainer.planner.estimate import Estimate, estimate
from trainer.planner.layers import walk_by_layers

RECOMPUTE = ("none", "selective", "full")  # each needs less memory and more time than the one before


@dataclass(frozen=True)
class Layout:
    """One layout and what it needs."""

    tensor_parallel: int
    data_parallel: int
    micro_batch: int
    recompute: str
    peak: int  # bytes
    estimate: Estimate
    overrides: tuple[str, ...]  # what to write behind the configuration to get it: what differs

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return vars(self) | {"estimate": self.estimate.as_dict()}


def search(config: RunConfig, machine: Machine, device: Device, progress: Callable[[str], None]) -> list[Layout]:
    """The layouts that fit, fastest first, on as many processes as the configuration has.

    A tensor-parallel group stays within a node, with sequence parallelism wherever there is one. A layout recomputes as little as
    fits: more would only take longer. Micro-batches are powers of two and the configured one, where they divide a rank's samples.
    """
    world_size = config.parallel.processes
    # The largest first: they have the most micro-batches to choose from.
    sizes = [
        t for t in range(min(world_size, device.per_node), 0, -1) if world_size % t == 0 and device.holds(t, world_size)
    ]
    found: list[Layout] = []
    workers = min(len(os.sched_getaffinity(0)), len(sizes))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(layouts_of_size, config, machine, device, size) for size in sizes]
        for number, future in enumerate(as_completed(futures), 1):
            found += future.result()
            progress(f"searched {number} of {len(sizes)} tensor-parallel sizes")
    return sorted(found, key=lambda layout: layout.estimate.step)


def layouts_of_size(config: RunConfig, machine: Machine, device: Device, tensor_parallel: int) -> list[Layout]:
    """The layouts of one tensor-parallel size that fit the device."""
    found: list[Layout] = []
    data_parallel = config.parallel.processes // tensor_parallel
    modes = list(RECOMPUTE)
    for micro in _micro_batches(config, data_parallel):
        while modes:
            layout = _planned(config, machine, device, (tensor_parallel, data_parallel, micro, modes[0]))
            if layout is None:
                break
            if layout.peak <= device.memory_gib * 2**30:
                found.append(layout)
                break
            modes.pop(0)  # what doesn't fit here doesn't with a larger micro-batch
    return found


def _micro_batches(config: RunConfig, data_parallel: int) -> Iterator[int]:
    of_one_rank = config.training.global_batch_size // data_parallel
    for micro in range(1, of_one_rank + 1):
        wanted = micro & (micro - 1) == 0 or micro == config.training.micro_batch_size
        if wanted and of_one_rank % micro == 0:
            yield micro


def _planned(config: RunConfig, machine: Machine, device: Device, sizes: tuple[int, int, int, str]) -> Layout | None:
    """The layout of those sizes; None where the job can't be laid out so, or a required fusion can't run there."""
    tensor_parallel, data_parallel, micro, mode = sizes
    parallel = {
        "tensor_parallel_size": tensor_parallel,
        "data_parallel_size": data_parallel,
        "sequence_parallel": tensor_parallel > 1,
    }
    training = {"micro_batch_size": micro, "recompute": mode, "recompute_num_layers": None, "compile_layers": False}
    changes = {"parallel": parallel, "training": training}
    overrides = [
        f"{section}.{key}={json.dumps(value).strip(chr(34))}"
        for section, values in changes.items()
        for key, value in values.items()
        if getattr(getattr(config, section), key) != value
    ]
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    config = config.model_copy(update=sections)
    if config.problems(world_size=tensor_parallel * data_parallel):
        return None
    try:
        walked = walk_by_layers(config, machine)
    except FusionError:
        return None
    return Layout(*sizes, walked.peak, estimate(walked, config, device), tuple(overrides))
