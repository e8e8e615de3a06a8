"""A report in words and tables: what the console, wandb and the page say alike. Imports no torch."""

from __future__ import annotations

from typing import Any

from trainer.compare.report import compile_seconds, median_step

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]  # title, header, rows
_LONGEST = 16  # rows of a table that is sorted by importance


def tables(report: dict[str, Any]) -> list[Table]:
    """The tables of a report: arms, comparisons, ablation, attribution, roofline."""
    found = [arms_table(report), comparisons_table(report)]
    if report["ablation"]:
        found.append(ablation_table(report["ablation"]))
    found += [attribution_table(part) for part in report["attribution"][:1]]
    found += [roofline_table(arm) for arm in report["arms"] if arm.get("roofline")]
    return found


def arms_table(report: dict[str, Any]) -> Table:
    """Speed and memory of each arm."""
    rows = []
    gpu = any("largest_micro_batch" in arm for arm in report["arms"])
    for arm in report["arms"]:
        if not arm.get("blocks") or arm["name"] in report["dead"]:
            word = "died" if arm["name"] in report["dead"] else "not measured"
            rows.append((arm["name"], word, "", "", "", "", *([""] if gpu else [])))
            continue
        seconds, memory = median_step(arm), arm.get("memory")
        rows.append(
            (
                arm["name"] + loss_mark(arm["loss_safety"]["safe"]),
                f"{seconds * 1e3:.1f}",
                f"{arm['tokens_per_step'] / seconds:,.0f}",
                mebibytes(max(memory["peak_bytes"])) if memory else "",
                f"{compile_seconds(arm):.1f}",
                f"{calls_per_step(arm):g}",
                *([str(arm.get("largest_micro_batch", ""))] if gpu else []),
            )
        )
    how = report["how_measured"]
    title = f"Arms: {how['rounds']} rounds of {how['steps_per_block']} step(s), in turns"
    header = ("arm", "ms/step", "tokens/s", "peak MiB", "compile s", "fused calls/step")
    return title, (*header, *(["largest micro-batch"] if gpu else [])), rows


def gpu_words(arm: dict[str, Any]) -> str:
    """The range of clock, temperature and power beside an arm's blocks, or why they are not known; "" on a CPU."""
    states = [block["gpu"] for block in arm.get("blocks", []) if block["gpu"]]
    if not states or "unknown" in states[0]:
        return states[0]["unknown"] if states else ""
    units = {"clock_mhz": "MHz", "temperature_c": "°C", "power_w": "W"}
    ends = ((min(s[key] for s in states), max(s[key] for s in states), unit) for key, unit in units.items())
    return ", ".join(f"{low:,.0f} to {high:,.0f} {unit}" for low, high, unit in ends)


def calls_per_step(arm: dict[str, Any]) -> float:
    """Calls of fused kernels in one step."""
    return sum(site["fused"] for site in arm["counters"].values()) / len(arm["losses"])


def comparisons_table(report: dict[str, Any]) -> Table:
    """Ratio, interval and verdict of each comparison."""
    rows = [
        (
            c["arm"],
            c["against"],
            f"{c['ratio']:.3f}",
            interval(c["interval"]),
            "did nothing" if c["toggle_did_nothing"] else c["verdict"].replace("_", " "),
            memory_words(c["memory"]),
            {True: "yes", False: "NO", None: "not comparable"}[c["loss_safe"]],
        )
        for c in report["comparisons"]
    ]
    each = report["how_measured"]["confidence_of_each"]
    title = f"Comparisons: {report['how_measured']['familywise_confidence']:.0%} intervals, all together ({each:.2%} each)"
    return title, ("arm", "against", "speed ratio", "interval", "verdict", "peak memory", "loss-safe"), rows


def interval(ends: list[float | None]) -> str:
    """[low, high]; "-" where there were too few rounds."""
    return "-" if ends[1] is None else f"[{ends[0]:.3f}, {ends[1]:.3f}]"


def memory_words(memory: dict[str, Any] | None) -> str:
    """How much less or more."""
    if memory is None:
        return ""
    return "same" if memory["verdict"] == "no_difference" else f"{abs(1 - 1 / memory['ratio']):.1%} {memory['verdict']}"


def mebibytes(count: float) -> str:
    """With one decimal."""
    return f"{count / 2**20:,.1f}"


def loss_mark(safe: bool | None) -> str:
    """What no speed of an arm with other losses is told without."""
    return " (NOT LOSS-SAFE)" if safe is False else ""


def ablation_table(ablation: dict[str, Any]) -> Table:
    """The effect of each flag by itself, and beside all the others."""

    def cell(effect: dict[str, Any] | None) -> str:
        return "" if effect is None else f"{effect['ratio']:.3f} {interval(effect['interval'])}"

    rows = [(row["flag"] + loss_mark(row["loss_safe"]), cell(row["alone"]), cell(row["last"])) for row in ablation["flags"]]
    return "Ablation: speed ratio of adding a flag", ("flag", "to none", "to all the others"), rows


def attribution_table(part: dict[str, Any]) -> Table:
    """Where the difference of a pair comes from, the largest first; small parts together."""
    shown, rest = part["parts"][:_LONGEST], part["parts"][_LONGEST:]
    rows = [(r["site"], r["part"], *_ms(r)) for r in shown]
    if rest:
        total = {key: sum(r[key] for r in rest) for key in ("against_ms", "arm_ms", "difference_ms")}
        rows.append((f"{len(rest)} smaller parts", "", *_ms(total)))
    rows.append(("whole step", "", *_ms(part)))
    return (
        f"Where {part['arm']} differs from {part['against']}: ms of a step",
        ("site", "part", part["against"], part["arm"], "difference"),
        rows,
    )


def _ms(row: dict[str, Any]) -> tuple[str, str, str]:
    return f"{row['against_ms']:.2f}", f"{row['arm_ms']:.2f}", f"{row['difference_ms']:+.2f}"


def roofline_table(arm: dict[str, Any]) -> Table:
    """Each fused operation beside a copy of as many bytes."""
    rows = [
        (
            row["operation"],
            row["backend"],
            row["part"],
            f"{row['calls_per_step']:g}",
            mebibytes(row["bytes"]),
            f"{row['ms']:.3f}",
            f"{row['gigabytes_per_second']:.1f}",
            f"{row['share_of_copy_bandwidth']:.0%}",
            row["bound"],
            f"{row['headroom_ms']:.2f}",
        )
        for row in sorted(arm["roofline"], key=lambda row: -row["headroom_ms"])
    ]
    header = ("operation", "backend", "part", "calls/step", "MiB", "ms", "GB/s", "of copy", "bound by", "ms/step to win")
    return f"Roofline of {arm['name']}: fused operations at this run's shapes", header, rows


def verdict_lines(report: dict[str, Any]) -> list[str]:
    """The verdicts in words, and everything that is wrong."""
    lines = [f"FAULT    {fault}" for fault in report["faults"]]
    for comparison in report["comparisons"]:
        lines.append(f"VERDICT  {comparison['sentence']}")
        if comparison["break_even_iterations"]:
            lines.append(f"         its compile time is paid back after {comparison['break_even_iterations']:,} iterations")
    if report["ablation"]:
        lines.append(f"ABLATION {report['ablation']['sentence']}")
    return lines + [f"NOTE     {note}" for note in report["notes"]]
