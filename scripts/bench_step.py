"""The time of a training step here: with and without the allocator settings, fused and unfused, and its MFU.

python scripts/bench_step.py [CONFIG] [overrides] [--rounds 12] [--steps 2]      (CONFIG: configs/gpt/bench.yaml)

One process (all cores, random tokens) per arm; arms take turns of a few steps, idle ones are stopped, and ratios are taken
round by round. MFU is against the matrix-product rate that the arm's own process measured at its start.

--serve is one arm by itself, for other benchmarks to drive: it prints `READY {json}`, and for each line `go K` on standard
input runs K steps and prints `ROWS {"rows": [[seconds, 0, 0, 0], ...], "loss": x}`. Started by torchrun, or with RANK and
WORLD_SIZE set, rank 0 speaks and the others follow.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from configs.load import load_config
from configs.section import ConfigError
from configs.transformer import FUSION_FLAGS
from fusions.machine import probe
from trainer.auto import broadcast
from trainer.compare.statistics import paired_ratio
from trainer.flops import flops_per_iteration
from trainer.log import Log

FUSED = [f"transformer.{flag}=true" for flag in FUSION_FLAGS]
UNFUSED = [f"transformer.{flag}=false" for flag in FUSION_FLAGS]


def serve(config_path: str, overrides: list[str], keep_memory: bool) -> None:
    """One arm: build, warm up, then run steps as asked."""
    import torch

    import trainer.setup as setup
    from trainer.data.gpt_dataset import make_gpt_batch
    from trainer.loop import train_step
    from trainer.runtime import synchronise

    loaded, silent = load_config(config_path, overrides), Log(rank=1)
    device, meshes = setup.start(loaded, silent, keep_memory)
    job = setup.build_job(loaded, device, meshes, silent)
    config, generator, iteration = loaded.config, torch.Generator().manual_seed(0), 0
    micro, size = config.training.micro_batch_size, config.training.global_batch_size

    def step() -> tuple[float, float]:
        nonlocal iteration
        iteration += 1
        shape = (size, config.data.seq_length + 1)
        samples = torch.randint(0, config.model.vocab_size, shape, generator=generator).numpy()
        batches = [
            make_gpt_batch(list(samples[i : i + micro]), list(range(i, i + micro)), config.data)
            for i in range(0, size, micro)
        ]
        begin = time.perf_counter()
        result = train_step(job.model, job.optimizer, batches, config, iteration)
        synchronise(device)
        return time.perf_counter() - begin, float(result.loss)

    begin = time.perf_counter()
    first = step()[0]
    for _ in range(4):
        step()
    warmup = time.perf_counter() - begin
    fused = sum(site["fused"] for site in job.counters.as_dict().values())
    if meshes.tp.rank > 0:  # does as rank 0 is told
        while (steps := broadcast(0)) > 0:
            for _ in range(steps):
                step()
        return
    facts = {"first_step_s": first, "warmup_s": warmup, "gemm_rate": job.gemm_rate, "fused_calls": fused}
    print("READY " + json.dumps(facts), flush=True)
    for line in sys.stdin:
        rows = [step() for _ in range(broadcast(int(line.split()[1])))]
        print("ROWS " + json.dumps({"rows": [[seconds, 0, 0, 0] for seconds, _ in rows], "loss": rows[-1][1]}), flush=True)
    broadcast(0)


class Arm:
    """A served arm, stopped while it is not its turn."""

    def __init__(self, name: str, config: str, overrides: list[str], keep_memory: bool):
        self.name, self.seconds = name, []
        arguments = [config, *overrides, "--serve", *([] if keep_memory else ["--default-allocator"])]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.facts = self._read("READY ")
        self.process.send_signal(signal.SIGSTOP)

    def turn(self, steps: int) -> None:
        """Run some steps and note their mean."""
        self.process.send_signal(signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.write(f"go {steps}\n")
        self.process.stdin.flush()
        self.seconds.append(statistics.mean(row[0] for row in self._read("ROWS ")["rows"]))
        self.process.send_signal(signal.SIGSTOP)

    def stop(self) -> None:
        """End the process."""
        self.process.kill()

    def _read(self, key: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(key):
                return json.loads(line[len(key) :])
        raise SystemExit(f"arm {self.name} ended before its time; its message is above")


def summary(arm: Arm, base: Arm, flops: int, tokens: int) -> dict[str, Any]:
    """The figures of an arm against the first one, and their cells in the table."""
    seconds, ratio = statistics.median(arm.seconds), paired_ratio(base.seconds, arm.seconds)
    mfu, (low, high) = flops / seconds / arm.facts["gemm_rate"], ratio.interval
    cells = (
        arm.name,
        f"{seconds * 1e3:.0f}",
        f"{tokens / seconds:,.0f}",
        f"{ratio.ratio:.3f} [{low:.3f}, {high:.3f}]",
        f"{mfu:.0%}",
        f"{arm.facts['gemm_rate'] / 1e9:.0f}",
    )
    return {
        "arm": arm.name,
        "seconds": arm.seconds,
        "mfu": mfu,
        "ratio": ratio.ratio,
        "interval": (low, high),
        "cells": cells,
    }


def main() -> int:
    """Measure four arms in turns, or serve one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="configs/gpt/bench.yaml")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2, help="steps of one turn")
    parser.add_argument("--json", help="also write the figures there")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--default-allocator", action="store_true", help="with --serve: leave the allocator as it is")
    arguments = parser.parse_args()
    try:
        config = load_config(arguments.config, arguments.overrides).config
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if config.model.family != "gpt":  # its batches are made up here; scripts/compare.py measures any family on its data
        print(f"model.family: {config.model.family}; bench_step.py measures a gpt", file=sys.stderr)
        return 2
    os.environ.pop("OMP_NUM_THREADS", None)
    if arguments.serve:
        serve(arguments.config, arguments.overrides, not arguments.default_allocator)
        return 0
    log, arms = Log(rank=0), []
    try:
        contestants = [("unfused", UNFUSED, True), ("fused", FUSED, True)]
        if probe(config.run.device).device == "cpu":  # the allocator settings are glibc's
            contestants = [("unfused, default allocator", UNFUSED, False), *contestants]
            contestants.append(("fused, default allocator", FUSED, False))
        for name, flags, keep in contestants:
            arms.append(Arm(name, arguments.config, [*arguments.overrides, *flags], keep))
        for number in range(arguments.rounds):
            for arm in arms if number % 2 == 0 else reversed(arms):
                arm.turn(arguments.steps)
    finally:
        for arm in arms:
            arm.stop()
    flops, tokens = flops_per_iteration(config), config.data.seq_length * config.training.global_batch_size
    report = [summary(arm, arms[0], flops, tokens) for arm in arms]
    title = f"{config.run.name}: {arguments.rounds} rounds of {arguments.steps} steps, in turns"
    header = ("arm", "ms/step", "tokens/s", "speed ratio [99 %]", "MFU", "GFLOP/s measured")
    log.table(title, header, [row["cells"] for row in report])
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
