"""What all launches share: block sizes, rows and strides, autotuning, and the current device."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MAX_BLOCK = 16384  # fp32 elements of one row that a program holds in registers at 32 warps; longer rows are read in pieces


def autotune(configs: Sequence[dict[str, Any]], key: list[str]) -> Any:
    """triton.autotune over (meta-parameters, num_warps); the interpreter, which has no clock, takes the first."""
    chosen = configs[:1] if INTERPRETED else configs
    return triton.autotune([_config(c) for c in chosen], key=key)


def _config(options: dict[str, Any]) -> triton.Config:
    meta = {k: v for k, v in options.items() if k != "num_warps"}
    return triton.Config(meta, num_warps=options.get("num_warps", 4))


WARPS = [{"num_warps": w} for w in (4, 8, 16)]


def block(width: int) -> int:
    """The power of two that holds a row, or MAX_BLOCK for a row that is read in pieces."""
    return min(MAX_BLOCK, triton.next_power_of_2(max(1, width)))


def rows_of(x: Tensor) -> Tensor:
    """x as contiguous [rows, width]."""
    return x.contiguous().view(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)


def packed(parameter: Tensor | None) -> Tensor | None:
    """A parameter as kernels index it: without gaps."""
    return None if parameter is None else parameter.contiguous()


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs(x: Tensor, tiles: int) -> int:
    """How many programs share `tiles` in a loop, each leaving one partial sum: four per multiprocessor at most."""
    return max(1, min(tiles, 4 * _multiprocessors(x.device) if x.is_cuda else 3))


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's (apex#1022)."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
