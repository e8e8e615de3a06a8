"""Run a function on several gloo processes and get each rank's result."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Ranks are forked from one process that has imported what they need and started no thread: it saves each rank the 4 s of the
# imports.
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "trainer.setup"])


def run_ranks(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """[function(*args) on rank 0, on rank 1, ...]; the function must be importable. Fails with the first rank's traceback."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [_CONTEXT.Process(target=_child, args=(rank, ranks, folder, function, args)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(240)
            if process.is_alive():
                process.kill()
        failures = [path.read_text() for path in sorted(Path(folder).glob("error-*"))]
        assert not failures, failures[0]
        assert all(p.exitcode == 0 for p in processes), [p.exitcode for p in processes]
        return [torch.load(Path(folder, f"result-{rank}"), weights_only=False) for rank in range(ranks)]


def _child(rank: int, ranks: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
        torch.save(function(*args), Path(folder, f"result-{rank}"))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"error-{rank}").write_text(f"rank {rank}\n{traceback.format_exc()}")
        raise
