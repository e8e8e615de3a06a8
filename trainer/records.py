"""What a run leaves behind, read again: its metrics, its picture; and the wandb run it may have. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from configs.run import RunConfig
from trainer.log import Log


def start_wandb(config: RunConfig, log: Log, name: str = "", folder: str | Path = "") -> Any:
    """One wandb run per job, or None: not asked for, not installed, or not reachable (said once).

    Under the run's name and in its folder, unless others are given. It gives up well before the ranks that wait for this one do.
    """
    if config.logging.wandb.mode == "disabled":
        return None
    try:
        import wandb  # pyright: ignore[reportMissingImports]  an optional extra

        return wandb.init(
            project=config.logging.wandb.project,
            name=name or config.run.name,
            mode=config.logging.wandb.mode,
            dir=str(folder or config.run.path),
            config=config.model_dump(),
            settings={"init_timeout": min(90.0, config.parallel.timeout_seconds / 2)},
        )
    except Exception as error:  # wandb's failures must not end a training run
        log.line(f"wandb is off: {type(error).__name__}: {error}. Install it with pip install 'fuseline[wandb]'.")
        return None


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl. Where an iteration was done again after a resume, the later row counts."""
    rows: dict[tuple[int, bool], dict[str, Any]] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # a line torn by a kill; its iteration was done again
            continue
        rows[row["iteration"], "validation_loss" in row] = row
    return [rows[key] for key in sorted(rows)]


def plot_losses(run_path: str | Path) -> Path:
    """Draw training and validation loss of a run into loss.png."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read_metrics(Path(run_path, "metrics.jsonl"))
    train = [(r["iteration"], r["loss"]) for r in rows if "loss" in r]
    valid = [(r["iteration"], r["validation_loss"]) for r in rows if "validation_loss" in r]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(*zip(*train, strict=True), linewidth=1.2, label="training (each iteration)")
    if valid:
        axes.plot(*zip(*valid, strict=True), "o-", markersize=5, label=f"held out, last {valid[-1][1]:.3f}")
    axes.set(xlabel="iteration", ylabel="loss per token (nats)", title=str(Path(run_path).name))
    axes.grid(alpha=0.3)
    axes.legend()
    path = Path(run_path, "loss.png")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
