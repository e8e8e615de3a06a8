"""report.html: one file that opens anywhere, offline, without a script. Imports no torch."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from trainer.compare.charts import Scale, difference_strip, interval_strip, line_chart, share_strip
from trainer.compare.page import page
from trainer.compare.report import compile_seconds
from trainer.compare.words import arms_table, gpu_words, interval, loss_mark, memory_words

_MOST_PARTS = 14  # rows of an attribution chart


def html_report(report: dict[str, Any]) -> str:
    """The whole page."""
    sections = [
        ("faults", "What is wrong", _faults(report)),
        ("verdicts", "Verdicts", _verdicts(report)),
        ("ablation", "Ablation", _ablation(report["ablation"], report["left_out"])),
        ("arms", "Arms", plain_table(*arms_table(report))),
        ("attribution", "Where the time goes", "".join(map(_attribution, report["attribution"]))),
        ("roofline", "How close the kernels are to the memory's speed", "".join(map(_roofline, report["arms"]))),
        ("losses", "Losses", _losses(report)),
        ("fusions", "Which kernels ran", _fusions(report)),
        ("method", "How it was measured", _method(report)),
    ]
    how, machine = report["how_measured"], report["environment"]
    facts = [
        report["config_path"],
        f"{how['rounds']} rounds",
        f"{how['familywise_confidence']:.0%} intervals",
        machine.get("device"),
        *([f"{machine['world_size']} process(es) of {machine['threads_per_process']} thread(s)"] if machine else []),
        *([f"torch {machine['torch']}"] if machine else []),
    ]
    return page(report["headline"], [str(fact) for fact in facts if fact], [s for s in sections if s[2]])


def _faults(report: dict[str, Any]) -> str:
    faults = [f"<li>{escape(fault)}</li>" for fault in report["faults"]]
    unsafe = [f"<li>{escape(c['sentence'])}</li>" for c in report["comparisons"] if c["loss_safe"] is False]
    return f'<ul class="faults">{"".join(faults + unsafe)}</ul>' if faults or unsafe else ""


def _verdicts(report: dict[str, Any]) -> str:
    """The forest plot: one row for each comparison."""
    found = report["comparisons"]
    if not found:
        return ""
    scale = Scale([v for c in found for v in (c["ratio"], *c["interval"]) if v is not None and v > 0], include=1)
    rows = []
    for c in found:
        low, high = c["interval"] if c["interval"][1] is not None else (None, None)
        words = "did nothing" if c["toggle_did_nothing"] else c["verdict"].replace("_", " ")
        extra = f"; pays back after {c['break_even_iterations']:,} iterations" if c["break_even_iterations"] else ""
        rows.append(
            f'<tr><th scope="row">{escape(c["arm"])}<small>against {escape(c["against"])}</small></th>'
            f'<td class="wide">{interval_strip(scale, c["ratio"], low, high, c["verdict"])}</td>'
            f"<td>{c['ratio']:.3f} <small>{interval(c['interval'])}</small></td>"
            f'<td><b class="badge {c["verdict"]}">{escape(words)}</b>{_loss_badge(c["loss_safe"])}</td>'
            f"<td>{escape(memory_words(c['memory']))}<small>peak memory{extra}</small></td></tr>"
        )
    sentences = "".join(f"<li>{escape(c['sentence'])}</li>" for c in found)
    caption = "Speed ratio of each arm over the one it is compared with; above 1 is faster. The line marks 1."
    rows.append(f'<tr><th></th><td class="wide">{scale.axis()}</td><td></td><td></td><td></td></tr>')
    heads = ("arm", "ratio and interval", "ratio", "verdict", "memory")
    return _chart_table("forest", caption, heads, rows) + f'<ul class="sentences">{sentences}</ul>'


def _loss_badge(safe: bool | None) -> str:
    if safe is None:
        return '<small class="mark">losses not comparable</small>'
    return "<small>loss-safe</small>" if safe else '<b class="badge slower">NOT LOSS-SAFE</b>'


def _ablation(ablation: dict[str, Any] | None, left_out: dict[str, str]) -> str:
    out = "".join(f"<li>{escape(flag)}: {escape(why)}</li>" for flag, why in left_out.items())
    out = (
        f"<details><summary>Flags left out, since they change nothing here</summary><ul>{out}</ul></details>" if out else ""
    )
    if ablation is None:
        return out
    effects = [e for row in ablation["flags"] for e in (row["alone"], row["last"]) if e]
    effects += [e for e in (ablation["product_of_singles"], ablation["joint"]) if e]
    scale = Scale([v for e in effects for v in (e["ratio"], *e["interval"]) if v], include=1)

    def row(name: str, how: str, effect: dict[str, Any] | None) -> str:
        if effect is None:
            return ""
        low, high = effect["interval"]
        kind = "faster" if low and low > 1 else "slower" if high and high < 1 else "no_difference"
        return (
            f'<tr><th scope="row">{escape(name)}<small>{how}</small></th>'
            f'<td class="wide">{interval_strip(scale, effect["ratio"], low if high else None, high, kind)}</td>'
            f"<td>{effect['ratio']:.3f} <small>{interval(effect['interval'])}</small></td></tr>"
        )

    rows = []
    for flag in ablation["flags"]:
        name = flag["flag"] + loss_mark(flag["loss_safe"])
        rows += [row(name, "added to none", flag["alone"]), row(name, "added to all the others", flag["last"])]
    if ablation["product_of_singles"]:
        rows.append(row("all single effects", "multiplied", ablation["product_of_singles"]))
    rows.append(row("all flags", "together", ablation["joint"]))
    rows.append(f'<tr><th></th><td class="wide">{scale.axis()}</td><td></td></tr>')
    sentence = ablation["sentence"][0].upper() + ablation["sentence"][1:]
    caption = "Speed ratio of switching a flag on, by itself and last."
    return f"<p>{escape(sentence)}.</p>" + _chart_table("ablation-chart", caption, ("flag", "effect", "ratio"), rows) + out


def _attribution(part: dict[str, Any]) -> str:
    shown = part["parts"][:_MOST_PARTS]
    scale = Scale([r["difference_ms"] for r in shown], include=0)
    rows = [_part_row(scale, r["site"], r["part"], r) for r in shown]
    rest = part["parts"][_MOST_PARTS:]
    if rest:
        total = {key: sum(r[key] for r in rest) for key in ("against_ms", "arm_ms", "difference_ms")}
        rows.append(_part_row(scale, f"{len(rest)} smaller parts", "", total))
    rows.append(_part_row(scale, "whole step", "", part))
    caption = (
        f"{part['arm']} against {part['against']}: milliseconds of a step by part of the model. Bars to the left are time saved; "
        "the parts add up to the step."
    )
    heads = ("site", "difference", "ms", escape(part["against"]), escape(part["arm"]))
    return _chart_table("", caption, heads, rows, "attribution-chart")


def _part_row(scale: Scale, site: str, part: str, r: dict[str, Any]) -> str:
    return (
        f'<tr><th scope="row">{escape(site).replace(".", ".<wbr>")}<small>{escape(part)}</small></th>'
        f'<td class="wide">{difference_strip(scale, r["difference_ms"])}</td>{_cell("ms", r["difference_ms"], "+.2f")}'
        f"{_cell('before', r['against_ms'])}{_cell('after', r['arm_ms'])}</tr>"
    )


def _cell(label: str, value: float, form: str = ".2f") -> str:
    """A figure, with its column's name for where there are no columns."""
    return f'<td data-label="{label}">{value:{form}}</td>'


def _roofline(arm: dict[str, Any]) -> str:
    if not arm.get("roofline"):
        return ""
    rows = [
        f'<tr><th scope="row">{escape(r["operation"])}<small>{escape(r["backend"])}, {r["part"]}</small></th>'
        f'<td class="wide">{share_strip(r["share_of_copy_bandwidth"])}</td><td>{r["share_of_copy_bandwidth"]:.0%}</td>'
        f"{_cell('GB/s', r['gigabytes_per_second'], '.1f')}{_cell('MiB', r['bytes'] / 2**20, ',.1f')}"
        f"{_cell('ms', r['ms'], '.3f')}{_cell('calls/step', r['calls_per_step'], 'g')}"
        f'<td data-label="bound by">{r["bound"]}</td>'
        f"{_cell('ms/step to win', r['headroom_ms'])}</tr>"
        for r in sorted(arm["roofline"], key=lambda r: -r["headroom_ms"])
    ]
    caption = (
        f"{arm['name']}: each fused operation at this run's shapes. The whole strip is the copy bandwidth measured in turns with "
        "it; the last column is what a step would gain at that speed, or at that of its products."
    )
    heads = (
        "operation",
        "share of copy bandwidth",
        "share",
        "GB/s",
        "MiB",
        "ms",
        "calls/step",
        "bound by",
        "ms/step to win",
    )
    return _chart_table("", caption, heads, rows, "roofline-chart")


def _losses(report: dict[str, Any]) -> str:
    arms = [arm for arm in report["arms"] if arm.get("losses")]
    if not arms:
        return ""
    curves = line_chart([(a["name"], a["losses"]) for a in arms], "iteration", "loss per token (nats)")
    words = "Losses of all arms, from the same initial weights."
    figures = f'<figure id="loss-curves">{curves}<figcaption>{words}</figcaption></figure>'
    by_name, drifts = {a["name"]: a for a in arms}, []
    for arm in arms:
        base = by_name.get(arm["loss_safety"].get("against") or "")
        if base:
            drifts.append((arm["name"], _relative(base["losses"], arm["losses"])))
    for name, runs in report["loss_noise"].items():
        if name in by_name:
            drifts += [
                (f"{name}, weights off by rounding", _relative(by_name[name]["losses"], run["losses"])) for run in runs[:1]
            ]
    if drifts:
        chart = line_chart(drifts, "iteration", "relative difference of the loss", log=True)
        figures += (
            f'<figure id="loss-drift">{chart}<figcaption>How far losses differ from those of the reference arm. An arm is '
            "loss-safe while it stays within twice what rounding the initial weights does.</figcaption></figure>"
        )
    return figures


def _relative(base: list[float | None], other: list[float | None]) -> list[float | None]:
    return [None if a is None or b is None else abs(a - b) / abs(a) for a, b in zip(base, other, strict=False)]


def _fusions(report: dict[str, Any]) -> str:
    parts = []
    for arm in report["arms"]:
        if "plan" not in arm:
            continue
        counters = arm["counters"]
        rows = []
        for d in arm["plan"]["decisions"]:
            counts = counters.get(f"{d['flag']} @ {d['site']}", {"fused": 0, "reference": 0})
            why = d["note"] or "; ".join(f"{o['kind']}: {o['text']} ({o['backend']})" for o in d["obstacles"])
            asked = str(d["asked"]).lower() if isinstance(d["asked"], bool) else d["asked"]
            rows.append((d["flag"], d["site"], asked, d["runs"], f"{counts['fused']} / {counts['reference']}", why))
        header = ("fusion", "site", "asked", "runs", "calls fused / reference", "why")
        table = plain_table(f"{arm['name']}: calls in {len(arm['losses'])} iterations", header, rows)
        parts.append(f"<details><summary>{escape(arm['name'])}</summary>{table}</details>")
    return "".join(parts)


def _method(report: dict[str, Any]) -> str:
    how = report["how_measured"]
    text = (
        f"Arms took turns in {how['rounds']} rounds (ended by: {how['ended']}), each turn {how['steps_per_block']} timed step(s) "
        "after untimed ones. The two of a comparison ran one right after the other, and rounds came in twos, an order and its "
        "reverse. The ratio is taken round by round; the figure is "
        f"their median, the interval its bootstrap at {how['confidence_of_each']:.2%}, so that all of them hold together with "
        f"{how['familywise_confidence']:.0%}. Losses are those of the first {how['loss_iterations']} iterations from the "
        "initial weights, with the same data and dropout masks. Peak memory is parameters, optimizer state and the most that a "
        "step allocates beside them. Compile time is the first step's excess over a usual one."
    )
    arms = [
        (
            arm["name"],
            " ".join(arm["overrides"]) or "-",
            str(arm["processes"]),
            " ".join(f"{k}={v}" for k, v in arm["environment"].items()) or "-",
            f"{compile_seconds(arm):.1f}" if arm.get("step_seconds") else "-",
            gpu_words(arm) or "-",
        )
        for arm in report["arms"]
    ]
    environment = json.dumps(report["environment"], indent=1)
    header = ("arm", "overrides", "processes", "environment", "compile s", "GPU: clock, temperature, power")
    return (
        f"<p>{escape(text)}</p>"
        + plain_table("What each arm was started with", header, arms)
        + f"<details><summary>Command and environment</summary><pre>{escape(' '.join(report['command']))}\n\n"
        f"{escape(environment)}</pre></details>" + "".join(f"<p>{escape(note)}.</p>" for note in report["notes"])
    )


def _chart_table(name: str, caption: str, heads: tuple[str, ...], rows: list[str], kind: str = "") -> str:
    head = "".join(f'<th scope="col">{h}</th>' for h in heads)
    marks = (f' id="{name}"' if name else "") + (f' data-chart="{kind}"' if kind else "")
    return (
        f'<figure{marks}><div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0"><table class="charted">'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></figure>"
    )


def plain_table(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table whose first column names the row."""
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in header)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return (
        f'<div class="scroll" role="region" aria-label="{escape(title)}" tabindex="0"><table><caption>{escape(title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
