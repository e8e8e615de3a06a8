"""Paired ratios, their bootstrap interval, and a verdict that can say "inconclusive". NumPy only.

Two arms take turns; element i of both series belongs to the same round. The logarithm of each round's ratio is taken first, so
that the machine's drift cancels, and a ratio and its inverse weigh alike. The figure is the median over rounds, which rounds
that were disturbed can't move; its interval is the percentile bootstrap (Efron 1979), exactly, with percentiles widened for small
samples as Hesterberg describes ("What Teachers Should Know About the Bootstrap", 2015, arXiv:1411.5279, section 4.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Verdict = Literal["faster", "slower", "no_difference", "inconclusive"]
CONFIDENCE = 0.99
# An interval that holds 1 and was resolved to ±1 % lies within ±2 % of it.
EQUIVALENCE = 0.02


@dataclass(frozen=True)
class Estimate:
    """A median over rounds of logarithms, as a ratio, with its interval at `confidence`."""

    ratio: float
    interval: tuple[float, float]
    rounds: int
    confidence: float  # of this interval: already corrected for the number of comparisons

    @property
    def half_width(self) -> float:
        """Half the interval's width, as a fraction: the smallest effect that this measurement could have seen."""
        low, high = self.interval
        return math.inf if math.isinf(high) else math.sqrt(high / low) - 1 if low > 0 else math.inf

    def verdict(self, equivalence: float = EQUIVALENCE) -> Verdict:
        """faster, slower; `no_difference` where the whole interval is within ±`equivalence` of 1; else inconclusive."""
        low, high = self.interval
        if low > 1:
            return "faster"
        if high < 1:
            return "slower"
        return "no_difference" if max(1 - low, high - 1) <= equivalence else "inconclusive"

    def sentence(self, arm: str, against: str, equivalence: float = EQUIVALENCE) -> str:
        """The verdict in words."""
        low, high = self.interval
        verdict = self.verdict(equivalence)
        if verdict in ("faster", "slower"):
            effect, ends = abs(self.ratio - 1), sorted((abs(low - 1), abs(high - 1)))
            return f"{arm} is {effect:.1%} {verdict} than {against} ({ends[0]:.1%} to {ends[1]:.1%})"
        if verdict == "no_difference":
            return f"{arm} and {against}: no difference larger than {max(1 - low, high - 1):.1%}"
        if math.isinf(self.half_width):
            return f"{arm} against {against} is inconclusive: {self.rounds} rounds are too few for an interval"
        return f"{arm} against {against} is inconclusive: the smallest effect we could have seen is {self.half_width:.1%}"


def corrected(confidence: float, comparisons: int) -> float:
    """The confidence of each interval so that all of them hold together with `confidence` (Bonferroni)."""
    return 1 - (1 - confidence) / max(1, comparisons)


def fewest_rounds(confidence: float) -> int:
    """Rounds below which no interval of a median can hold `confidence`: all of them on one side has 2^(1 - n)."""
    return math.ceil(1 - math.log2(1 - confidence))


def log_ratios(baseline_seconds: Sequence[float], arm_seconds: Sequence[float]) -> NDArray[np.float64]:
    """log(baseline / arm) of each round, above 0 where the arm was faster. Raises ValueError for series that don't pair."""
    base, arm = np.asarray(baseline_seconds, float), np.asarray(arm_seconds, float)
    if base.shape != arm.shape or base.ndim != 1 or len(base) < 1:
        raise ValueError(f"{base.shape} and {arm.shape} blocks; expected two series of the same number, 1 or more")
    if not (np.all(np.isfinite(base)) and np.all(np.isfinite(arm)) and base.min() > 0 and arm.min() > 0):
        raise ValueError("block times must be finite and above 0 seconds")
    return np.log(base / arm)


def paired_ratio(
    baseline_seconds: Sequence[float], arm_seconds: Sequence[float], *, confidence: float = CONFIDENCE, comparisons: int = 1
) -> Estimate:
    """Speed of an arm over its baseline, above 1 is faster, from block times taken in turns.

    `comparisons`: how many are judged together; each interval is widened so that `confidence` holds for all of them.
    """
    return estimate(log_ratios(baseline_seconds, arm_seconds), corrected(confidence, comparisons))


def estimate(logs: NDArray[np.float64], confidence: float = CONFIDENCE) -> Estimate:
    """The median of per-round logarithms as a ratio, with its interval; (0, inf) where there are too few rounds for one."""
    n, middle = len(logs), float(np.exp(np.median(logs)))
    if n < fewest_rounds(confidence):
        return Estimate(middle, (0.0, math.inf), n, confidence)
    rank, ordered = _lower_rank(n, _expanded_tail((1 - confidence) / 2, n)), np.sort(logs)
    return Estimate(middle, (float(np.exp(ordered[rank - 1])), float(np.exp(ordered[n - rank]))), n, confidence)


@cache
def _lower_rank(n: int, tail: float) -> int:
    """The rank (from 1) of the value at the bootstrap's lower percentile; the upper one is its mirror image.

    A resample's median is one of the values themselves, and is at most the k-th with the probability that a binomial of n draws
    at k / n reaches the middle: the bootstrap in its limit of infinitely many resamples, without drawing any. (Of an even
    number the lower middle counts here and the upper one above, which widens the interval by a hair.)
    """
    middle, draws = (n + 1) // 2, np.arange(n + 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    choose = factorials[n] - factorials - factorials[::-1]
    for k in range(1, middle + 1):
        reached = np.exp(choose + draws * math.log(k / n) + (n - draws) * math.log1p(-k / n))[middle:].sum()
        if reached >= tail:
            return k
    return middle


def _expanded_tail(tail: float, n: int) -> float:
    """The percentile to read off: as far out as Student's t at n - 1 degrees of freedom, times sqrt(n / (n - 1)).

    The t quantile is Cornish and Fisher's expansion about the normal one (Abramowitz and Stegun 26.7.5).
    """
    z, v = NormalDist().inv_cdf(tail), n - 1
    t = z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    return NormalDist().cdf(math.sqrt(n / (n - 1)) * t)
