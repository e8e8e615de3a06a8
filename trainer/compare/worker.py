"""One process of a group, started by torchrun:  python -m trainer.compare.worker PLAN.json ARM FOLDER

Builds the arms it is asked for and does with them what the conductor says: rank 0 listens, the other ranks follow. Arms of one
group whose parameters have the same names and shapes share them, and the optimizer's state: an arm is a set of kernels, and as
many fit as one model does. Losses are always taken from the initial weights.

ARM is any arm of the group (device and parallel sizes are the same for all); FOLDER holds the socket, and the last words of a
rank that has to end.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import statistics
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fusions.registry import REFERENCE
from models.init import initialise
from trainer.auto import broadcast
from trainer.compare.memory import memory_of_steps
from trainer.compare.plan import ComparisonPlan
from trainer.compare.profile import profile_steps
from trainer.compare.roofline import roofline
from trainer.data.families import training_set
from trainer.data.sampler import training_batches
from trainer.data.sources import TrainingSet
from trainer.flops import tokens_per_iteration
from trainer.launch import LOST_PEER
from trainer.log import Log
from trainer.loop import train_step
from trainer.meshes import stop_processes
from trainer.metrics import StepResult
from trainer.runtime import gpu_state, synchronise
from trainer.setup import Job, build_job, describe_environment, start

_SETTLED, _MOST_UNTIMED = 1.1, 3  # a step at most so much above the usual; untimed steps before a block


@dataclass
class ArmRun:
    """A built arm."""

    job: Job
    dataset: TrainingSet
    iteration: int = 0
    usual: list[float] = field(default_factory=list)  # seconds of the last timed steps

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return tokens_per_iteration(self.job.config)

    def step(self, batches: list[Any] | None = None) -> StepResult:
        """One training step on the batches that come next."""
        self.iteration += 1
        batches = self._batches(self.iteration) if batches is None else batches
        return train_step(self.job.model, self.job.optimizer, batches, self.job.config, self.iteration)

    def timed(self, count: int) -> float:
        """Seconds of `count` steps, between two points where all ranks and the device are done."""
        batches = [self._batches(self.iteration + i + 1) for i in range(count)]
        self._meet()
        begin = time.perf_counter()
        for batch in batches:
            self.step(batch)
        self._meet()
        return time.perf_counter() - begin

    def _batches(self, iteration: int) -> list[Any]:
        return training_batches(self.dataset, self.job.config, iteration, self.job.meshes.data_rank)

    def _meet(self) -> None:
        synchronise(self.job.device)
        if dist.is_initialized():
            dist.barrier()

    def restart(self) -> None:
        """Initial weights, no optimizer state, counters at zero, iteration 0."""
        initialise(self.job.model, self.job.config.training.seed)
        self.job.optimizer.restart()
        for counts in self.job.counters.sites.values():
            counts.fused = counts.reference = 0
            counts.fallbacks.clear()
        self.iteration = 0


class Worker:
    """The requests, by name; each is called on all ranks alike, and rank 0's answer goes to the conductor."""

    def __init__(self, plan: ComparisonPlan, arm: str):
        self.plan, self.log = plan, Log(rank=1)
        self.arms: dict[str, ArmRun] = {}
        self.datasets: dict[str, TrainingSet] = {}
        self.device, self.meshes = start(plan.load(plan.arm(arm)), self.log)

        # Its wait for the next request has no end: while others have their turn, it may take longer than any collective.
        self.control: Any = dist.new_group(backend="gloo", timeout=timedelta(days=30)) if dist.is_initialized() else None

    def hear(self, line: str) -> str:
        """Rank 0's request on every rank."""
        holder = [line]
        if self.control is not None:
            dist.broadcast_object_list(holder, src=0, group=self.control)
        return holder[0]

    def answer(self, do: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """What `do` returns, once it has on every rank: one still in a collective of the job's would, stopped with its group,
        wake up to find that collective's time over."""
        handler: Callable[..., dict[str, Any]] = getattr(self, do)
        answer = handler(**arguments)
        if self.control is not None:
            dist.barrier(group=self.control)
        return answer

    def arm(self, name: str) -> ArmRun:
        """The arm, built when it is first needed."""
        if name not in self.arms:
            loaded = self.plan.load(self.plan.arm(name))
            job = build_job(loaded, self.device, self.meshes, self.log)
            self._share(job)
            self.arms[name] = ArmRun(job, self._dataset(job))
        return self.arms[name]

    def _share(self, job: Job) -> None:
        """Give an arm the parameters and optimizer state of the first one that has the same; not those that fully_shard keeps."""
        if self.meshes.data is not None:
            return
        mine = dict(job.model.named_parameters())
        for other in self.arms.values():
            theirs = dict(other.job.model.named_parameters())
            if {n: p.shape for n, p in mine.items()} == {n: p.shape for n, p in theirs.items()}:
                shared = {id(p): theirs[name] for name, p in mine.items()}
                for module in job.model.modules():
                    for name, parameter in module._parameters.items():
                        if parameter is not None:
                            module._parameters[name] = shared[id(parameter)]
                job.optimizer.adopt(other.job.optimizer)
                return

    def _dataset(self, job: Job) -> TrainingSet:
        config = job.config
        key = json.dumps([config.data.model_dump(), config.model.model_dump(), config.training.seed])
        if key not in self.datasets:
            self.datasets[key] = training_set(config, f"{self.plan.out}/cache")
        return self.datasets[key]

    def losses(self, arm: str, iterations: int, noise: int | None) -> dict[str, Any]:
        """Loss and gradient norm of the first iterations, from the initial weights (disturbed by rounding with `noise`)."""
        if noise is None:
            torch._dynamo.reset()  # so that each arm pays for what it compiles
            torch._dynamo.utils.counters.clear()
        run = self.arm(arm)
        run.restart()
        if noise is not None:
            perturb(run.job.model, run.job.model.compute_dtype, noise)
        results, seconds = [], []
        for _ in range(iterations):
            begin = time.perf_counter()
            results.append(run.step())
            synchronise(run.job.device)
            seconds.append(time.perf_counter() - begin)
        values = torch.stack([torch.stack([r.loss, r.grad_norm]) for r in results]).tolist()
        run.usual = seconds[-5:]
        job, cache = run.job, torch._dynamo.utils.counters["inductor"]
        return {
            "losses": [loss for loss, _ in values],
            "grad_norms": [norm for _, norm in values],
            "step_seconds": seconds,
            "compiled": {key: cache[f"fxgraph_cache_{key}"] for key in ("hit", "miss")},
            "tokens_per_step": run.tokens,
            "plan": job.plan.as_dict(),
            "options": [dict(d.facts.options) for d in job.plan.decisions if d.runs != REFERENCE and d.facts is not None],
            "counters": job.counters.as_dict(),
            "never_called": [f"{d.flag} @ {d.site}" for d in job.counters.never_called(job.plan)],
            "gemm_gflops_per_process": job.gemm_rate / 1e9,
        }

    def turn(self, arm: str, steps: int) -> dict[str, Any]:
        """One block: untimed steps until their time is the usual one, then the timed ones."""
        run = self.arm(arm)
        untimed = 0
        while untimed < _MOST_UNTIMED:
            seconds = run.timed(1)
            untimed += 1
            usual = statistics.median(run.usual) if run.usual else 0.0
            if broadcast(seconds <= _SETTLED * usual):
                break
        seconds = run.timed(steps) / steps
        run.usual = [*run.usual[-8:], seconds]
        return {"seconds_per_step": seconds, "untimed_steps": untimed, "gpu": gpu_state(self.device)}

    def memory(self, arm: str) -> dict[str, Any]:
        """Bytes at the peak of a step, and what is left over after each."""
        run = self.arm(arm)
        return memory_of_steps(run.step, run.job.optimizer, self.device)

    def try_batch(self, arm: str, micro_batch: int) -> dict[str, Any]:
        """Whether two steps at this micro-batch size fit on the GPU. With several ranks, running out of memory ends the group."""
        chosen, size = self.plan.arm(arm), micro_batch
        batch = [f"training.micro_batch_size={size}", f"training.global_batch_size={size * self.meshes.data_size}"]
        job = build_job(
            chosen.load(self.plan.config_path, [*self.plan.overrides], batch), self.device, self.meshes, self.log
        )
        self._share(job)
        run = ArmRun(job, self._dataset(job))
        try:
            run.timed(2)
        except torch.cuda.OutOfMemoryError:
            if dist.is_initialized():
                raise
            return {"fits": False}
        finally:
            del run, job
            torch.cuda.empty_cache()
        return {"fits": True}

    def profile(self, arm: str) -> dict[str, Any]:
        """Seconds of a step by fusion site, forward and backward."""
        run = self.arm(arm)
        return profile_steps(run.job.model, run.step)

    def roofline(self, arm: str) -> dict[str, Any]:
        """Bytes and speed of every fused operation of the arm at this run's shapes."""
        run = self.arm(arm)
        return {"rows": roofline(run.job.plan, run.job.counters, max(1, run.iteration), run.job.gemm_rate, self.device)}

    def warm_up(self, arms: list[str]) -> dict[str, Any]:
        """Two steps of each arm, then everything built so far is out of the garbage collector's way."""
        for name in arms:
            self.arm(name).timed(2)
        gc.collect()
        gc.freeze()
        return {}


@torch.no_grad()
def perturb(model: nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Move every weight by one rounding unit of `dtype` (eps times the weight), up or down by a coin's throw.

    The coin depends on seed and name only, so that the copies of a replicated parameter stay equal on all ranks.
    """
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        coin = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        sign = torch.randint(0, 2, local.shape, generator=coin, dtype=torch.int8).to(local) * 2 - 1
        local.addcmul_(local, sign, value=torch.finfo(dtype).eps)


def main(plan_path: str, arm: str, folder: str) -> None:
    """Answer requests until the conductor closes the stream."""
    worker = Worker(ComparisonPlan.read(plan_path), arm)
    stream = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(os.path.join(folder, "socket"))
        stream = connection.makefile("rw")
    pids: list[int] = [os.getpid()]
    if dist.is_initialized():
        pids = [0] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid(), group=worker.control)  # without an end, as the wait in `answer`
    answer: dict[str, Any] = {"pids": pids, "environment": describe_environment(worker.device)}
    while True:
        if stream is not None:
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
        line = worker.hear(stream.readline() if stream is not None else "")
        if not line:
            return
        request = json.loads(line)
        answer = worker.answer(request.pop("do"), request)


def _note(error: BaseException, folder: str) -> None:
    """Write down for the conductor why this rank ends; a rank that only lost its peers says so."""
    rank = os.environ.get("RANK", "0")
    lost = any(words in str(error) for words in LOST_PEER)
    text = "lost its peers" if lost else f"rank {rank}: {type(error).__name__}: {error}"
    where = traceback.extract_tb(error.__traceback__)
    place = f"\n(at {where[-1].filename}:{where[-1].lineno} in {where[-1].name})" if where and not lost else ""
    Path(folder, f"rank{rank}.txt").write_text(text + place)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
        stop_processes()
        os._exit(0)  # see trainer/launch.py
    except BaseException as error:  # whatever it is, the conductor has to hear of it, and no rank may wait for this one
        _note(error, sys.argv[3])
        os._exit(1)
