"""Is an arm loss-safe? Its losses against the unfused arm's, beside how far rounding alone carries that one. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

FACTOR = 2.0  # an arm may drift so many times as far as rounding does
NOISE_RUNS = (1, 2)  # seeds of the runs whose initial weights are disturbed
_FP32_EPS = 2.0**-23  # losses are recorded in fp32


@dataclass(frozen=True)
class LossSafety:
    """Largest relative difference over the iterations, and the largest that rounding explains; of losses and of norms."""

    iterations: int
    loss_drift: float
    loss_floor: float
    norm_drift: float
    norm_floor: float

    @property
    def safe(self) -> bool:
        """Whether both stay within FACTOR times what rounding does."""
        return self.loss_drift <= FACTOR * self.loss_floor and self.norm_drift <= FACTOR * self.norm_floor

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "factor": FACTOR, "safe": self.safe}

    def sentence(self) -> str:
        """Why it isn't safe, with the figure that shows it most."""
        losses = self.loss_drift / self.loss_floor >= self.norm_drift / self.norm_floor or not math.isfinite(self.loss_drift)
        what, drift, floor = (
            ("losses", self.loss_drift, self.loss_floor) if losses else ("gradient norms", self.norm_drift, self.norm_floor)
        )
        return (
            f"NOT LOSS-SAFE: its {what} differ by {drift:.1e} within {self.iterations} iterations, and rounding explains "
            f"{floor:.1e}"
        )


def loss_safety(base: dict[str, Any], arm: dict[str, Any], noise: list[dict[str, Any]]) -> LossSafety:
    """Compare `losses` and `grad_norms` of an arm with those of the base and of its disturbed runs."""
    drifts = {}
    for key in ("losses", "grad_norms"):
        floor = max([drift(base[key], run[key]) for run in noise] + [_FP32_EPS])
        drifts[key] = (drift(base[key], arm[key]), floor)
    iterations = min(len(base["losses"]), len(arm["losses"]))
    return LossSafety(iterations, *drifts["losses"], *drifts["grad_norms"])


def drift(base: list[float], other: list[float]) -> float:
    """Largest relative difference of two series; infinite where only one of them is finite."""
    worst = 0.0
    for a, b in zip(base, other, strict=False):
        if math.isfinite(a) and math.isfinite(b):
            worst = max(worst, abs(a - b) / max(abs(a), 1e-12))
        elif math.isfinite(a) or math.isfinite(b):
            worst = math.inf
    return worst
