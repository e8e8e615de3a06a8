"""Several sources as one, by weight: a weight is a share of the samples."""

from __future__ import annotations

import numpy as np


def blend_counts(weights: list[float], samples: int) -> np.ndarray:
    """int64 [sources]: samples from each source, their sum `samples`, each within 1 of its share."""
    share = np.asarray(weights, np.float64) / np.sum(weights) * samples
    counts = np.floor(share).astype(np.int64)
    most_owed = np.argsort(counts - share, kind="stable")  # largest remainder first
    counts[most_owed[: samples - counts.sum()]] += 1
    return counts


class Blend:
    """Sample number -> (source, sample number in the source), evenly interleaved.

    Source k's j-th sample stands at (j + 0.5) / (its share), so every prefix of the run has the right proportions, and the
    assignment of a number does not depend on how many numbers are asked for: it repeats every `period` numbers.
    """

    def __init__(self, weights: list[float], period: int = 1 << 16):
        self.period = period
        self.counts = blend_counts(weights, period)
        source = np.repeat(np.arange(len(weights)), self.counts)
        within = np.concatenate([np.arange(count) for count in self.counts])
        order = np.argsort((within + 0.5) / np.repeat(np.maximum(self.counts, 1), self.counts), kind="stable")
        self._source, self._within = source[order], within[order]

    def locate(self, number: int) -> tuple[int, int]:
        """(source, sample number inside that source)."""
        round_, place = divmod(number, self.period)
        source = int(self._source[place])
        return source, int(round_ * self.counts[source] + self._within[place])
