"""Other layouts of the same job: tensor x data parallel x micro-batch x recompute, each walked, the fastest that fits first."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any

from configs.load import load_config
from configs.run import RunConfig
from configs.section import ConfigError
from fusions.machine import Machine
from trainer.planner.devices import Device
from trainer.planner.estimate import Estimate, estimate
from trainer.planner.walk import walk

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Layout:
    """One layout and what it needs."""

    tensor_parallel: int
    data_parallel: int
    micro_batch: int
    recompute: str
    peak: int  # bytes
    estimate: Estimate

    def overrides(self) -> list[str]:
        """What to write behind the configuration to get it."""
        return _overrides(self.tensor_parallel, self.micro_batch, self.recompute)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return vars(self) | {"estimate": vars(self.estimate) | {"step": self.estimate.step}, "overrides": self.overrides()}


def search(
    config: str, overrides: Sequence[str], world_size: int, machine: Machine, device: Device, progress: Callable[[str], None]
) -> list[Layout]:
    """The layouts that fit, fastest first. A tensor-parallel group stays within a node; sequence parallel wherever there is one.

    A larger micro-batch needs more memory, so a row of them is left at the first that doesn't fit.
    """
    sizes = [t for t in range(1, min(world_size, device.per_node) + 1) if world_size % t == 0]
    chains = [(t, mode) for t in sizes for mode in RECOMPUTE]
    one = partial(_chain, config, tuple(overrides), world_size, machine, device)
    found: list[Layout] = []
    workers = min(len(os.sched_getaffinity(0)), len(chains))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(one, *chain) for chain in chains]
        for number, future in enumerate(as_completed(futures), 1):
            found += future.result()
            progress(f"searched {number} of {len(chains)} combinations of tensor-parallel size and recompute")
    return sorted(found, key=lambda layout: layout.estimate.step)


def _chain(
    path: str, overrides: tuple[str, ...], world_size: int, machine: Machine, device: Device, tensor_parallel: int, mode: str
) -> list[Layout]:
    """The micro-batches of one tensor-parallel size and recompute mode, 1, 2, 4… as far as they fit."""
    found: list[Layout] = []
    micro, data_parallel = 1, world_size // tensor_parallel
    while True:
        config = _config(path, overrides, world_size, _overrides(tensor_parallel, micro, mode))
        if isinstance(config, RunConfig):
            walked = walk(config, machine)
            if walked.peak > device.memory_gib * 2**30:
                return found
            seconds = estimate(walked, config, device)
            found.append(Layout(tensor_parallel, data_parallel, micro, mode, walked.peak, seconds))
        elif micro * data_parallel >= config:
            return found
        micro *= 2


def _config(path: str, overrides: tuple[str, ...], world_size: int, layout: list[str]) -> RunConfig | int:
    """The configuration in that layout; where it is none, its global batch size."""
    try:
        return load_config(path, [*overrides, *layout], world_size).config
    except ConfigError:
        return load_config(path, list(overrides), None).config.training.global_batch_size


def _overrides(tensor_parallel: int, micro: int, mode: str) -> list[str]:
    sequence = str(tensor_parallel > 1).lower()
    return [
        f"parallel.tensor_parallel_size={tensor_parallel}",
        f"parallel.sequence_parallel={sequence}",
        "parallel.data_parallel_size=null",
        f"training.micro_batch_size={micro}",
        f"training.recompute={mode}",
    ]
