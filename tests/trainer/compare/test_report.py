"""What a report says: guards, loss safety, memory, ablation; and that its figures can be recomputed from report.json."""

from __future__ import annotations

import json
import math
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from configs.load import load_config
from tests.trainer.compare.made_up import comparison
from trainer.compare.conductor import _references
from trainer.compare.html import html_report
from trainer.compare.outputs import write_outputs
from trainer.compare.parity import drift
from trainer.compare.report import make_report
from trainer.compare.words import verdict_lines
from trainer.log import Log


def report(tiny: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    return make_report(*comparison(tiny, **changes), ["compare.py"])


def find(found: dict[str, Any], arm: str) -> dict[str, Any]:
    return next(c for c in found["comparisons"] if c["arm"] == arm)


def test_a_sound_arm_is_faster_loss_safe_and_pays_back(tiny: Path) -> None:
    found = find(report(tiny), "all")
    assert found["verdict"] == "faster" and found["ratio"] == pytest.approx(1.25, rel=0.02) and found["loss_safe"] is True
    assert found["memory"]["verdict"] == "less" and "25.0% less peak memory" in found["sentence"]
    assert found["break_even_iterations"] == pytest.approx(3.02 / 0.02, rel=0.1)  # 3.92 - 0.90 s of compiling, 20 ms a step


def test_a_toggle_that_did_nothing_gets_no_verdict(tiny: Path) -> None:
    found = find(report(tiny, bias_dropout_fusion={"runs": False}), "bias_dropout_fusion")
    assert (
        found["toggle_did_nothing"] and found["verdict"] == "no_difference" and "the toggle did nothing" in found["sentence"]
    )
    assert not find(report(tiny), "bias_dropout_fusion")["toggle_did_nothing"]


def test_the_same_arm_twice_is_labelled(tiny: Path) -> None:
    off = {"bias_dropout_fusion": False, "bias_activation_fusion": False}
    found = find(report(tiny, bias_dropout_fusion={"asked": off, "seconds": 0.1}), "bias_dropout_fusion")
    assert found["identical_arms"] and not found["toggle_did_nothing"] and found["sentence"].startswith("A/A")
    assert found["verdict"] == "no_difference"


def test_a_fast_arm_with_other_losses_is_marked_wherever_it_is_named(tiny: Path) -> None:
    made = report(tiny, all={"drift": 1e-4})
    found = find(made, "all")
    assert found["loss_safe"] is False and "NOT LOSS-SAFE" in found["sentence"] and found["verdict"] == "faster"
    assert "NOT LOSS-SAFE" in made["headline"] and any("NOT LOSS-SAFE" in line for line in verdict_lines(made))
    assert html_report(made).count("NOT LOSS-SAFE") >= 3
    assert find(made, "bias_dropout_fusion")["loss_safe"] is True


def test_an_arm_whose_losses_are_no_numbers_is_not_safe_even_beside_its_like(tiny: Path) -> None:
    plan, measured = comparison(tiny)
    for name in ("none", "all"):
        measured.arms[name]["losses"] = [math.nan] * 20
    measured.noise["none"][0]["losses"] = [math.nan] * 20
    found = find(make_report(plan, measured, []), "all")
    assert found["loss_safe"] is False and "not finite" in found["sentence"]
    plan, measured = comparison(tiny, all={"drift": 1e-3})
    measured.noise["none"].append({"losses": [math.nan] * 20, "grad_norms": [1.0] * 20})
    assert find(make_report(plan, measured, []), "all")["loss_safe"] is False  # a run that failed is no floor


def test_the_mark_stays_where_the_other_arm_trains_differently(tiny: Path) -> None:
    plan, measured = comparison(tiny, all={"drift": 1e-3})
    measured.reference["none"] = "elsewhere"
    found = find(make_report(plan, measured, []), "all")
    assert found["loss_safe"] is False and "NOT LOSS-SAFE" in found["sentence"]


def test_an_unsafe_arm_is_marked_in_every_table(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, measured = comparison(tiny, bias_dropout_fusion={"drift": 1e-3})
    log = Log(rank=0)
    write_outputs(make_report(plan, measured, []), plan.out, load_config(tiny / "tiny.yaml", []).config, log)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  bias_dropout_fusion")]
    assert len(lines) == 3 and all("NOT LOSS-SAFE" in line or " NO" in line for line in lines)


def test_a_companion_of_a_flag_that_is_off_did_nothing(tiny: Path) -> None:
    plan, measured = comparison(tiny)
    config = load_config(tiny / "tiny.yaml", ["run.device=cpu", *measured.arms["none"]["overrides"],
                                              "transformer.memory_efficient_layer_norm=true"]).config  # fmt: skip
    measured.arms["all"] |= {key: measured.arms["none"][key] for key in ("plan", "counters")} | {
        "config": config.model_dump()
    }
    found = find(make_report(plan, measured, []), "all")
    assert found["toggle_did_nothing"] and found["break_even_iterations"] is None


def test_a_dollar_in_a_name_is_no_formula(tiny: Path) -> None:
    made = report(tiny)
    for c in made["comparisons"]:
        c["arm"] = "a$b^{$ <b>"
    made["headline"] = "a$b^{$ is faster"
    write_outputs(made, str(tiny / "out"), load_config(tiny / "tiny.yaml", []).config, Log(rank=1))
    assert (tiny / "out/report.png").stat().st_size > 5000
    made["comparisons"] = []
    write_outputs(made, str(tiny / "out"), load_config(tiny / "tiny.yaml", []).config, Log(rank=1))
    assert not (tiny / "out/report.png").exists()


def test_losses_are_compared_with_the_arm_of_the_fewest_fusions(tiny: Path) -> None:
    arms = {name: {"config": load_config(tiny / "tiny.yaml", overrides).config.model_dump()} for name, overrides in (
        ("fused", ["transformer.bias_dropout_fusion=true"]), ("unfused", []), ("other seed", ["training.seed=3"]))}  # fmt: skip
    assert _references(arms) == {"fused": "unfused", "unfused": "unfused", "other seed": "other seed"}


def test_losses_within_twice_the_noise_are_rounding_and_not_finite_ones_are_not() -> None:
    assert drift([2.0, 4.0], [2.0, 4.4]) == pytest.approx(0.1)
    assert drift([2.0, math.nan], [2.0, math.nan]) == 0 and math.isinf(drift([2.0, 4.0], [2.0, math.inf]))


def test_an_arm_that_leaks_and_one_that_died_are_faults(tiny: Path) -> None:
    plan, measured = comparison(tiny, all={"leak": 1 << 20})
    measured.dead["bias_dropout_fusion"] = "rank 1: RuntimeError: disk on fire"
    made = make_report(plan, measured, [])
    assert any("all leaks memory: each step leaves 1,048,576 bytes" in fault for fault in made["faults"])
    assert any("disk on fire" in fault for fault in made["faults"])
    assert [c["arm"] for c in made["comparisons"]] == ["all", "bias_activation_fusion"]
    assert made["ablation"]["flags"][0]["alone"] is None and made["ablation"]["product_of_singles"] is None
    assert "is not known" in made["ablation"]["sentence"] and html_report(made)


def test_arms_that_train_differently_have_no_loss_verdict(tiny: Path) -> None:
    plan, measured = comparison(tiny)
    changed = load_config(tiny / "tiny.yaml", ["run.device=cpu", "optimizer.learning_rate=3e-3"]).config.model_dump()
    measured.arms["all"]["config"] = changed
    measured.reference["all"] = "all"
    found = find(make_report(plan, measured, []), "all")
    assert found["loss_safe"] is None and "losses can't be compared (optimizer.learning_rate" in found["sentence"]


def test_the_parts_of_an_attribution_add_up_to_the_difference(tiny: Path) -> None:
    part = report(tiny)["attribution"][0]
    assert part["difference_ms"] == pytest.approx(-20, abs=1)
    assert sum(r["difference_ms"] for r in part["parts"]) == pytest.approx(part["difference_ms"], abs=1e-9)


def test_the_single_effects_are_set_against_the_joint_one(tiny: Path) -> None:
    found = report(tiny)["ablation"]
    assert found["product_of_singles"]["ratio"] == pytest.approx(100 / 90 * 100 / 95, rel=0.01)
    assert found["joint"]["ratio"] == pytest.approx(1.25, rel=0.01)
    assert "they help each other by" in found["sentence"]
    overlap = report(tiny, all={"seconds": 0.09})["ablation"]
    assert "they overlap by" in overlap["sentence"]


def test_the_figures_can_be_recomputed_from_the_json_alone(tiny: Path) -> None:
    """By hand, with NumPy: the medians of round-by-round ratios, and order statistics by the binomial distribution."""
    plan, measured = comparison(tiny)
    log = Log(rank=1)
    write_outputs(make_report(plan, measured, []), plan.out, load_config(tiny / "tiny.yaml", []).config, log)
    saved = json.loads((tiny / "out" / "report.json").read_text())
    arms = {a["name"]: a for a in saved["arms"]}
    for c in saved["comparisons"]:
        per_token = [
            {
                b["round"]: b["seconds_per_step"] / arms[name]["tokens_per_step"]
                for b in arms[name]["blocks"]
                if b["pair"] == f"{c['arm']} / {c['against']}"
            }
            for name in (c["against"], c["arm"])
        ]
        rounds = sorted(set(per_token[0]) & set(per_token[1]))
        ratios = np.sort([per_token[0][r] / per_token[1][r] for r in rounds])
        assert np.exp(np.median(np.log(ratios))) == pytest.approx(c["ratio"], abs=1e-12)
        n = len(ratios)
        covered = [sum(math.comb(n, j) / 2**n for j in range(k, n - k + 1)) for k in range(1, n // 2)]
        inside = [k for k, p in enumerate(covered, 1) if p >= c["confidence"]]  # the sign test's interval of a median
        low, high = c["interval"]
        assert np.isclose(ratios, low).any() and np.isclose(ratios, high).any()
        assert (
            abs(int(np.argmin(abs(ratios - low))) + 1 - inside[-1]) <= 1
        )  # the bootstrap's rank is the sign test's, or next to it
        assert c["verdict"] == ("faster" if low > 1 else "slower" if high < 1 else c["verdict"])
    assert (tiny / "out" / "report.png").stat().st_size > 5000


_VOID = {"meta", "link", "br", "wbr", "img", "input", "line", "polyline"}


class _Checker(HTMLParser):
    """Every element closed, no id twice, nothing that loads or runs."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids += [value or "" for key, value in attrs if key == "id"]
        assert not any(key in ("src", "onload", "onclick") for key, _ in attrs)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag


def test_the_page_is_well_formed_self_contained_and_escapes_what_it_is_given(tiny: Path) -> None:
    text = html_report(report(tiny, all={"drift": 1e-4}))
    checker = _Checker()
    checker.feed(text)
    assert checker.open == [] and len(set(checker.ids)) == len(checker.ids)
    assert not checker.tags & {"script", "img", "link", "iframe"} and "http" not in text.replace("http-equiv", "")
    assert "<made-up>" not in text and "&lt;made-up&gt;" in text and "<b>marks" not in text
    assert {"forest", "ablation-chart", "loss-curves", "loss-drift"} <= set(checker.ids)
    for number in ("1.25", "transformer.", "bias_gelu", "decoder.<wbr>"):
        assert number in text


def test_without_any_comparison_there_is_still_a_report(tiny: Path) -> None:
    plan, measured = comparison(tiny)
    measured.dead = dict.fromkeys(["all", "bias_dropout_fusion", "bias_activation_fusion"], "out of <memory>")
    made = make_report(plan, measured, [])
    assert made["headline"].startswith("No verdict") and made["comparisons"] == []
    write_outputs(made, plan.out, load_config(tiny / "tiny.yaml", []).config, Log(rank=1))
    assert "out of &lt;memory&gt;" in (tiny / "out" / "report.html").read_text()


def test_tables_and_picture_reach_wandb_when_it_is_on(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: dict[str, Any] = {}

    class Run:
        summary: dict[str, Any] = {}  # noqa: RUF012

        def log(self, values: dict[str, Any]) -> None:
            logged.update(values)

        def finish(self) -> None:
            logged["finished"] = True

    class Table:
        def __init__(self, columns: list[str], data: list[list[str]]):
            assert all(len(row) == len(columns) for row in data)

    fake = SimpleNamespace(init=lambda **settings: logged.update(settings) or Run(), Table=Table, Image=lambda path: path)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    plan, measured = comparison(tiny)
    config = load_config(tiny / "tiny.yaml", ["logging.wandb.mode=offline"]).config
    write_outputs(make_report(plan, measured, []), plan.out, config, Log(rank=1))
    assert logged["finished"] and {"arms", "comparisons", "ablation", "roofline of all", "verdict"} <= set(logged)
    assert logged["dir"] == str(tiny / "out") and "compare" in logged["name"]


def test_what_a_gpu_did_beside_the_blocks_is_told(tiny: Path) -> None:
    plan, measured = comparison(tiny)
    for number, block in enumerate(measured.arms["all"]["blocks"]):
        block["gpu"] = {"clock_mhz": 1900.0 + number, "temperature_c": 40.0, "power_w": 300.0}
    measured.arms["all"]["largest_micro_batch"] = 12
    text = html_report(make_report(plan, measured, []))
    assert "1,900 to 1,923 MHz" in text and "largest micro-batch" in text
