"""The statistics of a comparison, and what a report says of arms made up for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from configs.section import ConfigError
from trainer.compare.plan import Arm, ComparisonPlan
from trainer.compare.report import compare_arms
from trainer.compare.statistics import paired_ratio

RNG = np.random.default_rng(0)


def series(mean: float, noise: float, rounds: int = 20) -> list[float]:
    return list(mean * (1 + noise * RNG.standard_normal(rounds)))


def test_a_clear_difference_is_seen_and_small_noise_is_none() -> None:
    assert paired_ratio(series(1.0, 0.01), series(0.9, 0.01)).verdict == "faster"
    assert paired_ratio(series(0.9, 0.01), series(1.0, 0.01)).verdict == "slower"
    assert paired_ratio(series(1.0, 0.005), series(1.0, 0.005)).verdict == "no_difference"
    noisy = paired_ratio(series(1.0, 0.3), series(1.0, 0.3))
    assert noisy.verdict == "inconclusive" and noisy.smallest_visible > 0.02 and "inconclusive" in noisy.sentence("b", "a")


def test_drift_that_hits_both_arms_cancels() -> None:
    drift = np.linspace(1, 3, 20)
    result = paired_ratio(list(drift), list(drift / 1.1 * (1 + 0.005 * RNG.standard_normal(20))))
    assert result.verdict == "faster" and result.ratio == pytest.approx(1.1, rel=0.01)


def test_two_equal_arms_are_seldom_called_different() -> None:
    wrong = sum(paired_ratio(series(1, 0.05), series(1, 0.05)).verdict in ("faster", "slower") for _ in range(200))
    assert wrong <= 24  # 5 % nominal; the bootstrap of a median of 20 is a little optimistic


def test_series_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="same number, 3 or more"):
        paired_ratio([1.0, 2.0, 3.0], [1.0, 2.0])


def arm(name: str, asked: bool, runs: str, seconds: float, losses: list[float], calls: int) -> dict:
    return {
        "name": name,
        "config": {"training": {"precision": "fp32", "global_batch_size": 4}, "data": {"seq_length": 32}},
        "plan": {"decisions": [{"flag": "f", "site": "s", "asked": asked, "runs": runs}]},
        "counters": {"f @ s": {"fused": calls, "reference": 10 - calls, "fallbacks": {}}},
        "never_called": [],
        "first_step_seconds": 1.0 + 5.0 * asked,
        "block_seconds_per_step": series(seconds, 0.005),
        "losses": losses,
    }


def test_a_toggle_that_did_nothing_gets_no_verdict() -> None:
    base = arm("off", False, "reference", 1.0, [5.0, 4.0], 0)
    (comparison,) = compare_arms([base, arm("on", True, "reference", 0.9, [5.0, 4.0], 0)])
    assert comparison["verdict"] == "did_nothing" and "the toggle did nothing" in comparison["sentence"]


def test_a_faster_arm_with_other_losses_is_marked() -> None:
    base = arm("off", False, "reference", 1.0, [5.0, 4.0], 0)
    good, bad = compare_arms(
        [base, arm("a", True, "compile", 0.9, [5.0, 4.00001], 10), arm("b", True, "compile", 0.9, [5.0, 4.1], 10)]
    )
    assert good["loss_safe"] and good["verdict"] == "faster" and good["break_even_iterations"] == pytest.approx(50, rel=0.1)
    assert not bad["loss_safe"] and "NOT LOSS-SAFE" in bad["sentence"]
    (nan,) = compare_arms([base, arm("c", True, "compile", 0.9, [5.0, float("nan")], 10)])
    assert not nan["loss_safe"] and "NOT LOSS-SAFE" in nan["sentence"]
    (same,) = compare_arms([base, arm("off again", False, "reference", 1.0, [5.0, 4.0], 0)])
    assert same["identical_arms"] and same["sentence"].startswith("A/A")


def test_arms_that_cannot_be_compared_are_named(tiny: Path) -> None:
    def plan(*arms: Arm) -> ComparisonPlan:
        return ComparisonPlan(str(tiny / "tiny.yaml"), [], list(arms))

    plan(Arm("a"), Arm("b", ["transformer.persist_layer_norm=true"])).check(1)
    for arms, words in (
        ([Arm("a"), Arm("b", ["transformer.hidden_size=128"])], "arm b: differs from a in more than fusion flags"),
        ([Arm("a"), Arm("b", ["transformer.hiden=1"])], "arm b: transformer.hiden"),
        ([Arm("a"), Arm("transformer.persist_layer_norm=true")], "an arm starts with its name"),
        ([Arm("a")], "two or more"),
        ([Arm("a"), Arm("a")], "two or more different names"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan(*arms).check(1)
