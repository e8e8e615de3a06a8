"""Intervals that hold what they promise, verdicts, and turns that are fair."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from trainer.compare import Budget, ContestantFailed, Pair, compare, estimate, log_ratios, paired_ratio, take_turns
from trainer.compare.statistics import _expanded_tail, corrected, fewest_rounds

RNG = np.random.default_rng(0)


def series(mean: float, noise: float, rounds: int = 20) -> list[float]:
    return list(mean * np.exp(noise * RNG.standard_normal(rounds)))


def test_a_clear_difference_is_seen_and_small_noise_is_none() -> None:
    assert paired_ratio(series(1.0, 0.01), series(0.9, 0.01)).verdict() == "faster"
    assert paired_ratio(series(0.9, 0.01), series(1.0, 0.01)).verdict() == "slower"
    assert paired_ratio(series(1.0, 0.005, 40), series(1.0, 0.005, 40)).verdict() == "no_difference"
    noisy = paired_ratio(series(1.0, 0.3), series(1.0, 0.3))
    assert noisy.verdict() == "inconclusive" and noisy.half_width > 0.02 and "inconclusive" in noisy.sentence("b", "a")


def test_drift_that_hits_both_arms_cancels() -> None:
    drift = np.linspace(1, 3, 20)
    result = paired_ratio(list(drift), list(drift / 1.1 * (1 + 0.005 * RNG.standard_normal(20))))
    assert result.verdict() == "faster" and result.ratio == pytest.approx(1.1, rel=0.01)


def test_a_ratio_and_its_inverse_say_the_same() -> None:
    a, b = series(1, 0.1), series(1.2, 0.1)
    there, back = paired_ratio(a, b), paired_ratio(b, a)
    assert there.ratio == pytest.approx(1 / back.ratio)
    assert there.interval == pytest.approx((1 / back.interval[1], 1 / back.interval[0]))
    assert there.half_width == pytest.approx(back.half_width)


@pytest.mark.parametrize("rounds", [8, 13, 20, 100])
@pytest.mark.parametrize("kind", ["normal", "heavy", "skewed", "bursts"])
def test_a_99_percent_interval_misses_one_in_a_hundred_at_most(kind: str, rounds: int) -> None:
    rng = np.random.default_rng(rounds)
    noise = {
        "normal": lambda: rng.standard_normal(rounds),
        "heavy": lambda: rng.standard_t(2, rounds),
        "skewed": lambda: rng.exponential(1, rounds) - math.log(2),
        "bursts": lambda: rng.standard_normal(rounds) * np.where(rng.random(rounds) < 0.2, 8, 0.3),
    }[kind]
    missed = 0
    for _ in range(2000):
        low, high = estimate(noise() * 0.01).interval
        missed += not low <= 1 <= high
    assert missed <= 35  # 20 expected at exactly 1 %, and 35 is beyond three standard deviations


def test_the_interval_is_the_bootstraps_in_the_limit_of_many_resamples() -> None:
    logs = np.random.default_rng(3).standard_normal(25) * 0.02
    tail = _expanded_tail(0.005, 25)
    rng = np.random.default_rng(0)
    medians = np.median(logs[rng.integers(0, 25, (400_000, 25))], axis=1)
    low, high = np.exp(np.quantile(medians, [tail, 1 - tail], method="inverted_cdf"))
    assert estimate(logs).interval == pytest.approx((low, high), abs=1e-12)


def test_the_percentile_is_students() -> None:
    # t at 0.5 % and 9 degrees of freedom is -3.2498; the normal distribution function of sqrt(10 / 9) times that.
    expected = 0.5 * math.erfc(math.sqrt(10 / 9) * 3.2498 / math.sqrt(2))
    assert _expanded_tail(0.005, 10) == pytest.approx(expected, rel=0.02)


def test_too_few_rounds_for_the_confidence_are_said_to_be_too_few() -> None:
    assert fewest_rounds(0.99) == 8 and corrected(0.99, 10) == pytest.approx(0.999)
    few = paired_ratio([2.0] * 7, [1.0] * 7)
    assert few.verdict() == "inconclusive" and "too few" in few.sentence("b", "a")
    assert paired_ratio([2.0] * 8, [1.0] * 8).verdict() == "faster"
    assert paired_ratio([2.0] * 8, [1.0] * 8, comparisons=10).verdict() == "inconclusive"


@pytest.mark.parametrize("pair", [([1.0, 2.0, 3.0], [1.0, 2.0]), ([1.0, 0.0], [1.0, 1.0]), ([1.0, math.nan], [1.0, 1.0])])
def test_series_that_do_not_pair_are_refused(pair: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError, match="same number, 1 or more|finite and above 0"):
        log_ratios(*pair)


def test_rounds_come_in_twos_of_opposite_order_and_everyone_has_every_place() -> None:
    order: list[str] = []
    contestants = {name: lambda name=name: order.append(name) or 1.0 for name in "abc"}
    take_turns(contestants, [], Budget(rounds=40))
    rounds = [order[i : i + 3] for i in range(0, 120, 3)]
    assert all(second == first[::-1] for first, second in zip(rounds[::2], rounds[1::2], strict=True))
    assert len({"".join(r) for r in rounds}) == 6


def test_the_two_of_a_pair_run_one_right_after_the_other() -> None:
    order: list[str] = []
    contestants = {name: lambda name=name: order.append(name) or 1.0 for name in "abcd"}
    take_turns(contestants, [Pair("b", "a"), Pair("c", "a"), Pair("d", "c")], Budget(rounds=20))
    rounds = [order[i : i + 6] for i in range(0, 120, 6)]
    assert all(second == first[::-1] for first, second in zip(rounds[::2], rounds[1::2], strict=True))
    assert {frozenset(r[i : i + 2]) for r in rounds for i in (0, 2, 4)} == {
        frozenset("ab"),
        frozenset("ac"),
        frozenset("cd"),
    }
    assert len({tuple(r) for r in rounds}) > 5


def test_a_contestant_that_fails_is_left_out_and_the_others_go_on() -> None:
    count = itertools.count()

    def fails() -> float:
        if next(count) == 5:
            raise ContestantFailed("disk on fire")
        return 1.0

    turns = take_turns({"a": lambda: 1.0, "b": fails, "c": lambda: 2.0}, [Pair("b", "a"), Pair("c", "a")], Budget(rounds=12))
    assert turns.failures == {"b": "disk on fire"}
    assert len(turns.order["b"]) == 5 and len(turns.order["c"]) == 12 and 17 <= len(turns.order["a"]) <= 18
    found = turns.estimate(Pair("c", "a"))
    assert found is not None and found.ratio == pytest.approx(0.5) and found.rounds == 12
    alone = take_turns({"a": lambda: 1.0, "b": fails}, [Pair("b", "a")], Budget(rounds=12))
    assert len(alone.order["b"]) == 12
    count = itertools.count(5)
    assert "no two arms" in take_turns({"a": lambda: 1.0, "b": fails}, [Pair("b", "a")], Budget(rounds=12)).ended


def test_until_resolved_goes_on_until_the_interval_is_narrow_or_time_is_out() -> None:
    rng = np.random.default_rng(0)

    def noisy(mean: float, noise: float) -> dict[str, object]:
        return {
            "a": lambda: float(np.exp(noise * rng.standard_normal())),
            "b": lambda: mean * float(np.exp(noise * rng.standard_normal())),
        }

    pair = Pair("b", "a")
    quick, slow = (take_turns(noisy(0.97, s), [pair], Budget(until_resolved=0.01)) for s in (0.002, 0.02))  # pyright: ignore
    few, many = quick.estimate(pair), slow.estimate(pair)
    assert few is not None and many is not None
    assert few.rounds == 20 < many.rounds and many.half_width <= 0.01 and many.verdict() == "faster"
    now = itertools.count()
    out = take_turns(noisy(1, 0.5), [pair], Budget(until_resolved=0.01, seconds=50), clock=lambda: next(now))  # pyright: ignore
    assert "time limit" in out.ended and out.rounds == 51


def test_any_two_callables_compare() -> None:
    x = np.random.default_rng(0).standard_normal(20_000)
    found = compare(lambda: [np.sort(x) for _ in range(4)], lambda: np.sort(x), rounds=12, block_seconds=0.002)
    assert found.verdict() == "faster" and found.ratio > 1.5 and found.rounds == 12
    with pytest.raises(ValueError, match="needs 8 or more"):
        compare(lambda: None, lambda: None, rounds=3)
