"""`auto`: what is measured, what is chosen, where the times come from; and explain's --backends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusions import autotune, fused_adam, fused_bias_gelu, fused_linear_wgrad
from fusions.catalogue import OPERATIONS
from fusions.machine import Machine, probe
from fusions.registry import Facts, Request, resolve
from tests.conftest import ROOT
from tests.models.build import run_config
from trainer import auto
from trainer.log import Log

HERE = Machine("cpu", "", "2.13.0")


def request(machine: Machine = HERE) -> Request:
    facts = Facts(machine, "fp32", 1, False, (64, 32), (("bias", True), ("activation", "gelu_tanh")))
    return Request("bias_activation_fusion", "mlp", OPERATIONS["bias_gelu"], "auto", facts)


def test_every_correct_candidate_is_timed_and_a_wrong_one_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    times = autotune.measure(request(), torch.device("cpu"), rounds=3).times
    assert set(times) == {"reference", "compile"} and all(ms > 0 for ms in times.values())
    monkeypatch.setitem(
        fused_bias_gelu.BACKENDS["bias_gelu"], "compile", lambda x, b, a: fused_bias_gelu.reference(x, b, "gelu")
    )
    found = autotune.measure(request(), torch.device("cpu"), rounds=1)
    assert set(found.times) == {"reference"} and "isn't the reference's" in found.left_out["compile"]

    def fails(*_: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setitem(fused_bias_gelu.BACKENDS["bias_gelu"], "compile", fails)
    assert "no such instruction" in autotune.measure(request(), torch.device("cpu"), rounds=1).left_out["compile"]


@pytest.mark.parametrize(("operation", "backend"), [("adamw", "torch"), ("linear_wgrad", "addmm")])
def test_a_backend_that_leaves_nothing_behind_is_wrong(
    operation: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = Facts(HERE, "fp32", 1, False, (64, 32) if operation == "linear_wgrad" else (500,), (("inputs", 16),))
    asked = Request("flag", "site", OPERATIONS[operation], "auto", facts)
    assert backend in autotune.measure(asked, torch.device("cpu"), rounds=1).times
    if operation == "adamw":
        monkeypatch.setitem(fused_adam.BACKENDS["adamw"], "torch", lambda *_: None)
    else:
        monkeypatch.setattr(fused_linear_wgrad, "add_product", lambda *_: None)
        idle = lambda x, w, slot: fused_linear_wgrad._Linear.apply(x, w.detach(), slot, None)  # noqa: E731
        monkeypatch.setitem(fused_linear_wgrad.BACKENDS["linear_wgrad"], "addmm", idle)
    assert backend in autotune.measure(asked, torch.device("cpu"), rounds=1).left_out


@pytest.mark.parametrize(
    ("times", "chosen"),
    [({"reference": 2.0, "compile": 1.0}, "compile"), ({"reference": 1.0, "compile": 2.0}, "reference"),
     ({"reference": 1.0, "compile": 0.99}, "reference")],
)  # fmt: skip
def test_the_fastest_is_chosen_and_never_one_slower_than_the_reference(times: dict[str, float], chosen: str) -> None:
    decision = resolve([request()], strict=True, times={request().key: times}).decisions[0]
    assert decision.runs == chosen and not decision.fell_back
    assert f"compile {times['compile']:.3g} ms" in decision.why and "measured" in decision.why


def test_unmeasured_is_said() -> None:
    assert "not measured yet" in resolve([request()]).decisions[0].why


def test_times_are_measured_once_and_come_from_the_cache_then(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config, measured = run_config({"transformer.bias_activation_fusion": "auto"}), []

    def measure(request: Request, device: torch.device, log: Log) -> dict[str, float]:
        measured.append(request.key)
        return {"reference": 2.0, "compile": 1.0}

    monkeypatch.setattr(auto, "measure_here", measure)
    machine = probe("cpu")
    for _ in range(2):
        times = auto.auto_times(config, machine, torch.device("cpu"), {}, Log(rank=0))
    assert len(measured) == 1 and list(times.values()) == [{"reference": 2.0, "compile": 1.0}]
    other = Machine("cpu", "", "2.14.0")
    assert auto.cached_times(auto.auto_requests(config, other), other, 1) == {}  # another torch: measured again


def test_a_resume_takes_the_plan_of_the_checkpoint() -> None:
    config = run_config({"transformer.bias_activation_fusion": "auto"})
    requests = auto.auto_requests(config, HERE)
    saved = resolve(requests, times={requests[0].key: {"reference": 1.0, "compile": 3.0}}).as_dict()
    saved = json.loads(json.dumps(saved))
    assert auto.times_of_plan(requests, saved) == {requests[0].key: {"reference": 1.0, "compile": 3.0}}
    gone = Machine("cpu", "no compiler", "2.13.0")
    assert auto.times_of_plan(auto.auto_requests(config, gone), saved) == {}  # its choice can't be made here


def test_a_run_with_auto_shows_the_times_it_chose_by(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from configs.load import load_config
    from trainer.loop import train
    from trainer.setup import build_job, start

    monkeypatch.setenv("XDG_CACHE_HOME", str(tiny / "cache"))
    overrides = ["transformer.bias_activation_fusion=auto", "optimizer.fusion=auto", "training.train_iters=2"]
    loaded, log = load_config(tiny / "tiny.yaml", overrides), Log(rank=0)
    device, tp = start(loaded, log)
    train(build_job(loaded, device, tp, log))
    out = capsys.readouterr().out
    assert "auto: measuring 2 operation(s)" in out and "measured: " in out
    decisions = json.loads((tiny / "run/fusions.json").read_text())["decisions"]
    chosen = {d["flag"]: d for d in decisions if d["asked"] == "auto"}
    assert set(chosen["bias_activation_fusion"]["times_ms"]) == {"reference", "compile"}
    assert "torch" in chosen["optimizer.fusion"]["times_ms"]
    train(build_job(load_config(tiny / "tiny.yaml", [*overrides, "training.train_iters=3"]), device, tp, log))
    assert "measuring" not in capsys.readouterr().out


def test_explain_prints_every_backend_with_its_time_or_its_obstacles(tiny: Path) -> None:
    command = [sys.executable, "scripts/explain.py", str(tiny / "tiny.yaml"), "--backends", "--json"]
    environment = os.environ | {"CXX": "no-such-compiler"}  # so that an obstacle is seen too, and nothing is compiled
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    rows = {row["operation"]: row for row in json.loads(done.stdout)["backends"]}
    assert {"bias_dropout_add", "layer_norm", "bias_gelu", "scale_mask_softmax", "cross_entropy", "linear_wgrad"} <= set(
        rows
    )
    for row in rows.values():
        assert row["times_ms"]["reference"] > 0
        assert set(row["times_ms"]) | set(row["obstacles"]) >= {b.name for b in OPERATIONS[row["operation"]].backends}
    assert any("cpu" in why for why in rows["layer_norm"]["obstacles"]["apex"])
    assert "no-such-compiler is not on PATH" in rows["bias_gelu"]["obstacles"]["compile"][0]
