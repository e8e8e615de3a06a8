"""The comparison as its user starts it, with arms that are planted to be wrong: each is caught and named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import ROOT
from trainer.records import read_metrics


def compare(*arguments: str, timeout: float = 600, **environment: str) -> tuple[int, str]:
    command = [sys.executable, "scripts/compare.py", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=timeout, check=False)  # fmt: skip
    return done.returncode, done.stdout


# Read by Python's start-up in every worker: replaces the `compile` backends of three operations by faulty ones.
PLANTED = """
import sys
if "trainer.compare.worker" in sys.orig_argv:
    import os, signal
    import torch
    import fusions.fused_bias_dropout as add, fusions.fused_bias_gelu as gelu, fusions.fused_softmax as softmax
    kept, calls = [], [0]

    class TooSmall(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()
        @staticmethod
        def backward(ctx, grad):
            return 0.9 * grad

    def wrong_gradients(x, *args, **kwargs):
        return add.BACKENDS["bias_dropout_add"]["reference"](TooSmall.apply(x), *args, **kwargs)

    def leaks(x, *args, **kwargs):
        kept.append(x.detach().clone())
        return gelu.BACKENDS["bias_gelu"]["reference"](x, *args, **kwargs)

    def dies(x, *args, **kwargs):
        calls[0] += 1
        if calls[0] > 6 * 30:
            os.kill(os.getpid(), signal.SIGKILL)
        return softmax.BACKENDS["scale_mask_softmax"]["reference"](x, *args, **kwargs)

    add.BACKENDS["bias_dropout_add"]["compile"] = wrong_gradients
    gelu.BACKENDS["bias_gelu"]["compile"] = leaks
    softmax.BACKENDS["scale_mask_softmax"]["compile"] = dies
"""


def test_planted_faults_are_caught_and_named(tiny: Path) -> None:
    (tiny / "sitecustomize.py").write_text(textwrap.dedent(PLANTED))
    arms = {
        "nothing": "transformer.apply_rope_fusion=true",
        "wrong": "transformer.bias_dropout_fusion=compile",
        "leaky": "transformer.bias_activation_fusion=compile",
        "dying": "transformer.masked_softmax_fusion=compile",
    }
    command = [str(tiny / "tiny.yaml"), "run.device=cpu", "--rounds", "12", "--steps", "1", "--arm", "unfused"]
    for name, override in arms.items():
        command += ["--arm", name, override]
    code, output = compare(*command, PYTHONPATH=str(tiny))
    assert code == 1, output
    made = json.loads((tiny / "run/compare/report.json").read_text())
    found = {c["arm"]: c for c in made["comparisons"]}
    assert set(found) == {"nothing", "wrong", "leaky"}, output
    assert found["nothing"]["toggle_did_nothing"] and "nothing: the toggle did nothing" in output
    assert found["wrong"]["loss_safe"] is False and "NOT LOSS-SAFE" in found["wrong"]["sentence"]
    assert found["leaky"]["loss_safe"] is True and found["nothing"]["loss_safe"] is True
    assert any(f.startswith("leaky leaks memory") for f in made["faults"]) and not any(
        "wrong leaks" in f for f in made["faults"]
    )
    assert "SIGKILL" in made["dead"]["dying"] and "FAULT    dying died" in output
    assert all(len(arm["blocks"]) == 12 for arm in made["arms"] if arm["name"] in found)  # the others lost no round


def test_compiled_kernels_and_compiled_layers_against_plain_pytorch(tiny: Path) -> None:
    """Two processes, with dropout: the losses agree, what ran is counted, the parts add up, and the same arm twice is A/A."""
    code, output = compare(
        str(tiny / "tiny.yaml"), "run.device=cpu", "parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true",
        "transformer.hidden_dropout=0.1", "transformer.attention_dropout=0.1", "transformer.bias_dropout_fusion=true",
        "transformer.num_layers=2", "--fused-vs-unfused", "--rounds", "10", "--arm", "again", "transformer.bias_dropout_fusion=false",
        "training.compile_layers=false",
    )  # fmt: skip
    assert code == 0, output
    made = json.loads((tiny / "run/compare/report.json").read_text())
    eager, compiled, again = made["comparisons"]
    assert [c["loss_safe"] for c in (eager, compiled, again)] == [True, True, True] and made["faults"] == [], output
    assert again["identical_arms"] and "A/A" in again["sentence"] and not eager["identical_arms"]
    by_name = {arm["name"]: arm for arm in made["arms"]}
    assert by_name["again"]["losses"] == by_name["unfused"]["losses"]
    fused = {
        name: sum(site["fused"] for key, site in arm["counters"].items() if "optimizer" not in key)
        for name, arm in by_name.items()
    }
    assert fused == {"unfused": 0, "fused": 20 * 2 * 2 * 2, "unfused, compiled layers": 0, "again": 0}
    assert by_name["unfused, compiled layers"]["compiled"] != by_name["unfused"]["compiled"]
    parts = {(p["against"], r["site"]) for p in made["attribution"] for r in p["parts"]}
    assert ("unfused", "decoder.layers.*.self_attn_add") in parts and (
        "unfused, compiled layers",
        "decoder.layers.*",
    ) in parts
    operations = {(r["operation"], r["part"]) for r in by_name["fused"]["roofline"]}
    assert {("bias_dropout_add", "forward"), ("bias_dropout_add", "backward")} <= operations


def test_groups_take_turns_and_one_arm_cannot_be_built(tiny: Path) -> None:
    arms = tiny / "arms.yaml"
    arms.write_text(
        f"config: {tiny}/tiny.yaml\noverrides: [run.device=cpu, parallel.timeout_seconds=60]\nrounds: 8\nsteps: 1\narms:\n"
        "  one process: []\n"
        "  two processes: [parallel.tensor_parallel_size=2, parallel.sequence_parallel=true]\n"
        "  wider: {overrides: [transformer.ffn_hidden_size=512], environment: {FUSELINE_TEST: x}}\n"
        "  impossible: [transformer.bias_dropout_fusion=apex]\n"
    )
    code, output = compare("--arms", str(arms), "--rounds", "10", "--no-attribution", "--out", str(tiny / "out"))
    assert code == 1 and "impossible: can't run here" in output, output
    made = json.loads((tiny / "out/report.json").read_text())
    assert set(made["dead"]) == {"impossible"}, output
    two, wider = made["comparisons"]
    assert two["loss_safe"] is True and "losses can't be compared (transformer.ffn_hidden_size" in wider["sentence"], output
    by_name = {a["name"]: a for a in made["arms"]}
    assert by_name["two processes"]["machine"]["world_size"] == 2 and by_name["one process"]["machine"]["world_size"] == 1
    assert by_name["two processes"]["losses"] == pytest.approx(by_name["one process"]["losses"], rel=1e-5)


def test_mistakes_in_the_command_are_one_message(tiny: Path) -> None:
    config = str(tiny / "tiny.yaml")
    for arguments, words in (
        ([config], "expected two or more different names"),
        ([config, "--ablate", "--fused-vs-unfused"], "more than one shorthand"),
        ([config, "--arm", "a", "--arm", "b", "model.hiden=1"], "arm b: model.hiden"),
        (["--arm", "a", "--arm", "b"], "name the YAML of the job"),
        (["--runs", str(tiny), str(tiny)], "expected the folder of a finished run"),
        ([config, "--arm", "a", "--arm", "b", "--flags", "persist_layer_norm"], "none of them was given"),
        ([config, "--arm", "a", "--arm", "b", "--steps", "0"], "--steps: 0; expected 1 or more"),
        ([config, "--ablate", "--flags", "bias_droput_fusion"], "not a fusion flag"),
    ):
        code, output = compare(*arguments)
        assert code == 2 and words in output and "Traceback" not in output, output


def test_two_finished_runs_side_by_side(tiny: Path) -> None:
    for name, more in (("a", []), ("b", ["optimizer.learning_rate=2e-3", "transformer.persist_layer_norm=true"])):
        command = [sys.executable, "scripts/pretrain.py", str(tiny / "tiny.yaml"), "run.device=cpu", f"run.directory={tiny}/{name}",
                   "training.train_iters=12", *more]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    code, output = compare("--runs", str(tiny / "a"), str(tiny / "b"), "--out", str(tiny / "joined"))
    assert code == 0 and "did not take turns" in output, output
    assert (tiny / "a/environment.json").is_file()
    found = json.loads((tiny / "joined/runs.json").read_text())
    changed = found["config"]["optimizer.learning_rate"]
    assert (changed["a"], changed["b"]) == (1e-3, 2e-3)
    assert changed["a_from"].startswith("tiny.yaml:") and "command line" in changed["b_from"]
    timed = [
        r["tokens_per_second"] for r in read_metrics(tiny / "a/metrics.jsonl") if "loss" in r and not r["first_after_start"]
    ]
    assert found["iterations_timed"][0] == len(timed) and min(timed) <= found["tokens_per_second"][0]["50%"] <= max(timed)
    assert len(found["losses"][1]) == 12 and 'id="loss-curves"' in (tiny / "joined/runs.html").read_text()
