"""Paired ratios, a bootstrap interval, a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Verdict = Literal["faster", "slower", "no_difference", "inconclusive"]


@dataclass(frozen=True)
class PairedRatio:
    """Speed of an arm over its baseline: above 1 is faster. `interval` holds the median's 95 % bootstrap interval."""

    ratio: float
    interval: tuple[float, float]
    verdict: Verdict
    smallest_visible: float  # the smallest effect (fraction) that this measurement could have told from none

    def sentence(self, arm: str, against: str) -> str:
        """The verdict in words."""
        low, high = self.interval
        percent = f"{abs(self.ratio - 1):.1%} [{low - 1:+.1%}, {high - 1:+.1%}]"
        if self.verdict in ("faster", "slower"):
            return f"{arm} is {self.verdict} than {against} by {percent}"
        if self.verdict == "no_difference":
            return f"{arm} and {against}: no difference larger than {max(abs(low - 1), abs(high - 1)):.1%}"
        return (
            f"{arm} against {against} is inconclusive: the smallest effect we could have seen is {self.smallest_visible:.1%}"
        )


def paired_ratio(
    baseline_seconds: list[float], arm_seconds: list[float], *, equivalence: float = 0.02, resamples: int = 4000
) -> PairedRatio:
    """Compare two series of block times taken in turns: element i of both belongs to the same round.

    The ratio of each round is taken first, so that the machine's drift cancels; the interval is that of the median over
    rounds. It holds 1: `no_difference` where it is within ±`equivalence`, else `inconclusive`. Raises ValueError for
    series of unequal length or fewer than 3 rounds.
    """
    if len(baseline_seconds) != len(arm_seconds) or len(arm_seconds) < 3:
        raise ValueError(f"{len(baseline_seconds)} and {len(arm_seconds)} blocks; expected the same number, 3 or more")
    ratios = np.asarray(baseline_seconds) / np.asarray(arm_seconds)
    picks = np.random.Generator(np.random.PCG64(0)).integers(0, len(ratios), (resamples, len(ratios)))
    medians = np.median(ratios[picks], axis=1)
    low, high = (float(v) for v in np.quantile(medians, [0.025, 0.975]))
    verdict: Verdict = "faster" if low > 1 else "slower" if high < 1 else "inconclusive"
    if verdict == "inconclusive" and max(abs(low - 1), abs(high - 1)) <= equivalence:
        verdict = "no_difference"
    return PairedRatio(float(np.median(ratios)), (low, high), verdict, (high - low) / 2)
