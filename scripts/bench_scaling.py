"""Weak scaling of data parallel here: N processes with the work of one each, and what bounds it.

python scripts/bench_scaling.py CONFIG [section.key=value ...] [--processes 2] [--rounds 16]

A step of one process is held against N processes that train one model together (their global batch is N times as large), and
against N that know nothing of each other: what those lose is the machine's (cores that share arithmetic, memory bandwidth), the
rest is communication. All take turns, each process with its share of the cores; blank tokens, tensor parallel 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from configs.load import load_config
from configs.run import RunConfig
from configs.section import ConfigError
from fusions.machine import probe
from fusions.registry import FusionError
from models.fusion_sites import fusion_plan
from trainer.compare import CONFIDENCE, Budget, Estimate, Pair, take_turns
from trainer.compare.statistics import corrected, fewest_rounds
from trainer.errors import UserError
from trainer.flops import num_parameters
from trainer.log import Log
from trainer.meshes import Meshes, make_meshes
from trainer.planner.measure import Step
from trainer.runtime import keep_freed_memory

ALONE, BESIDE, TOGETHER = "alone", "beside", "together"
_UNTIMED = 3
PAIRS = [Pair(TOGETHER, ALONE), Pair(BESIDE, ALONE), Pair(TOGETHER, BESIDE)]


def main() -> int:
    """0: measured; 2: the configuration can't run so, and why."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=16)
    arguments = parser.parse_intermixed_args()
    number = arguments.processes
    few = fewest_rounds(corrected(CONFIDENCE, len(PAIRS)))
    alone = ["parallel.tensor_parallel_size=1", "parallel.sequence_parallel=false", "run.device=cpu"]
    try:
        if number < 2 or arguments.rounds < few:
            raise UserError(
                f"--processes {number} --rounds {arguments.rounds}: at least 2 processes, and {few} rounds for an interval"
            )
        one = load_config(arguments.config, [*arguments.overrides, *alone], 1).config
        size = f"training.global_batch_size={one.training.global_batch_size * number}"
        many = load_config(arguments.config, [*arguments.overrides, *alone, size], number).config
        fusion_plan(one, probe("cpu"))  # a required fusion that can't run is told here
    except (ConfigError, FusionError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    log = Log(rank=0)
    log.line(
        f"{num_parameters(one):,} parameters, micro-batch {one.training.micro_batch_size} x {one.num_microbatches()} a process, "
        f"{one.training.precision}, data_sharding {one.parallel.data_sharding}, {cores(number)} core(s) a process"
    )
    with tempfile.TemporaryDirectory() as folder:
        apart = [Worker(one, number) for _ in range(number)]
        joined = [Worker(many, number, folder, rank) for rank in range(number)]
        teams = {ALONE: apart[:1], BESIDE: apart, TOGETHER: joined}
        for team in (apart, joined):
            block(team, _UNTIMED)
        contestants = {name: partial(block, team, 1) for name, team in teams.items()}
        turns = take_turns(contestants, PAIRS, Budget(arguments.rounds))
        for worker in (*apart, *joined):
            worker.process.kill()
    show(log, [turns.estimate(pair) for pair in PAIRS], number)
    return 0


def show(log: Log, found: list[Estimate | None], number: int) -> None:
    """The efficiency and its two parts."""
    words = [
        f"weak scaling, 1 -> {number}: a step of one process over a step of {number} together",
        f"of it the machine: over {number} that know nothing of each other",
        "of it communication: those over the ones together",
    ]
    rows = [
        (text, f"{e.ratio:.3f}", f"{e.interval[0]:.3f} to {e.interval[1]:.3f}")
        for text, e in zip(words, found, strict=True)
        if e is not None
    ]
    title = "Parallel efficiency (medians of paired rounds, 99 % intervals for all together)"
    log.table(title, ("what", "ratio", "interval"), rows)


def cores(number: int) -> int:
    """Of each of so many processes."""
    return max(1, len(os.sched_getaffinity(0)) // number)


@dataclass
class Worker:
    """A process that runs steps when asked; with a folder, as a rank of a job."""

    config: RunConfig
    number: int
    folder: str = ""
    rank: int = 0

    def __post_init__(self) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, self.config, cores(self.number), self.folder, self.rank)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()


def block(team: list[Worker], steps: int) -> float:
    """Seconds a step of the team: until the last of it is done."""
    for worker in team:
        worker.pipe.send(steps)
    begin = time.perf_counter()
    for worker in team:
        worker.pipe.recv()
    return (time.perf_counter() - begin) / steps


def serve(pipe: Any, config: RunConfig, threads: int, folder: str, rank: int) -> None:
    """A worker's whole life."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    meshes = Meshes()
    if folder:
        n = config.parallel.processes
        store = dist.FileStore(f"{folder}/store", n)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=600))
        meshes = make_meshes(config.parallel, "cpu")
    step = Step(config, meshes)
    while True:
        for _ in range(pipe.recv()):
            step()
        pipe.send(None)


if __name__ == "__main__":
    raise SystemExit(main())
