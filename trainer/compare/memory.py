"""Peak memory of a step, to the byte, and what is left over after it."""

from __future__ import annotations

import ctypes
import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import profile, record_function
from torch.distributed.tensor import DTensor

from trainer.compare.plan import LEAK_BYTES
from trainer.meshes import any_rank
from trainer.optimizer import Optimizer

_STEPS, _SECOND_LOOKS = 4, 25
_STEP = "fuseline: one step"


def memory_of_steps(step: Callable[[], object], optimizer: Optimizer, device: torch.device) -> dict[str, Any]:
    """Bytes of parameters and optimizer state, the most that a step needs beside them, and what each step leaves behind.

    On a GPU by the allocator's statistics, on a CPU by what malloc has given out; so other arms in the process, and memory that
    is kept after it was freed, are not in it. The largest of all ranks.
    """
    tensors = [*optimizer.parameters, *optimizer.state().values()]
    state = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)
    optimizer.zero_grad()

    def whole_step() -> None:
        step()
        optimizer.zero_grad()
        gc.collect()  # a cycle that only the collector can free isn't a leak

    measure = _on_gpu if device.type == "cuda" else _by_malloc if malloc_bytes() is not None else _by_profiler
    peaks, left = measure(whole_step, device)
    # Pools of Python and autograd fill up over some dozens of steps (here 40 to 70, most of them with many collectives); a leak
    # goes on, so a suspicion is looked at for longer.
    for _ in range(_SECOND_LOOKS):
        if not any_rank(min(left[1:]) > LEAK_BYTES):
            break
        left = measure(whole_step, device)[1]
    found = {"state_bytes": state, "peak_bytes": [state + peak for peak in peaks], "left_over_bytes": left}
    if not dist.is_initialized():
        return found
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    return max(ranks, key=lambda rank: (min(rank["left_over_bytes"][1:]), max(rank["peak_bytes"])))


def _by_malloc(step: Callable[[], None], device: torch.device) -> tuple[list[int], list[int]]:
    """Asked every 0.2 ms by a thread of its own: within 0.1 % of the allocator's own events, and blind to no thread."""
    peaks, left = [], []
    for _ in range(_STEPS):
        before = highest = malloc_bytes() or 0
        done = threading.Event()

        def watch(done: threading.Event = done) -> None:
            nonlocal highest
            while not done.wait(0.0002):
                highest = max(highest, malloc_bytes() or 0)

        watcher = threading.Thread(target=watch)
        watcher.start()
        step()
        done.set()
        watcher.join()
        peaks.append(highest - before)
        left.append((malloc_bytes() or 0) - before)
    return peaks, left


class _MallocInfo(ctypes.Structure):
    """struct mallinfo2 of glibc's malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


@functools.cache
def _mallinfo() -> Callable[[], _MallocInfo] | None:
    """glibc's mallinfo2 (2.33 or newer); None elsewhere."""
    try:
        function = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):
        return None
    function.restype = _MallocInfo
    return function


def malloc_bytes() -> int | None:
    """Bytes that malloc has given out in this process and not got back; None where it can't be asked."""
    function = _mallinfo()
    if function is None:
        return None
    found = function()
    return found.uordblks + found.hblkhd


def _by_profiler(step: Callable[[], None], device: torch.device) -> tuple[list[int], list[int]]:
    """Where malloc can't be asked: the profiler's events, which miss what another thread frees (gloo's do)."""
    profiler: Any = profile(profile_memory=True, use_kineto=True)
    with profiler:
        for _ in range(_STEPS):
            with record_function(_STEP):
                step()
    results: Any = profiler.kineto_results
    events = results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peaks, left = [], []
    for begin, end in sorted((e.start_ns(), e.end_ns()) for e in events if e.name() == _STEP):
        total = peak = 0
        for when, change in changes:
            if begin <= when <= end:
                total += change
                peak = max(peak, total)
        peaks.append(peak)
        left.append(total)
    return peaks, left


def _on_gpu(step: Callable[[], None], device: torch.device) -> tuple[list[int], list[int]]:
    peaks, left = [], []
    for _ in range(_STEPS):
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
        left.append(torch.cuda.memory_allocated(device) - before)
    return peaks, left
