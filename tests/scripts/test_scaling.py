"""scripts/bench_scaling.py as a user calls it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def test_the_efficiency_and_its_two_parts(tiny: Path) -> None:
    command = [sys.executable, "scripts/bench_scaling.py", str(tiny / "tiny.yaml"), "--rounds", "10"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if " to " in line]
    whole, machine, communication = (float(line.split()[-4]) for line in table)
    assert whole > 0 and 0.3 < machine * communication / whole < 3  # its parts, up to noise


def test_what_cannot_run_is_one_message(tiny: Path) -> None:
    for wrong, words in (
        ("training.micro_batch_size=3", "training.global_batch_size"),
        ("--processes=1", "at least 2 processes"),
    ):
        command = [sys.executable, "scripts/bench_scaling.py", str(tiny / "tiny.yaml"), wrong]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
