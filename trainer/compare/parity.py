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
    finite: bool = True

    @property
    def safe(self) -> bool:
        """Whether both stay within FACTOR times what rounding does, and are numbers at all."""
        if not self.finite:
            return False
        return self.loss_drift <= FACTOR * self.loss_floor and self.norm_drift <= FACTOR * self.norm_floor

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "factor": FACTOR, "safe": self.safe}

    def sentence(self) -> str:
        """Why it isn't safe, with the figure that shows it most."""
        if not self.finite:
            return f"NOT LOSS-SAFE: its loss or gradient norm is not finite within {self.iterations} iterations"
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

    def floor(key: str) -> float:
        return max([d for run in noise if math.isfinite(d := drift(base[key], run[key]))] + [_FP32_EPS])

    return LossSafety(
        iterations=min(len(base["losses"]), len(arm["losses"])),
        loss_drift=drift(base["losses"], arm["losses"]),
        loss_floor=floor("losses"),
        norm_drift=drift(base["grad_norms"], arm["grad_norms"]),
        norm_floor=floor("grad_norms"),
        finite=all(math.isfinite(value) for value in [*arm["losses"], *arm["grad_norms"]]),
    )


def judge(
    arms: dict[str, dict[str, Any]], noise: dict[str, list[dict[str, Any]]], name: str, reference: str
) -> dict[str, Any]:
    """An arm beside its reference arm, as plain data; `safe` is None where losses weren't measured."""
    if name == reference:
        return {"against": None, "safe": True}
    if not noise.get(reference) or "losses" not in arms[name]:
        return {"against": reference, "safe": None}
    found = loss_safety(arms[reference], arms[name], noise[reference])
    return {
        "against": reference,
        **found.as_dict(),
        "sentence": "" if found.safe else f"{found.sentence()} (against {reference})",
    }


def drift(base: list[float], other: list[float]) -> float:
    """Largest relative difference of two series; infinite where only one of them is finite."""
    worst = 0.0
    for a, b in zip(base, other, strict=False):
        if math.isfinite(a) and math.isfinite(b):
            worst = max(worst, abs(a - b) / max(abs(a), 1e-12))
        elif math.isfinite(a) or math.isfinite(b):
            worst = math.inf
    return worst
