"""A report on the console, in files, and in wandb. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from configs.run import RunConfig
from trainer.compare.html import html_report
from trainer.compare.picture import draw
from trainer.compare.words import tables, verdict_lines
from trainer.log import Log
from trainer.records import start_wandb


def write_outputs(report: dict[str, Any], out: str, config: RunConfig, log: Log) -> None:
    """report.json, report.html and report.png in `out`; the verdict on the console; tables in wandb when it is on."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1, allow_nan=False))
    (folder / "report.html").write_text(html_report(report), encoding="utf-8")
    for table in tables(report):
        log.table(*table)
    for line in verdict_lines(report):
        log.line(line)
    draw(report, folder / "report.png")
    written = [folder / name for name in ("report.html", "report.json", "report.png") if (folder / name).is_file()]
    log.line(f"report: {', '.join(map(str, written))}")
    _to_wandb(report, config, folder, log)


def _to_wandb(report: dict[str, Any], config: RunConfig, folder: Path, log: Log) -> None:
    run = start_wandb(config, log, name=f"{config.run.name} compare", folder=folder)
    if run is None:
        return
    import wandb  # pyright: ignore[reportMissingImports]

    run.summary.update({"headline": report["headline"], "comparisons": report["comparisons"]})
    for title, header, rows in tables(report):
        run.log({title.partition(":")[0].lower(): wandb.Table(columns=list(header), data=[list(row) for row in rows])})
    run.log({"verdict": wandb.Image(str(folder / "report.png"))})
    run.finish()
