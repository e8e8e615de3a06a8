"""The numbers of a run: metrics.jsonl always, the console, wandb when asked."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.run import RunConfig
from fusions.registry import Counters
from trainer.flops import flops_per_iteration, tokens_per_iteration
from trainer.log import Log
from trainer.records import start_wandb
from trainer.runtime import peak_memory_gib, synchronise


@dataclass(frozen=True)
class StepResult:
    """One iteration, as scalars on the device: the loss, norm before clipping, 1.0 where it was skipped; and, of a family with
    several losses, each of them by name."""

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    learning_rate: float
    parts: dict[str, Tensor] = field(default_factory=dict)
    loss_scale: Tensor | None = None  # of an fp16 run


class Metrics:
    """Collects iterations and writes them every `log_interval`, and after the first one (marked, since it compiles).

    Nothing is read from the device in between. A line's time is the wall time between two synchronised points divided by
    the iterations between them; a pause (validation, checkpoint) is taken out by `pause` and `resume`.
    """

    def __init__(
        self, config: RunConfig, device: torch.device, counters: Counters, log: Log, world_size: int, gemm_rate: float
    ):
        self.config, self.device, self.counters, self.log = config, device, counters, log
        self.world_size, self.gemm_rate = world_size, gemm_rate
        self.flops = flops_per_iteration(config)
        self.tokens = tokens_per_iteration(config)
        self._pending: list[tuple[int, StepResult]] = []
        self._start, self._spent, self._first = 0.0, 0.0, True
        self._times_ms: list[float] = []
        self.nonfinite_total = self._nonfinite_in_a_row = 0
        self.file = None if log.silent else _open(Path(config.run.path, "metrics.jsonl"))
        self.wandb = None if log.silent else start_wandb(config, log)

    def resume(self) -> None:
        """Start the clock."""
        synchronise(self.device)
        self._start = time.perf_counter() - self._spent
        self._spent = 0.0

    def pause(self) -> None:
        """Stop the clock for something that is not training."""
        synchronise(self.device)
        self._spent = time.perf_counter() - self._start

    def record(self, iteration: int, result: StepResult) -> None:
        """Note one iteration; write when it is time. Raises FloatingPointError after too many non-finite ones in a row."""
        self._pending.append((iteration, result))
        last = iteration == self.config.training.train_iters
        if self._first or last or iteration % self.config.logging.log_interval == 0:
            self._write()

    def flush(self) -> None:
        """Write what is pending: a checkpoint must not be ahead of the metrics. The clock must be stopped."""
        if self._pending:
            self._start = time.perf_counter() - self._spent
            self._write()
            self._spent = 0.0

    def _write(self) -> None:
        no_scale = torch.zeros((), device=self.device)
        scales = [no_scale if r.loss_scale is None else r.loss_scale for _, r in self._pending]
        columns = [[r.loss, r.grad_norm, r.skipped, *r.parts.values()] for _, r in self._pending]
        values = torch.stack([torch.stack([scale, *row]) for scale, row in zip(scales, columns, strict=True)]).tolist()
        synchronise(self.device)
        seconds = (time.perf_counter() - self._start) / len(self._pending)
        if not self._first:
            self._times_ms += [seconds * 1e3] * len(self._pending)
        rows = []
        for (iteration, result), (scale, loss, norm, skipped, *parts) in zip(self._pending, values, strict=True):
            # A loss scale that can still fall is looking for its place, not a fault.
            searching = result.loss_scale is not None and scale > self.config.training.loss_scale.minimum
            self._nonfinite_in_a_row = self._nonfinite_in_a_row + (not searching) if skipped else 0
            self.nonfinite_total += int(skipped)
            rows.append(
                {
                    "iteration": iteration,
                    "loss": loss,
                    **{f"{name}_loss": value for name, value in zip(result.parts, parts, strict=True)},
                    "grad_norm": norm,
                    "learning_rate": result.learning_rate,
                    "skipped": bool(skipped),
                    **({} if result.loss_scale is None else {"loss_scale": scale}),
                    **self._speed(seconds),
                    "first_after_start": self._first,
                }
            )
        rows[-1]["peak_memory_gib"] = round(peak_memory_gib(self.device), 4)
        rows[-1]["fusion_counters"] = self.counters.as_dict()
        self._emit(rows)
        self._pending, self._first = [], False
        self._start = time.perf_counter()
        if self._nonfinite_in_a_row >= self.config.training.max_nonfinite_iters:
            raise FloatingPointError(
                f"{self._nonfinite_in_a_row} iterations in a row were skipped (weights are unchanged): the gradient was not "
                "finite, or no token counted; look at the data, lower optimizer.learning_rate, or raise "
                "training.max_nonfinite_iters"
            )

    def _speed(self, seconds: float) -> dict[str, float]:
        per_device = self.flops / seconds / self.world_size
        return {
            "iteration_time_ms": seconds * 1e3,
            "tokens_per_second": self.tokens / seconds,
            "tokens_per_second_per_device": self.tokens / seconds / self.world_size,
            "model_tflops_per_device": per_device / 1e12,
            "mfu": per_device / self.gemm_rate,
        }

    def _emit(self, rows: list[dict[str, Any]]) -> None:
        if self.file:
            self.file.writelines(json.dumps(row) + "\n" for row in rows)
            self.file.flush()
        if self.wandb:
            for row in rows:
                self.wandb.log({k: v for k, v in row.items() if k != "fusion_counters"}, step=row["iteration"])
        last = rows[-1]
        note = "  (includes compilation and warm-up)" if last["first_after_start"] else ""
        skips = f"  loss scale {last['loss_scale']:.0f}" if "loss_scale" in last else ""
        skips += f"  skipped {self.nonfinite_total}" if self.nonfinite_total else ""
        parts = [f"{key.removesuffix('_loss')} {value:.4f}" for key, value in last.items() if key.endswith("_loss")]
        self.log.line(
            f"iteration {last['iteration']:>6}/{self.config.training.train_iters}  loss {last['loss']:.4f}  "
            f"{'(' + ', '.join(parts) + ')  ' if parts else ''}"
            f"grad_norm {last['grad_norm']:.3f}  lr {last['learning_rate']:.3e}  {last['iteration_time_ms']:.1f} ms  "
            f"{last['tokens_per_second']:,.0f} tokens/s  mfu {last['mfu']:.1%}{skips}{note}"
        )

    def validation(self, iteration: int, loss: float) -> None:
        """Record a held-out loss."""
        if self.file:
            self.file.write(json.dumps({"iteration": iteration, "validation_loss": loss}) + "\n")
            self.file.flush()
        if self.wandb:
            self.wandb.log({"validation_loss": loss}, step=iteration)
        self.log.line(f"iteration {iteration:>6}  validation loss {loss:.4f}")

    def median_iteration_ms(self) -> float | None:
        """Median over the iterations after the first; None where there was only one."""
        return statistics.median(self._times_ms) if self._times_ms else None

    def close(self) -> None:
        """Write what is pending and close the files."""
        if self._pending:
            self._write()
        if self.file:
            self.file.close()
        if self.wandb:
            self.wandb.finish()


def _open(path: Path) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    file = path.open("a", encoding="utf-8")
    if torn:  # a run killed while it wrote
        file.write("\n")
    return file
