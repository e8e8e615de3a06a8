"""The planned step for real, on this machine's CPU and on blank tokens: what a plan can be held against."""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.flop_counter import FlopCounterMode

from configs.run import RunConfig
from fusions import jit
from fusions.machine import probe
from models.fusion_sites import fusion_plan
from trainer.communication import CommunicationCounter
from trainer.loop import train_step
from trainer.loss_scale import loss_scaler
from trainer.meshes import Meshes, make_meshes
from trainer.optimizer import Optimizer
from trainer.planner.live import LiveTensors
from trainer.planner.walk import MarkedBatch, blank_micro_batch, known_gradients, known_tensors
from trainer.runtime import keep_freed_memory, peak_memory_gib
from trainer.setup import build_model

_TIMED_STEPS = 5
_CPU = torch.device("cpu")


def measure(config: RunConfig) -> dict[str, Any]:
    """One step of the configuration on as many local processes as it has, of rank 0.

    memory: bytes at the peak by kind; resident_gib: of the process; collectives; flops, by PyTorch's counter; seconds: median.
    """
    processes = config.parallel.processes
    with tempfile.TemporaryDirectory() as folder:
        threads = max(1, len(os.sched_getaffinity(0)) // processes)
        mp.spawn(_rank, (processes, folder, config, threads), nprocs=processes)
        return torch.load(Path(folder, "result"), weights_only=True)


def _rank(rank: int, processes: int, folder: str, config: RunConfig, threads: int) -> None:
    torch.set_num_threads(threads)
    keep_freed_memory()
    meshes = Meshes()
    if processes > 1:
        store = dist.FileStore(f"{folder}/store", processes)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=timedelta(seconds=600))
        meshes = make_meshes(config.parallel, "cpu")
    found = measured_step(config, meshes)
    if rank == 0:
        torch.save(found, Path(folder, "result"))
    if processes > 1:
        dist.barrier()
        dist.destroy_process_group()


class Step:
    """A step on this process's CPU, on blank tokens, that can be called again and again."""

    def __init__(self, config: RunConfig, meshes: Meshes):
        self.config, plan = config, fusion_plan(config, probe("cpu"))
        self.model, counters = build_model(config, plan, meshes, _CPU)
        self.optimizer = Optimizer(self.model, config.optimizer, plan, counters, loss_scaler(config.training, _CPU))
        self.before_micro_batch: Callable[[], None] = lambda: None
        batch = blank_micro_batch(config)
        marked = MarkedBatch(batch.samples, batch, batch.counts(), lambda: self.before_micro_batch())
        self._batches, self._numbers = [marked] * config.num_microbatches(), itertools.count(1)

    def __call__(self) -> None:
        """The next step."""
        train_step(self.model, self.optimizer, self._batches, self.config, next(self._numbers))


def measured_step(config: RunConfig, meshes: Meshes) -> dict[str, Any]:
    """The figures of `measure`, of this rank; every rank of the job must call it."""
    step = Step(config, meshes)
    step()  # what is compiled is compiled here
    times = []
    for _ in range(_TIMED_STEPS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    live, traffic = LiveTensors(), CommunicationCounter(meshes)
    step.optimizer.zero_grad()
    known_tensors(live, step.optimizer)
    step.before_micro_batch = lambda: known_gradients(live, step.optimizer, step.model)

    def seen(plain: Any, compiled: Any, args: Any, kwargs: Any) -> Any:
        result = compiled(*args, **kwargs)
        live.see(result)
        return result

    with live, traffic, jit.watch_calls(seen):
        step()
    known_gradients(live, step.optimizer, step.model)
    step.before_micro_batch = lambda: None
    resident = peak_memory_gib(_CPU)
    # PyTorch's counter and the compiler don't go together.
    with jit.watch_calls(jit.run_plain), FlopCounterMode(display=False) as flops:
        step()
    return {
        "memory": live.at_peak(),
        "resident_gib": resident,
        "collectives": traffic.as_dict(),
        "flops": flops.get_total_flops(),
        "seconds": statistics.median(times),
    }
