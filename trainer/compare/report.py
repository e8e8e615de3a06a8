"""The verdict of a comparison: a table, report.json from which it can be recomputed, and a picture. Imports no torch."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

from trainer.compare.plan import ComparisonPlan
from trainer.compare.statistics import paired_ratio
from trainer.log import Log

# Two correct kernels round differently, and training amplifies it; over the first 20 iterations this much is rounding.
LOSS_ITERATIONS, LOSS_TOLERANCE = 20, {"fp32": 1e-5, "bf16": 2e-2}


def compare_arms(arms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each arm after the first against the first: ratio, interval, verdict, agreement of losses."""
    base = arms[0]
    return [_compare(base, arm) for arm in arms[1:]]


def _compare(base: dict[str, Any], arm: dict[str, Any]) -> dict[str, Any]:
    result = paired_ratio(base["block_seconds_per_step"], arm["block_seconds_per_step"])
    pairs = list(zip(base["losses"], arm["losses"], strict=True))[:LOSS_ITERATIONS]
    drift = max(abs(a - b) / abs(b) if math.isfinite(a) and math.isfinite(b) else math.inf for b, a in pairs)
    tolerance = LOSS_TOLERANCE[base["config"]["training"]["precision"]]
    saved = statistics.median(base["block_seconds_per_step"]) - statistics.median(arm["block_seconds_per_step"])
    extra = arm["first_step_seconds"] - base["first_step_seconds"]
    nothing = _requested(base) != _requested(arm) and _ran(base) == _ran(arm)
    identical = _requested(base) == _requested(arm)
    sentence = result.sentence(arm["name"], base["name"])
    if identical:
        sentence = f"A/A, the same arm twice: {sentence}"
    if nothing:
        sentence = (
            f"{arm['name']}: the toggle did nothing: what was asked for differs from {base['name']}, what ran does not"
        )
    if drift > tolerance:
        sentence += f"; NOT LOSS-SAFE: losses differ by {drift:.1e} (rounding explains {tolerance:.0e})"
    return {
        "arm": arm["name"],
        "against": base["name"],
        "ratio": result.ratio,
        "interval": list(result.interval),
        "verdict": "did_nothing" if nothing else result.verdict,
        "smallest_visible": result.smallest_visible,
        "identical_arms": identical,
        "loss_max_relative_difference": drift,
        "loss_safe": drift <= tolerance,
        "break_even_iterations": round(extra / saved) if saved > 0 and extra > 0 else None,
        "sentence": sentence,
    }


def write_report(plan: ComparisonPlan, arms: list[dict[str, Any]], environment: dict[str, Any], log: Log) -> None:
    """Write report.json and report.png into the plan's folder and print the verdict."""
    comparisons = compare_arms(arms)
    out = Path(plan.out)
    out.mkdir(parents=True, exist_ok=True)
    report = {"comparisons": comparisons, "arms": arms, "environment": environment, "rounds": plan.rounds,
              "steps_per_block": plan.steps_per_block}  # fmt: skip
    (out / "report.json").write_text(json.dumps(report, indent=1))
    _picture(comparisons, arms, out / "report.png")
    by_name = {c["arm"]: c for c in comparisons}
    rows = []
    for arm in arms:
        seconds = statistics.median(arm["block_seconds_per_step"])
        comparison = by_name.get(arm["name"])
        rows.append(
            (
                arm["name"],
                f"{seconds * 1e3:.1f}",
                f"{_tokens(arm) / seconds:,.0f}",
                f"{arm['first_step_seconds']:.1f}",
                f"{comparison['ratio']:.3f} [{comparison['interval'][0]:.3f}, {comparison['interval'][1]:.3f}]"
                if comparison
                else "1",
                f"{comparison['loss_max_relative_difference']:.1e}" if comparison else "",
                str(sum(site["fused"] for site in arm["counters"].values())),
            )
        )
    header = ("arm", "ms/step", "tokens/s", "first step s", "speed ratio [95 %]", "loss difference", "fused calls")
    log.table(f"Comparison: {plan.rounds} rounds of {plan.steps_per_block} steps, in turns", header, rows)
    for comparison in comparisons:
        log.line(f"VERDICT  {comparison['sentence']}")
        if comparison["break_even_iterations"]:
            log.line(f"         compile time is paid back after {comparison['break_even_iterations']} iterations")
    for arm in arms:
        for site in arm["never_called"]:
            log.line(f"FAULT    {arm['name']}: {site} is active but was called zero times")
    log.line(f"report: {out / 'report.json'}, {out / 'report.png'}")


def _requested(arm: dict[str, Any]) -> list[Any]:
    return [(d["flag"], d["site"], d["asked"]) for d in arm["plan"]["decisions"]]


def _ran(arm: dict[str, Any]) -> tuple[Any, Any]:
    return [(d["flag"], d["site"], d["runs"]) for d in arm["plan"]["decisions"]], arm["counters"]


def _tokens(arm: dict[str, Any]) -> int:
    return arm["config"]["data"]["seq_length"] * arm["config"]["training"]["global_batch_size"]


def _picture(comparisons: list[dict[str, Any]], arms: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 1.8 + 0.7 * len(arms)), layout="constrained")
    for row, comparison in enumerate(comparisons):
        low, high = comparison["interval"]
        ratio = comparison["ratio"]
        left.errorbar(ratio, row, xerr=[[ratio - low], [high - ratio]], fmt="o", capsize=5, color="C0")
        left.annotate(f"{ratio:.3f}", (ratio, row), textcoords="offset points", xytext=(0, 8), ha="center")
    left.axvline(1, color="gray", linestyle="--", linewidth=1)
    left.set_yticks(range(len(comparisons)), [c["arm"] for c in comparisons])
    left.set_ylim(-0.6, len(comparisons) - 0.4)
    left.invert_yaxis()
    left.set(xlabel=f"speed over {arms[0]['name']} (above 1 is faster), 95 % interval", title="Verdict")
    for arm in arms:
        right.plot([s * 1e3 for s in arm["block_seconds_per_step"]], "o-", markersize=3, label=arm["name"])
    right.set(xlabel="round", ylabel="ms per step", title="Blocks, taken in turns")
    right.set_ylim(bottom=0)
    right.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
