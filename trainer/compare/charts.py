"""The charts of report.html, as HTML and SVG text: no script, no image, nothing from outside. Imports no torch.

Bars and intervals are boxes placed by percentages, so that they fit any width; lines are SVG. Every chart stands beside its
figures in text, and is hidden from screen readers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape


class Scale:
    """A range of values on a strip from 0 to 100 %."""

    def __init__(self, values: Iterable[float], include: float | None = None, margin: float = 0.08):
        finite = [v for v in values if v is not None and math.isfinite(v)]
        finite += [include] if include is not None else []
        low, high = min(finite, default=0.0), max(finite, default=1.0)
        pad = margin * (high - low) or 0.01
        self.low, self.high = low - pad, high + pad

    def axis(self, number: str = ".3g", mark: float = 1) -> str:
        """The strip's ends in numbers, and the line's."""
        at = self.at(mark)
        middle = f'<span style="left:{at:.1f}%">{mark:{number}}</span>' if 12 < at < 88 else ""
        ends = f"<span>{self.low:{number}}</span>{middle}<span>{self.high:{number}}</span>"
        return f'<div class="ticks" aria-hidden="true">{ends}</div>'

    def at(self, value: float) -> float:
        """Percent from the left, kept on the strip."""
        return max(0.0, min(100.0, 100 * (value - self.low) / (self.high - self.low)))


def interval_strip(scale: Scale, ratio: float, low: float | None, high: float | None, kind: str) -> str:
    """A dot with its interval, and a line at 1."""
    bar = ""
    if low is not None and high is not None:
        left, right = scale.at(low), scale.at(high)
        bar = f'<i class="bar" style="left:{left:.2f}%;width:{max(0.3, right - left):.2f}%"></i>'
    return (
        f'<div class="strip {kind}" aria-hidden="true"><i class="one" style="left:{scale.at(1):.2f}%"></i>{bar}'
        f'<i class="dot" style="left:{scale.at(ratio):.2f}%"></i></div>'
    )


def difference_strip(scale: Scale, difference: float) -> str:
    """A bar from 0 to the difference: to the left is time saved."""
    left, right = sorted((scale.at(0), scale.at(difference)))
    kind = "faster" if difference < 0 else "slower"
    return (
        f'<div class="strip {kind}" aria-hidden="true"><i class="one" style="left:{scale.at(0):.2f}%"></i>'
        f'<i class="block" style="left:{left:.2f}%;width:{right - left:.2f}%"></i></div>'
    )


def share_strip(share: float) -> str:
    """How much of the whole strip: 100 % is the copy bandwidth."""
    return (
        f'<div class="strip share" aria-hidden="true"><i class="block" style="left:0;width:{min(100.0, 100 * share):.1f}%">'
        "</i></div>"
    )


Series = tuple[str, Sequence[float | None]]
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 260, 62, 34, 10


def line_chart(series: Sequence[Series], x_label: str, y_label: str, log: bool = False, first: int = 1) -> str:
    """Lines over the iterations, each with a colour and a dash of its own, and a legend in text. None leaves a gap."""
    values = [v for _, line in series for v in line if v is not None and _drawable(v, log)]
    if not values:
        return f"<p>No value of {escape(y_label)} can be drawn.</p>"
    low, high, ticks = _log_axis(values) if log else _linear_axis(values)
    longest = max(len(line) for _, line in series)

    def x(index: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - 12) * index / max(1, longest - 1)

    def y(value: float) -> float:
        at = math.log10(value) if log else value
        return _TOP + (_HEIGHT - _BOTTOM - _TOP) * (1 - (at - low) / (high - low))

    grid = "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{y(t) + 4:.1f}" text-anchor="end">{t:.4g}</text>'
        for t in ticks
    )
    steps = sorted({0, (longest - 1) // 2, longest - 1})
    grid += "".join(f'<text x="{x(i):.1f}" y="{_HEIGHT - 16}" text-anchor="middle">{i + first}</text>' for i in steps)
    lines = "".join(
        f'<polyline class="line c{number % 8}" points="{points}"/>'
        for number, (_, line) in enumerate(series)
        for points in _runs(line, x, y, log)
    )
    legend = "".join(
        f'<li><svg width="34" height="8" aria-hidden="true"><polyline class="line c{n % 8}" points="1,4 33,4"/></svg>'
        f"{escape(name)}</li>"
        for n, (name, _) in enumerate(series)
    )
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(y_label)} over {escape(x_label)}">'
        f'{grid}{lines}<text x="{_WIDTH / 2}" y="{_HEIGHT - 2}" text-anchor="middle">{escape(x_label)}</text></svg>'
        f'<p class="axis">{escape(y_label)}</p><ul class="legend">{legend}</ul>'
    )


def _drawable(value: float | None, log: bool) -> bool:
    return value is not None and math.isfinite(value) and (not log or value > 0)


def _runs(line: Sequence[float | None], x: object, y: object, log: bool) -> list[str]:
    """The points of each stretch without a gap; a single point becomes a short stroke."""
    assert callable(x) and callable(y)
    runs: list[list[str]] = [[]]
    for index, value in enumerate(line):
        if _drawable(value, log):
            runs[-1].append(f"{x(index):.1f},{y(value):.1f}")
        elif runs[-1]:
            runs.append([])
    return [" ".join(run if len(run) > 1 else run * 2) for run in runs if run]


def _linear_axis(values: Sequence[float]) -> tuple[float, float, list[float]]:
    low, high = min(values), max(values)
    pad = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    low, high = low - pad, high + pad
    step = 10 ** math.floor(math.log10(high - low))
    step = next(s for s in (step / 5, step / 2, step, step * 2) if (high - low) / s <= 6)
    return low, high, [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _log_axis(values: Sequence[float]) -> tuple[float, float, list[float]]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    stride = max(1, (high - low) // 6)
    return low, high, [10.0**k for k in range(low, high + 1, stride)]
