"""BUILD, once, downhill: RunConfig -> device and mesh -> FusionPlan -> layer specs -> model -> optimizer."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from configs.load import LoadedConfig
from configs.run import ParallelConfig, RunConfig
from fusions.machine import probe
from fusions.registry import Counters, FusionPlan
from models.bert import BertModel
from models.fusion_sites import fusion_plan
from models.gpt import GPTModel
from models.init import initialise
from models.language_model import LanguageModel
from models.layer_specs import bert_spec, gpt_spec, t5_spec
from models.recompute import Recompute
from models.t5 import T5Model
from models.tensor_parallel.params import TensorParallel, parameters_without_memory
from trainer.auto import auto_times
from trainer.checkpoint import find_checkpoint, read_state
from trainer.log import Log, show_plan
from trainer.loss_scale import loss_scaler
from trainer.meshes import Meshes, agree, pick_device, restart_note, start_processes, world_size
from trainer.optimizer import Optimizer
from trainer.runtime import PRECISIONS, allocator_settings, keep_freed_memory, measure_gemm_rate
from trainer.sharding import shard_over_data

_FAMILIES: dict[str, tuple[Any, Any]] = {
    "gpt": (gpt_spec, GPTModel),
    "bert": (bert_spec, BertModel),
    "t5": (t5_spec, T5Model),
}


@dataclass
class Job:
    """A built job, before its first step."""

    loaded: LoadedConfig
    device: torch.device
    meshes: Meshes
    plan: FusionPlan
    counters: Counters
    model: LanguageModel
    optimizer: Optimizer
    gemm_rate: float  # FLOP/s of one rank, measured with all ranks at work
    log: Log

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""
        return self.loaded.config


def start(loaded: LoadedConfig, log: Log, keep_memory: bool = True) -> tuple[torch.device, Meshes]:
    """Allocator, device, process group: what a process does once, whatever it builds afterwards."""
    machine = probe(loaded.config.run.device)
    if machine.device == "cpu":
        note = keep_freed_memory() if keep_memory else "default allocator settings"
        torch.set_num_threads(loaded.config.run.threads or _threads_per_process())
        log.line(f"cpu, {world_size()} process(es) of {torch.get_num_threads()} thread(s); {note}")
    if note := restart_note():
        log.line(note)
    device = pick_device(machine.device)
    return device, start_processes(loaded.config.parallel, device)


def build_job(loaded: LoadedConfig, device: torch.device, meshes: Meshes, log: Log) -> Job:
    """Everything up to the first step. Raises FusionError, UserError."""
    config = loaded.config
    machine = probe(device.type)
    path = find_checkpoint(config)
    saved_plan = read_state(path)["fusion_plan"] if path else {}
    plan = fusion_plan(config, machine, auto_times(config, machine, device, saved_plan, log))
    agree("the fusion plan", plan.hash())
    agree("the configuration", json.dumps(config.model_dump(), sort_keys=True))
    model, counters = build_model(config, plan, meshes, device)
    optimizer = Optimizer(model, config.optimizer, plan, counters, loss_scaler(config.training, device))
    gemm_rate = measure_gemm_rate(device, PRECISIONS[config.training.precision])
    return Job(loaded, device, meshes, plan, counters, model, optimizer, gemm_rate, log)


def build_model(config: RunConfig, plan: FusionPlan, meshes: Meshes, device: torch.device) -> tuple[Any, Counters]:
    """The model with its initial weights, and the counters of its fusion sites."""
    counters = Counters()
    model = make_model(config, plan, counters, meshes, device)
    initialise(model, config.training.seed)
    return model, counters


def make_model(
    config: RunConfig, plan: FusionPlan, counters: Counters, meshes: Meshes, device: torch.device
) -> LanguageModel:
    """The model, its parameters sharded as they will be; they hold nothing yet."""
    if meshes.data is None:
        return _whole_model(config, plan, counters, meshes.tp, device)
    return model_without_memory(config, plan, counters, meshes, device).to_empty(device=device)


def model_without_memory(
    config: RunConfig, plan: FusionPlan, counters: Counters, meshes: Meshes, device: torch.device
) -> LanguageModel:
    """The same with parameters on the meta device, for `to_empty`."""
    with parameters_without_memory():
        model = _whole_model(config, plan, counters, meshes.tp, device)
    shard_over_data(model, meshes, config.parallel)
    return model


def _whole_model(
    config: RunConfig, plan: FusionPlan, counters: Counters, tp: TensorParallel, device: torch.device
) -> LanguageModel:
    make_spec, family = _FAMILIES[config.model.family]
    recompute = Recompute(config.training.recompute, config.training.recompute_num_layers, counters.recomputing)
    spec = make_spec(config.transformer, plan, counters, config.training.compile_layers, recompute)
    return family(config.model, config.transformer, spec, tp, device, PRECISIONS[config.training.precision])


def describe(job: Job) -> None:
    """Print what was built, the fusion report included."""
    config, log = job.config, job.log
    parameters = sum(p.numel() for p in job.model.parameters())
    log.line(
        f"{config.model.family} {parameters:,} parameters; tensor parallel {job.meshes.tp.size}"
        f"{' with sequence parallel' if config.parallel.sequence_parallel else ''}; {_data_parallel_words(config.parallel)}"
        f"{config.training.precision}; "
        f"matrix product {job.gemm_rate / 1e9:,.0f} GFLOP/s per process"
    )
    log.line(job.optimizer.describe())
    show_plan(log, job.plan)


def _data_parallel_words(parallel: ParallelConfig) -> str:
    dp, shards = parallel.data_parallel, parallel.shard_size
    if dp == 1:
        return ""
    what = {"optimizer": "optimizer state and gradients", "full": "parameters, optimizer state and gradients"}
    split = "" if shards == 1 else f" ({what[parallel.data_sharding]} over {shards})"
    return f"data parallel {dp}{split}; "


def write_description(job: Job) -> None:
    """Write config.yaml, fusions.json and environment.json into the run's folder; not before a resume has been found possible."""
    if not job.log.silent:
        folder = Path(job.config.run.path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(job.loaded.resolved_yaml())
        (folder / "fusions.json").write_text(json.dumps(job.plan.as_dict(), indent=1))
        (folder / "environment.json").write_text(json.dumps(describe_environment(job.device), indent=1))


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Where and with what this process runs: revision, versions, device, threads, and what else decides how fast it is."""
    cuda = device.type == "cuda"
    return {
        "git_revision": _git_revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": dict(probe(device.type).versions),
        "device": torch.cuda.get_device_name(device) if cuda else _cpu_name(),
        "gpu": cuda,
        "cores": _cores(),
        "world_size": world_size(),
        "threads_per_process": torch.get_num_threads(),
        "allocator": torch.cuda.get_allocator_backend() if cuda else allocator_settings(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_TELLING_VARIABLES)},
    }


_TELLING_VARIABLES = (
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "NCCL_",
    "TORCH",
    "PYTORCH_",
    "CUDA_",
    "TRITON_",
    "MALLOC_",
    "LD_PRELOAD",
)


def _git_revision() -> str | None:
    """Of this code, with "-dirty" where it was changed; None outside a repository, or without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        git = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return git.stdout.strip() or None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads_per_process() -> int:
    """The cores of this machine shared out to the processes on it (torchrun would set 1 each)."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, _cores() // here)
