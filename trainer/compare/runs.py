"""Two finished runs side by side: what differs in configuration, fusions and environment, and what they measured.

Not a verdict: the runs didn't take turns, so the machine's mood is in the difference too. Imports no torch.
"""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from configs.load import load_config
from configs.section import ConfigError, Problem
from trainer.compare.charts import line_chart
from trainer.compare.html import plain_table
from trainer.compare.page import page
from trainer.compare.plan import differences
from trainer.compare.words import Table
from trainer.log import Log
from trainer.records import read_metrics

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
CAVEAT = "The runs did not take turns, so the machine's state is part of it; scripts/compare.py with arms gives a verdict"


def compare_runs(a: str, b: str, out: str, log: Log) -> int:
    """Print, and write runs.json and runs.html into `out` (B's folder when empty). Raises ConfigError for what is no run."""
    found = join_runs(a, b)
    folder = Path(out or b)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "runs.json").write_text(json.dumps(found, indent=1))
    for table in run_tables(found):
        log.table(*table)
    log.line(f"{found['headline']}. {CAVEAT}.")
    (folder / "runs.html").write_text(runs_html(found), encoding="utf-8")
    log.line(f"report: {folder / 'runs.html'}, {folder / 'runs.json'}")
    return 0


def join_runs(a: str, b: str) -> dict[str, Any]:
    """Everything that differs between two runs, and their metrics."""
    runs = [_read(Path(folder)) for folder in (a, b)]
    first, second = runs
    config = {
        key: {"a": values[0], "b": values[1], "a_from": first["sources"].get(key), "b_from": second["sources"].get(key)}
        for key, values in differences(first["config"], second["config"]).items()
    }
    plans = [{f"{d['flag']} @ {d['site']}": f"{d['runs']}" for d in run["plan"]["decisions"]} for run in runs]
    speeds = [_speed(run["metrics"]) for run in runs]
    found = {
        "runs": [a, b],
        "config": config,
        "fusions": {key: {"a": v[0], "b": v[1]} for key, v in differences(*plans).items()},
        "environment": {
            key: {"a": v[0], "b": v[1]} for key, v in differences(first["environment"], second["environment"]).items()
        },
        "tokens_per_second": [speed["tokens_per_second"] for speed in speeds],
        "iterations_timed": [speed["iterations"] for speed in speeds],
        "losses": [{r["iteration"]: r["loss"] for r in run["metrics"] if "loss" in r} for run in runs],
        "validation": [
            {r["iteration"]: r["validation_loss"] for r in run["metrics"] if "validation_loss" in r} for run in runs
        ],
    }
    return found | {"headline": _headline(found)}


def _read(folder: Path) -> dict[str, Any]:
    """A run's files. Raises ConfigError where the folder is not a run."""
    missing = [name for name in ("config.yaml", "fusions.json", "metrics.jsonl") if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            [Problem("--runs", f"{folder} has no {', '.join(missing)}; expected the folder of a finished run")]
        )
    environment = folder / "environment.json"
    return {
        "config": load_config(folder / "config.yaml").config.model_dump(),
        "sources": provenance((folder / "config.yaml").read_text()),
        "plan": json.loads((folder / "fusions.json").read_text()),
        "environment": json.loads(environment.read_text()) if environment.is_file() else {},
        "metrics": read_metrics(folder / "metrics.jsonl"),
    }


def provenance(text: str) -> dict[str, str]:
    """Where each value came from, from the comments of a run's config.yaml."""
    found: dict[str, str] = {}
    path: list[str] = []
    for line in text.splitlines():
        match = re.match(r"^( *)([\w\-]+):(?: .*?  # (.*))?$", line)
        if match:
            indent, key, source = match.groups()
            path = [*path[: len(indent) // 2], key]
            if source is not None:
                found[".".join(path)] = source
    return found


def _speed(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Quantiles of tokens per second over the iterations after the first one of each start."""
    values = [r["tokens_per_second"] for r in metrics if "tokens_per_second" in r and not r.get("first_after_start")]
    quantiles = {f"{q:.0%}": float(np.quantile(values, q)) for q in _QUANTILES} if values else {}
    return {"tokens_per_second": quantiles, "iterations": len(values)}


def _headline(found: dict[str, Any]) -> str:
    a, b = found["runs"]
    first, second = (speed.get("50%") for speed in found["tokens_per_second"])
    if not first or not second:
        return f"{a} and {b}: one of them has no timed iteration"
    return f"{b} ran at {second:,.0f} tokens/s, {a} at {first:,.0f} (medians): {second / first:.3f} times as fast"


def run_tables(found: dict[str, Any]) -> list[Table]:
    """The differences, and the metrics."""
    a, b = found["runs"]
    config = [
        (key, f"{_short(v['a'])}  [{v['a_from']}]", f"{_short(v['b'])}  [{v['b_from']}]")
        for key, v in found["config"].items()
    ]
    speed = [(f"tokens/s, {q}", *(f"{s.get(q, float('nan')):,.0f}" for s in found["tokens_per_second"]))
             for q in (f"{q:.0%}" for q in _QUANTILES)]  # fmt: skip
    speed.append(("iterations timed", *map(str, found["iterations_timed"])))
    for name, key in (("last loss", "losses"), ("last held-out loss", "validation")):
        speed.append((name, *(_last(values) for values in found[key])))
    tables: list[Table] = [("Configuration: what differs, and where each value came from", ("key", a, b), config)]
    for title, key in (("Fusions: what ran differently", "fusions"), ("Environment: what differs", "environment")):
        tables.append((title, ("", a, b), [(k, _short(v["a"]), _short(v["b"])) for k, v in found[key].items()]))
    return [*(table for table in tables if table[2]), ("Metrics", ("", a, b), speed)]


def runs_html(found: dict[str, Any]) -> str:
    """The same as a page, with loss and speed."""
    series = [(name, _by_iteration(losses)) for name, losses in zip(found["runs"], found["losses"], strict=True)]
    chart = line_chart(series, "iteration", "training loss per token (nats)")
    sections = [(f"part{n}", table[0].partition(":")[0], plain_table(*table)) for n, table in enumerate(run_tables(found))]
    sections.append(("losses", "Losses", f'<figure id="loss-curves">{chart}</figure>'))
    sections.append(("caveat", "What this is not", f"<p>{escape(CAVEAT)}.</p>"))
    return page(found["headline"], found["runs"], sections)


def _by_iteration(losses: dict[int, float]) -> list[float | None]:
    return [losses.get(number) for number in range(1, max(losses, default=0) + 1)]


def _last(values: dict[int, float]) -> str:
    return f"{values[max(values)]:.4f} at {max(values)}" if values else "-"


def _short(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value
