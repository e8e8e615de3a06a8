"""What a job needs on each of N processes, and how long a step might take, without any of them.

python scripts/plan.py CONFIG --world-size N --device h100-sxm [section.key=value ...] [--rate NAME=VALUE ...] [--no-search]
                       [--measure] [--json]

Walks a real training step as rank 0 of N on tensors without memory, then looks for faster layouts of the same job that fit.
Rates are datasheet peaks (for cpu: measured here); give measured ones with --rate. --measure does the step for real on N local
CPU processes, and shows it beside the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from typing import Any

from configs.load import load_config
from configs.run import RunConfig
from configs.section import ConfigError
from fusions.machine import Machine, probe
from fusions.registry import FusionError
from models.fusion_sites import fusion_plan
from trainer.errors import UserError
from trainer.flops import flops_per_iteration, num_parameters, tokens_per_iteration
from trainer.log import Log, show_plan
from trainer.planner.devices import NAMES, RATES, Device, find_device
from trainer.planner.estimate import Estimate, estimate, seconds_of
from trainer.planner.search import RECOMPUTE, Layout, search
from trainer.planner.walk import Walk, walk

_SHOWN = 10


def main() -> int:
    """0: planned; 2: the configuration can't run, and why."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--world-size", type=int, required=True, help="processes of the job, up to thousands")
    parser.add_argument("--device", choices=NAMES, required=True)
    parser.add_argument("--rate", action="append", default=[], metavar="NAME=VALUE", help=f"NAME one of {', '.join(RATES)}")
    parser.add_argument("--no-search", action="store_true", help="plan the configured layout only")
    parser.add_argument("--measure", action="store_true", help="do the step for real on this machine's CPU")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_intermixed_args()
    try:
        if arguments.world_size < 1:
            raise UserError(f"--world-size {arguments.world_size}: a job has at least one process")
        config = load_config(arguments.config, arguments.overrides, arguments.world_size).config
        device = find_device(arguments.device, arguments.rate)
        machine = target_machine(device)
        if arguments.measure:
            can_be_measured(config)
        walks = {mode: walk(_with_recompute(config, mode), machine) for mode in RECOMPUTE}
    except (ConfigError, FusionError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    log = Log(rank=0)
    report = Report(config, device, walks)
    measured = None
    if arguments.measure:
        from trainer.planner.measure import measure

        measured = measure(config)
    if not arguments.json:
        report.show(log, machine, measured)
    layouts = []
    if not arguments.no_search:
        layouts = search(config, machine, device, lambda words: print(words, file=sys.stderr))
    if arguments.json:
        found = [layout.as_dict() for layout in layouts]
        print(json.dumps(report.as_dict() | {"measured": measured, "layouts": found}, indent=1))
    elif not arguments.no_search:
        show_layouts(log, layouts, config)
    return 0


def can_be_measured(config: RunConfig) -> None:
    """Raise UserError or FusionError where the step can't be done on this machine's CPU."""
    most = 4 * len(os.sched_getaffinity(0))
    if config.parallel.processes > most:
        raise UserError(f"--measure would start {config.parallel.processes} processes here; at most {most} on this machine")
    fusion_plan(config, probe("cpu"))


def target_machine(device: Device) -> Machine:
    """Where the fusion plan is made for: this machine; or a GPU with Triton, and with what else is installed here."""
    here = probe("cpu")
    if device.name == "cpu":
        return here
    problems = tuple((name, "" if name == "triton" else problem) for name, problem in here.import_problems)
    return replace(here, device="cuda", device_name=device.name, compile_problem="", import_problems=problems)


def _with_recompute(config: RunConfig, mode: str) -> RunConfig:
    changes: dict[str, Any] = {"recompute": mode, "compile_layers": False}
    return config.model_copy(update={"training": config.training.model_copy(update=changes)})


class Report:
    """The plan of the configured layout."""

    def __init__(self, config: RunConfig, device: Device, walks: dict[str, Walk]):
        self.config, self.device, self.walks = config, device, walks
        self.walk = walks[config.training.recompute]
        self.estimate = estimate(self.walk, config, device)

    def as_dict(self) -> dict[str, Any]:
        """Plain data; bytes and seconds."""
        return {
            "processes": self.config.parallel.processes,
            "parameters": num_parameters(self.config),
            "model_flops": flops_per_iteration(self.config),
            "flops_per_process": self.walk.flops,
            "memory": {mode: w.memory | {"peak": w.peak} for mode, w in self.walks.items()},
            "collectives": self.walk.collectives,
            "device": vars(self.device),
            "estimate": self.estimate.as_dict(),
        }

    def show(self, log: Log, machine: Machine, measured: dict[str, Any] | None) -> None:
        """As tables."""
        config, parallel = self.config, self.config.parallel
        log.line(
            f"{num_parameters(config):,} parameters on {parallel.processes} x {self.device.name}: tensor parallel "
            f"{parallel.tensor_parallel_size}, data parallel {parallel.data_parallel} (data_sharding {parallel.data_sharding}), "
            f"micro-batch {config.training.micro_batch_size} x {config.num_microbatches()}, recompute {config.training.recompute}"
        )
        show_plan(log, fusion_plan(config, machine))
        if config.training.compile_layers:
            log.line("compile_layers: planned without, since what the compiler keeps of a layer is not known before it runs")
        self._memory(log)
        self._collectives(log)
        self._time(log)
        if measured is not None:
            self._beside(log, measured)

    def _memory(self, log: Log) -> None:
        kinds = list(self.walk.memory)
        fits = 2**30 * self.device.memory_gib
        rows = [
            (mode, *(_gib(w.memory[kind]) for kind in kinds), _gib(w.peak), "yes" if w.peak <= fits else "no")
            for mode, w in self.walks.items()
        ]
        header = ("recompute", *kinds, "together", f"fits {self.device.memory_gib:,.0f} GiB")
        layers = self.config.training.recompute_num_layers
        where = "" if layers is None else f" (recompute in the first {layers} layers of a stack)"
        log.table(f"Memory of one process at its peak, GiB{where}", header, rows)

    def _collectives(self, log: Log) -> None:
        rows = [
            (c["kind"], c["group"], str(c["ranks"]), str(c["calls"]), f"{c['bytes'] / 2**20:,.3f}",
             f"{1e3 * seconds_of(c, self.config, self.device):,.2f} ms")
            for c in sorted(self.walk.collectives, key=lambda c: -c["bytes"])
        ]  # fmt: skip
        if rows:
            log.table("Communication of one step, of one process", ("kind", "over", "ranks", "calls", "MiB", "time"), rows)

    def _time(self, log: Log) -> None:
        e, config = self.estimate, self.config
        parts = [
            ("compute", e.compute, "matrix products bound by arithmetic"),
            ("memory", e.memory, "everything else"),
            ("tensor parallel", e.tensor_parallel, "communication, nothing of it hidden"),
            ("data parallel", e.data_parallel, f"communication; {1e3 * e.exposed:,.2f} ms can't hide behind the first two"),
            ("step", e.step, f"{tokens_per_iteration(config) / e.step:,.0f} tokens/s, {_mfu(e, config, self.device):.1%} MFU"),
        ]  # fmt: skip
        rows = [(name, f"{1e3 * seconds:,.2f} ms", words) for name, seconds, words in parts]
        log.table(f"Time of one step at the rates of: {self.device.source}", ("part", "time", ""), rows)
        log.line(
            f"{_flop(self.walk.flops)} a step on this process, {_flop(flops_per_iteration(config))} of the model on all. "
            "A datasheet's rates are peaks, so expect a longer step; give measured ones with --rate."
        )

    def _beside(self, log: Log, measured: dict[str, Any]) -> None:
        rows = [(kind, _mib(self.walk.memory[kind]), _mib(measured["memory"][kind])) for kind in measured["memory"]]
        total = sum(measured["memory"].values())
        sent = [sum(c["bytes"] for c in found) for found in (self.walk.collectives, measured["collectives"])]
        rows += [
            ("together, MiB", _mib(self.walk.peak), f"{_mib(total)} (plan / measured {self.walk.peak / total:.3f})"),
            (
                "resident, MiB",
                "-",
                f"{1024 * measured['resident_gib']:,.0f} (with Python, PyTorch and freed memory that is kept)",
            ),
            ("communication, bytes", f"{sent[0]:,}", f"{sent[1]:,}"),
            ("FLOP", f"{self.walk.flops:,}", f"{measured['flops']:,} (PyTorch's counter)"),
            (
                "step",
                f"{1e3 * self.estimate.step:,.0f} ms ({self.device.name})",
                f"{1e3 * measured['seconds']:,.0f} ms (cpu)",
            ),
        ]
        log.table("The same step for real, on this machine's CPU", ("what", "plan", "measured"), rows)


def show_layouts(log: Log, layouts: list[Layout], config: RunConfig) -> None:
    """The fastest of the search."""
    if not layouts:
        log.line("No layout of this job fits the device: more processes, or parallel.data_sharding=full")
        return
    tokens = tokens_per_iteration(config)
    rows = [
        (str(x.tensor_parallel), str(x.data_parallel), str(x.micro_batch), x.recompute, _gib(x.peak),
         f"{1e3 * x.estimate.step:,.2f} ms", f"{tokens / x.estimate.step:,.0f}")
        for x in layouts[:_SHOWN]
    ]  # fmt: skip
    header = ("tensor", "data", "micro-batch", "recompute", "GiB", "step", "tokens/s")
    sharding = f"data_sharding {config.parallel.data_sharding}"
    log.table(f"The fastest of {len(layouts)} layouts that fit ({sharding}, as little recompute as fits)", header, rows)
    log.line("the first: " + (" ".join(layouts[0].overrides) or "as configured"))


def _mfu(e: Estimate, config: RunConfig, device: Device) -> float:
    peak = device.gemm_rate(config.training.precision) * config.parallel.processes
    return flops_per_iteration(config) / e.step / peak


def _flop(count: float) -> str:
    return f"{count / 1e12:,.2f} TFLOP" if count >= 1e12 else f"{count / 1e9:,.2f} GFLOP"


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
