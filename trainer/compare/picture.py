"""The main plot of a report as a PNG: ratios with their intervals, and the blocks they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_COLOURS = {"faster": "#1a7f5a", "slower": "#b3402e", "no_difference": "#5b6573", "inconclusive": "#9a6b00"}


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the picture; without any comparison there is none, nor an older one."""
    path.unlink(missing_ok=True)
    comparisons = report["comparisons"]
    if not comparisons:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.62 * len(comparisons)), layout="constrained")
    for row, comparison in enumerate(comparisons):
        ratio, (low, high), colour = comparison["ratio"], comparison["interval"], _COLOURS[comparison["verdict"]]
        if high is None:
            axes.plot(ratio, row, "x", color=colour)
        else:
            axes.errorbar(ratio, row, xerr=[[ratio - low], [high - ratio]], fmt="o", capsize=4, color=colour, lw=2, ms=7)
        words = "did nothing" if comparison["toggle_did_nothing"] else comparison["verdict"].replace("_", " ")
        mark = "" if comparison["loss_safe"] is not False else ", NOT LOSS-SAFE"
        axes.annotate(f"{ratio:.3f}  {words}{mark}", (ratio, row), xytext=(0, 9), textcoords="offset points", ha="center",
                      fontsize=9, color=colour)  # fmt: skip
    axes.axvline(1, color="#888888", linestyle="--", linewidth=1)
    labels = [_plain(f"{c['arm']}\nagainst {c['against']}") for c in comparisons]
    axes.set_yticks(range(len(comparisons)), labels, fontsize=9)
    axes.set_ylim(len(comparisons) - 0.5, -0.7)
    axes.margins(x=0.12)
    confidence = report["how_measured"]["familywise_confidence"]
    axes.set_xlabel(
        f"speed ratio, above 1 is faster; {confidence:.0%} interval over {report['how_measured']['rounds']} rounds"
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_plain(_wrapped(report["headline"])), fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _wrapped(text: str, width: int = 110) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))


def _plain(text: str) -> str:
    """A dollar sign is no formula."""
    return text.replace("$", r"\$")
