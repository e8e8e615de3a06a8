"""What has to be seen on a real GPU: parity of the real kernels, the roofline, and a fused and an unfused step of a 1.3 B GPT.

python scripts/gpu_check.py [--out gpu_check.json] [--workers 8] [--only parity,roofline,step]

Needs one NVIDIA GPU; writes one JSON and prints one table per part. Each part has a limit of its own (in seconds), so that the
whole stays under eight minutes; a part that runs out of time keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from trainer.log import Log

LIMITS = {"parity": 190, "roofline": 170, "step": 110}
BENCH = Path(__file__).with_name("bench_fusions.py")


def one_parity(case: Any) -> tuple[str, list[str], str]:
    """(name, what is wrong, why it was skipped) of one comparison; runs in a worker process."""
    from fusions.machine import probe
    from fusions.parity import differences

    machine = probe("cuda")
    obstacles = case.obstacles(machine)
    if obstacles:
        return str(case), [], "; ".join(map(str, obstacles))
    try:
        return str(case), differences(case, machine, "cuda"), ""
    except Exception as error:  # a kernel that doesn't compile here is a finding, not the end of the check
        return str(case), [f"{type(error).__name__}: {error}"[:500]], ""


def parity(workers: int, limit: float) -> dict[str, Any]:
    """The whole product, in processes of their own: compilation is what takes the time."""
    import multiprocessing

    from fusions.parity import adamw_differences, comparisons

    begin, done, wrong, skipped = time.monotonic(), 0, {}, 0
    cases = sorted(comparisons(whole=True), key=lambda c: (c.dtype != "bf16", c.layout != "contiguous"))
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    futures = [pool.submit(one_parity, case) for case in cases]
    try:
        for future in as_completed(futures, timeout=limit):
            try:
                name, problems, why = future.result()
            except Exception as error:  # the worker died: its comparison and those it took along count as not made
                wrong[f"a worker: {type(error).__name__}"] = [str(error)[:300]]
                continue
            done, skipped = done + (not why), skipped + bool(why)
            if problems:
                wrong[name] = problems
    except TimeoutError:
        pass
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list((pool._processes or {}).values()):
            process.kill()
    for backend in ("torch", "triton"):
        try:
            problems = adamw_differences(backend, "cuda")
        except Exception as error:
            problems = [f"{type(error).__name__}: {error}"[:500]]
        if problems:
            wrong[f"adamw-{backend}"] = problems
    return {"compared": done, "of": len(cases) - skipped, "skipped": skipped, "wrong": wrong,
            "seconds": time.monotonic() - begin}  # fmt: skip


def roofline(limit: float, out: Path) -> list[dict[str, Any]]:
    """scripts/bench_fusions.py, in bf16; cross entropy from 1k to 128k columns is among its rows."""
    file = out.with_suffix(".roofline.json")
    file.unlink(missing_ok=True)
    command = [sys.executable, str(BENCH), "--rounds", "9", "--json", str(file)]
    run(command, limit)
    return json.loads(file.read_text())["rows"] if file.is_file() else []


def step(limit: float, out: Path) -> Any:
    """scripts/bench_step.py on a 1.3 B GPT."""
    file = out.with_suffix(".step.json")
    file.unlink(missing_ok=True)
    script = Path(__file__).with_name("bench_step.py")
    config = Path(__file__).parent.parent / "configs/gpt/gpt-1.3b.yaml"
    run([sys.executable, str(script), str(config), "--rounds", "6", "--steps", "2", "--json", str(file)], limit)
    return json.loads(file.read_text()) if file.is_file() else None


def run(command: list[str], limit: float) -> None:
    """A part as a process of its own; what it prints is shown, and its end or its time-out never ends the check."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its own children too: a stopped arm would keep the GPU's memory
        print(f"stopped after {limit} s: {' '.join(command)}", flush=True)


def main() -> int:
    """0 if parity holds and was seen whole; 1 if not; 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="gpu_check.json")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--only", default="parity,roofline,step")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no NVIDIA GPU here: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    out, parts, log = Path(arguments.out), arguments.only.split(","), Log(rank=0)
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "python": sys.version}
    if "parity" in parts:
        report["parity"] = found = parity(arguments.workers, LIMITS["parity"])
        log.line(
            f"parity: {found['compared']} of {found['of']} comparisons, {len(found['wrong'])} wrong, {found['seconds']:.0f} s"
        )
        log.table("Wrong", ("comparison", "what"), [(n, "; ".join(p)) for n, p in found["wrong"].items()] or [("none", "")])
        out.write_text(json.dumps(report, indent=1))
    if "roofline" in parts:
        report["roofline"] = roofline(LIMITS["roofline"], out)
        out.write_text(json.dumps(report, indent=1))
    if "step" in parts:
        report["step"] = step(LIMITS["step"], out)
    out.write_text(json.dumps(report, indent=1))
    log.line(f"everything is in {out}")
    found = report.get("parity")
    return 0 if found is None or (not found["wrong"] and found["compared"] == found["of"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
