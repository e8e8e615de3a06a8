"""The times behind `auto`: from the checkpoint, from this machine's cache, or measured now. Imports no torch at the top.

All ranks run the same candidates together, and rank 0's times decide for all. The cache is
$XDG_CACHE_HOME/fuseline/auto.json (~/.cache/fuseline/auto.json), by machine, versions, processes here, and request.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

from configs.run import RunConfig
from fusions.machine import Machine
from fusions.registry import Request
from models.fusion_sites import Times, fusion_requests
from trainer.log import Log


def auto_requests(config: RunConfig, machine: Machine) -> list[Request]:
    """The requests whose flag is `auto` and can matter."""
    return [r for r in fusion_requests(config, machine) if r.asked == "auto" and not r.without_effect]


def cached_times(requests: list[Request], machine: Machine, processes: int) -> Times:
    """What this machine has measured before, with as many processes on it."""
    try:
        known = json.loads(_cache_file().read_text()).get(_signature(machine, processes), {})
    except (OSError, ValueError):
        return {}
    return {r.key: known[r.key] for r in requests if _usable(r, known.get(r.key))}


def times_of_plan(requests: list[Request], plan: dict[str, Any]) -> Times:
    """The times a saved plan was decided by, where its choice can still be made."""
    saved = {(d["flag"], d["site"], d["operation"]): d.get("times_ms") or None for d in plan.get("decisions", [])}
    found = {r.key: saved.get((r.flag, r.site, r.operation.name)) for r in requests}
    return {r.key: times for r in requests if (times := found[r.key]) and _usable(r, times)}


def auto_times(config: RunConfig, machine: Machine, device: Any, saved_plan: dict[str, Any], log: Log) -> Times:
    """Times for every `auto` of the configuration; all ranks call it and get rank 0's."""
    requests = auto_requests(config, machine)
    same_on_all_ranks("what `auto` has to decide", [r.key for r in requests])
    if not requests:
        return {}
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    times = broadcast({**cached_times(requests, machine, here), **times_of_plan(requests, saved_plan)})
    missing = {r.key: r for r in requests if r.key not in times}
    if missing:
        log.line(f"auto: measuring {len(missing)} operation(s) on this run's shapes")
        measured = broadcast({key: measure_here(request, device, log) for key, request in missing.items()})
        times |= measured
        if not log.silent:
            _remember(measured, _signature(machine, here))
    return times


def measure_here(request: Request, device: Any, log: Log) -> dict[str, float]:
    """Milliseconds of each candidate, all ranks at once; those left out are named."""
    import torch.distributed as dist

    from fusions.autotune import measure

    if dist.is_initialized():
        dist.barrier()
    found = measure(request, device)
    for name, why in found.left_out.items():
        log.line(f"auto: {request.operation.name}: {name} is left out: {why}")
    return found.times


def same_on_all_ranks(name: str, value: list[str]) -> None:
    """Before the ranks do anything together: a rank that would not take part is named, instead of waited for."""
    from trainer.meshes import agree

    agree(name, json.dumps(value))


def broadcast(value: Any) -> Any:
    """Rank 0's value on every rank."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return value
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def _usable(request: Request, times: dict[str, float] | None) -> bool:
    """Whether each backend that was measured can still be chosen."""
    return times is not None and set(times) <= set(request.candidates()) and len(times) > 0


def _cache_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fuseline", "auto.json")


def _signature(machine: Machine, processes: int) -> str:
    versions = " ".join(f"{name} {version}" for name, version in machine.versions)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    device = machine.device_name or f"{machine.device} {cores} cores"
    return f"{platform.node()}, {device}, torch {machine.torch_version} {versions}, {processes} process(es)"


def _remember(measured: Times, signature: str) -> None:
    """Add to the cache; a folder that can't be written costs the next start a measurement, nothing else."""
    file = _cache_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(file.read_text()) if file.is_file() else {}
        known.setdefault(signature, {}).update(measured)
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        partial.write_text(json.dumps(known, indent=1))
        partial.replace(file)
    except (OSError, ValueError):
        return
