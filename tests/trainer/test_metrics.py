"""Numbers that mean what they say: G02, G04, G05, G06, G07, G08."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch

from configs.load import load_config
from fusions.registry import Counters
from trainer.log import Log
from trainer.metrics import Metrics, StepResult
from trainer.records import read_metrics


def metrics(tiny: Path, *overrides: str, world_size: int = 1, rank: int = 0) -> Metrics:
    config = load_config(tiny / "tiny.yaml", list(overrides)).config
    return Metrics(config, torch.device("cpu"), Counters(), Log(rank=rank), world_size, gemm_rate=1e9)


def result(loss: float) -> StepResult:
    return StepResult(torch.tensor(loss), torch.tensor(1.0), torch.tensor(0.0), 1e-3)


@pytest.mark.parametrize("interval", [1, 2, 10])
def test_G02_step_time_is_wall_time_over_steps_without_pauses(
    tiny: Path, interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("trainer.metrics.time.perf_counter", lambda: now[0])
    m = metrics(tiny, f"logging.log_interval={interval}")
    m.resume()
    for iteration in range(1, 21):
        now[0] += 0.02
        m.record(iteration, result(1.0))
        if iteration % 5 == 0:  # as the loop does: a validation, a checkpoint
            m.pause()
            now[0] += 0.5
            if iteration == 10:
                m.flush()
                now[0] += 0.25
            m.resume()
    m.close()
    times = [r["iteration_time_ms"] for r in read_metrics(tiny / "run" / "metrics.jsonl")]
    assert times == pytest.approx([20.0] * 20)


def test_G05_G04_tokens_count_the_global_batch_and_rates_the_processes(tiny: Path) -> None:
    one, four = metrics(tiny), metrics(tiny, world_size=4)
    for micro in (1, 2, 4):
        assert metrics(tiny, f"training.micro_batch_size={micro}").tokens == 4 * 32
    a, b = one._speed(0.5), four._speed(0.5)
    assert a["tokens_per_second"] == b["tokens_per_second"] == 256
    for key in ("tokens_per_second_per_device", "model_tflops_per_device", "mfu"):
        assert b[key] == a[key] / 4


@pytest.mark.parametrize("start", [1, 3])
def test_G06_each_line_is_its_own_iteration(tiny: Path, start: int, capsys: pytest.CaptureFixture) -> None:
    m = metrics(tiny, "logging.log_interval=1")
    m.resume()
    for iteration in range(start, start + 4):
        m.record(iteration, result(float(iteration)))
    m.close()
    rows = read_metrics(tiny / "run" / "metrics.jsonl")
    assert [(r["iteration"], r["loss"]) for r in rows] == [(i, float(i)) for i in range(start, start + 4)]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("iteration")]
    assert [float(line.split("loss ")[1].split()[0]) for line in lines] == [float(i) for i in range(start, start + 4)]


def test_negative_losses_and_repeated_iterations_are_kept(tiny: Path) -> None:
    for loss in (5.0, -2.0):
        m = metrics(tiny)
        m.resume()
        m.record(1, result(loss))
        m.close()
    assert [r["loss"] for r in read_metrics(tiny / "run" / "metrics.jsonl")] == [-2.0]  # the later one, after a resume


def test_G07_wandb_starts_once_on_rank_0_and_never_ends_a_run(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    calls: list[dict] = []
    logged: list[dict] = []
    run = types.SimpleNamespace(log=lambda row, step: logged.append(row), finish=lambda: None)
    fake = types.SimpleNamespace(init=lambda **kw: (calls.append(kw), run)[1])
    monkeypatch.setitem(sys.modules, "wandb", fake)
    on = "logging.wandb.mode=offline"
    for rank in (0, 1):
        m = metrics(tiny, on, rank=rank)
        m.resume()
        m.record(1, result(2.0))
        m.close()
    assert len(calls) == 1 and calls[0]["mode"] == "offline" and logged[0]["loss"] == 2.0
    assert metrics(tiny).wandb is None and len(calls) == 1
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    capsys.readouterr()
    assert metrics(tiny, on).wandb is None
    assert capsys.readouterr().out.count("wandb is off") == 1


@pytest.mark.parametrize(("patience", "wait"), [(600, 90), (20, 10)])
def test_G08_wandb_gives_up_before_the_ranks_that_wait_do(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, patience: int, wait: float
) -> None:
    calls: list[dict] = []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **kw: calls.append(kw)))
    metrics(tiny, "logging.wandb.mode=online", f"parallel.timeout_seconds={patience}")
    assert calls[0]["settings"]["init_timeout"] == wait
