"""The process and its machine: allocator, device, and the rates that speeds are measured against."""

from __future__ import annotations

import ctypes
import platform
import resource
import sys
import time

import torch

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_MMAP_MAX, _TRIM_THRESHOLD, _TOP_PAD = -4, -1, -2  # mallopt parameters, glibc malloc.h


def keep_freed_memory() -> str:
    """Tell glibc to keep large freed blocks instead of returning them to the kernel; returns what was done.

    A training step frees and asks for the same blocks every time; given back, each costs its page faults again (a 64 MB
    clone took 23 ms with, 5.6 ms without). Linux with glibc only; call it before the first large allocation.
    """
    global _allocator
    _allocator = f"allocator settings: {_mallopt()}"
    return _allocator


def allocator_settings() -> str:
    """What this process did to its allocator."""
    return _allocator


_allocator = "allocator settings: default"


def _mallopt() -> str:
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return "not applied (glibc on Linux only)"
    libc = ctypes.CDLL("libc.so.6")
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 256 << 20))
    if not all(libc.mallopt(parameter, value) for parameter, value in settings):
        return "refused by mallopt"
    return "freed memory is kept (mallopt: no mmap, no trim, 256 MiB pad)"


def synchronise(device: torch.device) -> None:
    """Wait for the device; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_gemm_rate(device: torch.device, dtype: torch.dtype, size: int = 1024, seconds: float = 0.2) -> float:
    """FLOP/s of a square matrix product of this process, the best of several: what MFU is measured against."""
    size = size if device.type == "cpu" else 8 * size
    a, b = torch.ones(size, size, dtype=dtype, device=device), torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _best_seconds(lambda: torch.mm(a, b), device, seconds)


def measure_copy_bandwidth(device: torch.device, mebibytes: int = 64, seconds: float = 0.3) -> float:
    """Bytes per second of a copy, read and write counted: the floor of every operation bound by memory."""
    x = torch.ones(mebibytes << 18, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / _best_seconds(lambda: y.copy_(x), device, seconds)


def fastest_precision(device: torch.device) -> str:
    """fp32, or bf16 where its matrix product is at least 1.2 times as fast here."""
    # 256: without vector instructions for bf16, a CPU takes seconds for a product of 1024.
    rates = {name: measure_gemm_rate(device, dtype, 256) for name, dtype in PRECISIONS.items() if name != "fp16"}
    return "bf16" if rates["bf16"] > 1.2 * rates["fp32"] else "fp32"


def peak_memory_gib(device: torch.device) -> float:
    """The most memory this process has used, GiB: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def gpu_state(device: torch.device) -> dict[str, float | str] | None:
    """SM clock (MHz), temperature (°C) and power (W) of a GPU, or why they can't be read; None on a CPU."""
    if device.type != "cuda":
        return None
    try:
        return {
            "clock_mhz": float(torch.cuda.clock_rate(device)),
            "temperature_c": float(torch.cuda.temperature(device)),
            "power_w": torch.cuda.power_draw(device) / 1e3,
        }
    except Exception as error:  # NVML raises its own kinds, and torch asks for a package that need not be there
        return {"unknown": f"{type(error).__name__}: {error}".splitlines()[0]}


def _best_seconds(call: object, device: torch.device, seconds: float) -> float:
    assert callable(call)
    for _ in range(2):
        call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        synchronise(device)
        start = time.perf_counter()
        call()
        synchronise(device)
        best = min(best, time.perf_counter() - start)
    return best
