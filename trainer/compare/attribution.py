"""Which part of the model the difference between two arms comes from: parts that add up to it. Imports no torch."""

from __future__ import annotations

import re
import statistics
from typing import Any

from trainer.compare.turns import Pair

_LAYER = re.compile(r"^(.*?\.\*)\..*$")  # decoder.layers.*.mlp -> decoder.layers.*


def attribution(arms: dict[str, dict[str, Any]], pair: Pair) -> dict[str, Any] | None:
    """Milliseconds of each part in both arms, and their difference; None where one has no profile.

    A part is a fusion site's forward or backward, or a phase of the step that belongs to no site. A profiler slows a step
    down, so a part is its share of the profiled steps times the measured step: the parts add up to the medians of both
    arms' blocks in this comparison.
    """
    both = [arms[pair.against], arms[pair.arm]]
    if not all(arm.get("profiles") and arm.get("blocks") for arm in both):
        return None
    layers_whole = any(arm["config"]["training"]["compile_layers"] for arm in both)
    base, mine = (_parts(arm, pair, layers_whole) for arm in both)
    rows = []
    for site, part in dict.fromkeys([*base, *mine]):
        before, after = base.get((site, part), 0.0), mine.get((site, part), 0.0)
        rows.append({"site": site, "part": part, "against_ms": before, "arm_ms": after, "difference_ms": after - before})
    rows.sort(key=lambda row: -abs(row["difference_ms"]))
    totals = [sum(row[key] for row in rows) for key in ("against_ms", "arm_ms", "difference_ms")]
    return {
        "arm": pair.arm,
        "against": pair.against,
        "parts": rows,
        "against_ms": totals[0],
        "arm_ms": totals[1],
        "difference_ms": totals[2],
    }


def _parts(arm: dict[str, Any], pair: Pair, layers_whole: bool) -> dict[tuple[str, str], float]:
    """(site, part) -> ms, from the medians over the profiles. `layers_whole`: a layer is one site, as it is when compiled."""
    shares: dict[tuple[str, str], list[float]] = {}
    for profile in arm["profiles"]:
        found: dict[tuple[str, str], float] = {}
        for site, parts in profile["sites"].items():
            site = _LAYER.sub(r"\1", site) if layers_whole else site
            for part, seconds in parts.items():
                found[site, part] = found.get((site, part), 0.0) + seconds
        found |= {(phase, "rest"): seconds for phase, seconds in profile["phases"].items()}
        for key, seconds in found.items():
            shares.setdefault(key, []).append(seconds / profile["total"])
    medians = {key: statistics.median(values) for key, values in shares.items() if any(values)}
    step_ms = statistics.median(b["seconds_per_step"] for b in arm["blocks"] if b["pair"] == pair.key) * 1e3
    return {key: share / sum(medians.values()) * step_ms for key, share in medians.items()}
