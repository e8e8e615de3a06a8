"""Are the verdicts true? Comparisons whose answer is known, on real training steps, while the other cores are busy at random.

python scripts/bench_verdict.py [--equal 100] [--slower 40] [--quiet] [--json FILE]

A block is forward and backward of a GPT layer's MLP, 33 times over. In an A/A comparison "faster" or "slower" is an error. In the
others the arm's block holds 34 of the same, which makes it exactly 1/33 = 3.03 % slower: the verdict must be "slower", and the
interval must hold 33/34. Each comparison goes on until its 99 % interval is within ±1 %, as `--until-resolved 1%` does.
The process has one thread; a second process keeps the other cores busy in bursts of random length.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from configs.load import load_config
from trainer.compare import Budget, Estimate, Pair, take_turns
from trainer.log import Log
from trainer.runtime import keep_freed_memory
from trainer.setup import build_job, start

PIECES, EXTRA = 33, 1
TINY = ["model.vocab_size=128", "model.max_position_embeddings=32", "data.seq_length=32", "transformer.num_layers=1",
        "transformer.hidden_size=64", "transformer.num_attention_heads=4", "training.micro_batch_size=2",
        "training.global_batch_size=2", "run.device=cpu"]  # fmt: skip


def tiny_piece() -> Callable[[], None]:
    """Forward and backward of the MLP of a one-layer GPT."""
    loaded, silent = load_config("configs/gpt/bench.yaml", TINY), Log(rank=1)
    job = build_job(loaded, *start(loaded, silent), silent)
    torch.set_num_threads(1)
    model: Any = job.model
    mlp, hidden = model.decoder.layers[0].mlp, torch.randn(8, 2, loaded.config.transformer.hidden_size, requires_grad=True)

    def piece() -> None:
        out, bias = mlp(hidden)
        (out + bias).sum().backward()

    return piece


def keep_busy(cores: list[int]) -> None:
    """Products and pauses of 0.05 to 2 seconds, for ever."""
    if cores:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(max(1, len(cores)))
    x, chance = torch.randn(512, 512), random.Random(0)
    while True:
        end = time.perf_counter() + chance.uniform(0.05, 2)
        while time.perf_counter() < end:
            torch.mm(x, x)
        time.sleep(chance.uniform(0.05, 2))


def block(piece: Callable[[], None], count: int) -> Callable[[], float]:
    """A contestant: so many pieces, once untimed, once timed."""

    def run() -> float:
        begin = 0.0
        for _ in range(2):
            begin = time.perf_counter()
            for _ in range(count):
                piece()
        return time.perf_counter() - begin

    return run


def one_comparison(piece: Callable[[], None], extra: int, until: float, limit: float) -> Estimate:
    """The estimate of an arm whose block has so many more pieces."""
    contestants, pair = {"A": block(piece, PIECES), "B": block(piece, PIECES + extra)}, Pair("B", "A")
    found = take_turns(contestants, [pair], Budget(until_resolved=until, seconds=limit)).estimate(pair)
    assert found is not None
    return found


def main() -> int:
    """Run the comparisons in a mixed order and print how often they were right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--equal", type=int, default=100, help="A/A comparisons")
    parser.add_argument("--slower", type=int, default=40, help="comparisons with a true slow-down of 1/33")
    parser.add_argument("--until-resolved", type=float, default=0.01, help="half width of the interval to stop at")
    parser.add_argument("--time-limit", type=float, default=120, help="seconds of one comparison")
    parser.add_argument("--quiet", action="store_true", help="leave the other cores alone")
    parser.add_argument("--json", help="also write every estimate there")
    arguments = parser.parse_args()
    log, rows = Log(rank=0), []
    log.line(keep_freed_memory())
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[:1])
    piece = tiny_piece()
    noise = multiprocessing.get_context("spawn").Process(target=keep_busy, args=(cores[1:],), daemon=True)
    if not arguments.quiet:
        noise.start()
    gc.collect()
    gc.freeze()
    kinds = [0] * arguments.equal + [EXTRA] * arguments.slower
    random.Random(1).shuffle(kinds)
    for number, extra in enumerate(kinds, 1):
        begin = time.perf_counter()
        found = one_comparison(piece, extra, arguments.until_resolved, arguments.time_limit)
        truth = PIECES / (PIECES + extra)
        rows.append({"truth": truth, "verdict": found.verdict(), "seconds": time.perf_counter() - begin, **asdict(found)})
        name = "B, which is slower," if extra else "B, which is A,"
        log.line(f"{number:>4}/{len(kinds)}  {found.sentence(name, 'A')}; {found.rounds} rounds")
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(rows, indent=1))
    if not arguments.quiet:
        noise.terminate()
    for line in summary(rows):
        log.line(line)
    return 0


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """How often verdicts and intervals were right."""
    lines = []
    for truth in sorted({row["truth"] for row in rows}, reverse=True):
        mine = [row for row in rows if row["truth"] == truth]
        verdicts = [row["verdict"] for row in mine]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in sorted(set(verdicts)))
        held = sum(row["interval"][0] <= truth <= row["interval"][1] for row in mine)
        rounds, seconds = [row["rounds"] for row in mine], statistics.median(row["seconds"] for row in mine)
        name = "equal arms" if truth == 1 else f"arms slower by {1 / truth - 1:.2%}"
        lines.append(
            f"{name}: {len(mine)} comparisons: {counts}; {held} intervals hold {truth:.4f}; "
            f"{min(rounds)} to {max(rounds)} rounds, median {statistics.median(rounds):.0f}, {seconds:.0f} s"
        )
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
