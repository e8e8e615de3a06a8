"""scripts/plan.py as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/plan.py", *arguments]
    environment = os.environ | {"TRITON_INTERPRET": "0"}  # Triton is for GPUs, as it is for a user
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_tables(tiny: Path) -> None:
    many = plan(str(tiny / "tiny.yaml"), "--world-size", "2", "--device", "a100-80g", "--rate", "half_tflops=200", "--no-search",
                "parallel.tensor_parallel_size=2", "--measure")  # fmt: skip
    assert many.returncode == 0, many.stderr
    for words in ("2 x a100-80g", "selective", "fits 75 GiB", "tensor parallel", "all-reduce", "MFU", "half_tflops=200 as given",
                  "resident, MiB", "PyTorch's counter"):  # fmt: skip
        assert words in many.stdout, words


def test_json(tiny: Path) -> None:
    found = plan(
        str(tiny / "tiny.yaml"),
        "--world-size",
        "2",
        "--device",
        "h200-sxm",
        "parallel.data_sharding=full",
        "--json",
        "training.global_batch_size=8",
    )
    assert found.returncode == 0, found.stderr
    data = json.loads(found.stdout)
    assert data["processes"] == 2 and set(data["memory"]) == {"none", "selective", "full"}
    assert data["memory"]["none"]["peak"] == sum(v for kind, v in data["memory"]["none"].items() if kind != "peak")
    assert {c["kind"] for c in data["collectives"]} >= {"all-gather", "reduce-scatter"}
    assert data["estimate"]["step"] > 0
    assert data["layouts"] and all(layout["tensor_parallel"] * layout["data_parallel"] == 2 for layout in data["layouts"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--world-size", "3", "parallel.tensor_parallel_size=2"], "3 processes were started"),
        (["--world-size", "4", "parallel.data_sharding=full", "parallel.data_shard_size=3"], "does not divide"),
        (["--world-size", "0"], "--world-size 0"),
        (["--world-size", "2", "--rate", "speed=1"], "--rate speed=1"),
        (["--world-size", "1", "--measure", "transformer.bias_dropout_fusion=triton"], "needs cuda"),
        (["--world-size", "4096", "--measure", "training.global_batch_size=8192"], "would start 4096 processes"),
        (["--world-size", "2", "transformer.gradient_accumulation_fusion=true", "training.precision=bf16",
          "transformer.strict_fusions=true"], "gradient_accumulation_fusion"),
    ],
    ids=lambda value: "",
)  # fmt: skip
def test_what_cannot_be_planned_is_one_message(tiny: Path, arguments: list[str], words: str) -> None:
    refused = plan(str(tiny / "tiny.yaml"), "--device", "h100-sxm", "--no-search", *arguments)
    assert refused.returncode == 2 and words in refused.stderr, refused.stderr
    assert "Traceback" not in refused.stderr and refused.stdout == ""
