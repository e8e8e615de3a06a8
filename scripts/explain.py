"""What a configuration means on this machine, without starting a job and without importing torch.

python scripts/explain.py CONFIG [section.key=value ...] [--world-size N] [--json] [--backends]
python scripts/explain.py --write-schema configs/schema.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from configs.load import load_config, write_schema
from configs.run import RunConfig
from configs.section import ConfigError
from fusions.machine import Machine, probe
from fusions.registry import FusionError
from models.fusion_sites import fusion_plan, fusion_requests
from trainer.auto import auto_requests, cached_times
from trainer.flops import flops_per_token, memory_estimate_gib, num_parameters
from trainer.log import Log, show_plan


def main() -> int:
    """0: it can run; 2: it can't, and why."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--world-size", type=int, help="check against this number of processes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--backends",
        action="store_true",
        help="every backend of each operation: its obstacles, or its measured time on this run's shapes (imports torch)",
    )
    parser.add_argument(
        "--write-schema", metavar="PATH", help="write the JSON schema of the YAML files for editors, and stop"
    )
    arguments = parser.parse_args()
    if arguments.write_schema:
        try:
            write_schema(arguments.write_schema)
        except OSError as error:
            print(error, file=sys.stderr)
            return 2
        return 0
    if not arguments.config:
        parser.error("a CONFIG is needed")
    try:
        loaded = load_config(arguments.config, arguments.overrides, arguments.world_size)
        machine = probe(loaded.config.run.device)
        processes = loaded.config.parallel.processes
        plan = fusion_plan(loaded.config, machine, cached_times(auto_requests(loaded.config, machine), machine, processes))
    except (ConfigError, FusionError) as error:
        problems = [vars(p) for p in error.problems] if isinstance(error, ConfigError) else str(error).splitlines()
        print(
            json.dumps({"problems": problems}, indent=1) if arguments.json else error,
            file=sys.stdout if arguments.json else sys.stderr,
        )
        return 2
    size = sizes(loaded.config)
    backends = backend_times(loaded.config, machine) if arguments.backends else []
    if arguments.json:
        facts = {"problems": [], **size, "fusions": plan.as_dict(), "config": loaded.config.model_dump()}
        print(json.dumps(facts | ({"backends": backends} if arguments.backends else {}), indent=1))
        return 0
    log = Log(rank=0)
    log.line(f"{arguments.config}: no problems")
    log.line(f"{size['parameters']:,} parameters, {size['flops_per_token'] / 1e6:,.1f} MFLOP a token (training), "
             f"{size['processes']} process(es)")  # fmt: skip
    rows = [(name, f"{gib:.3f}") for name, gib in size["memory_gib_per_process"].items()]
    log.table("Memory of one process", ("what", "GiB"), rows)
    show_plan(log, plan)
    if backends:
        show_backends(log, backends)
    for source in (*loaded.config.data.sources("train"), *loaded.config.data.sources("valid")):
        if not Path(f"{source.prefix}.idx").is_file():
            log.line(f"note: {source.prefix}.idx is not here; the job needs it")
    return 0


def backend_times(config: RunConfig, machine: Machine) -> list[dict[str, Any]]:
    """Each operation of the configuration once: every backend with its obstacles, or its milliseconds here."""
    import torch

    from fusions.autotune import measure
    from trainer.runtime import keep_freed_memory

    if machine.device == "cpu":
        keep_freed_memory()
    rows: dict[str, dict[str, Any]] = {}
    for request in fusion_requests(config, machine):
        if request.key in rows:
            rows[request.key]["sites"].append(request.site)
            continue
        found = measure(request, torch.device(machine.device))
        times = found.times
        backends = {b.name: [str(o) for o in request.obstacles(b)] for b in request.operation.backends}
        for name, why in backends.items():
            if not why and name not in times:
                why.append(found.left_out[name])
        rows[request.key] = {
            "operation": request.operation.name, "shape": list(request.facts.shape), "dtype": request.facts.dtype,
            "sites": [request.site], "times_ms": times, "obstacles": {b: why for b, why in backends.items() if why},
        }  # fmt: skip
    return list(rows.values())


def show_backends(log: Log, rows: list[dict[str, Any]]) -> None:
    """One line per operation and backend."""
    cells = []
    for row in rows:
        shape = f"{'x'.join(map(str, row['shape']))} {row['dtype']}"
        reference = row["times_ms"]["reference"]
        for name, ms in sorted(row["times_ms"].items(), key=lambda item: item[1]):
            cells.append((row["operation"], shape, name, f"{ms:.2f} ms", f"{reference / ms:.2f}x of the reference"))
        for name, why in row["obstacles"].items():
            cells.append((row["operation"], shape, name, "-", "; ".join(why)))
    log.table("Backends, forward and backward on this run's shapes", ("operation", "shape", "backend", "time", ""), cells)


def sizes(config: RunConfig) -> dict[str, Any]:
    """Parameters, FLOPs and memory of the configuration."""
    return {
        "parameters": num_parameters(config),
        "flops_per_token": flops_per_token(config),
        "processes": config.parallel.processes,
        "memory_gib_per_process": memory_estimate_gib(config),
    }


if __name__ == "__main__":
    raise SystemExit(main())
