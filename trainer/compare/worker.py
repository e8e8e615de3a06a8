"""One process of a comparison, started by torchrun:  python -m trainer.compare.worker PLAN.json

Every arm has its own model and optimizer, from the same seed, over the same batches and dropout masks. After a warm-up of
each, the arms take turns of a few steps, A B then B A, and each turn is one timed block.
"""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from trainer.compare.plan import ComparisonPlan
from trainer.compare.report import write_report
from trainer.data.gpt_dataset import GPTDataset
from trainer.data.sampler import training_batches
from trainer.launch import run_job
from trainer.log import Log
from trainer.loop import train_step
from trainer.meshes import world_size
from trainer.runtime import synchronise
from trainer.setup import Job, build_job, start


@dataclass
class ArmRun:
    """An arm while it is measured."""

    name: str
    overrides: list[str]
    job: Job
    iteration: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)
    first_step_seconds: float = 0.0
    warmup_step_seconds: list[float] = field(default_factory=list)
    block_seconds: list[float] = field(default_factory=list)

    def steps(self, dataset: GPTDataset, count: int) -> float:
        """Run `count` steps; seconds per step, between two points where all ranks and the device are done."""
        batches = [training_batches(dataset, self.job.config, self.iteration + i + 1) for i in range(count)]
        _meet(self.job)
        begin = time.perf_counter()
        for batch in batches:
            self.iteration += 1
            result = train_step(self.job.model, self.job.optimizer, batch, self.job.config, self.iteration)
            self.losses.append(result.loss)
        _meet(self.job)
        return (time.perf_counter() - begin) / count


def main(plan_path: str) -> None:
    """Measure and, on rank 0, report."""
    plan, log = ComparisonPlan.read(plan_path), Log()
    first = plan.load(plan.arms[0], world_size())
    device, tp = start(first, log)
    arms = [ArmRun(a.name, a.overrides, build_job(plan.load(a, world_size()), device, tp, log)) for a in plan.arms]
    config = first.config
    dataset = GPTDataset(
        config.data.sources("train"),
        config.data.seq_length,
        config.model.vocab_size,
        config.training.seed,
        f"{plan.out}/cache",
    )
    for arm in arms:
        arm.first_step_seconds = arm.steps(dataset, 1)
        arm.warmup_step_seconds = [arm.steps(dataset, 1) for _ in range(plan.warmup_steps)]
        log.line(
            f"{arm.name}: first step {arm.first_step_seconds:.1f} s, then {min(arm.warmup_step_seconds) * 1e3:.0f} ms a step"
        )
    gc.collect()
    gc.freeze()
    for number in range(plan.rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            arm.block_seconds.append(arm.steps(dataset, plan.steps_per_block))
        times = "  ".join(f"{arm.name} {arm.block_seconds[-1] * 1e3:.0f} ms" for arm in arms)
        log.line(f"round {number + 1:>3}/{plan.rounds}  {times}")
    if not log.silent:
        write_report(plan, [_facts(arm) for arm in arms], _environment(arms[0].job), log)


def _facts(arm: ArmRun) -> dict[str, Any]:
    return {
        "name": arm.name,
        "overrides": arm.overrides,
        "config": arm.job.config.model_dump(),
        "plan": arm.job.plan.as_dict(),
        "counters": arm.job.counters.as_dict(),
        "never_called": [f"{d.flag} @ {d.site}" for d in arm.job.counters.never_called(arm.job.plan)],
        "first_step_seconds": arm.first_step_seconds,
        "warmup_step_seconds": arm.warmup_step_seconds,
        "block_seconds_per_step": arm.block_seconds,
        "losses": torch.stack(arm.losses).tolist(),
    }


def _environment(job: Job) -> dict[str, Any]:
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "git_revision": git.stdout.strip() or None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else platform.processor() or "cpu",
        "world_size": world_size(),
        "threads": torch.get_num_threads(),
        "gemm_gflops_per_process": job.gemm_rate / 1e9,
    }


def _meet(job: Job) -> None:
    synchronise(job.device)
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    raise SystemExit(run_job(lambda: main(sys.argv[1])))
