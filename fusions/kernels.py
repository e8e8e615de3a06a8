"""A backend of a fused operation is a pair of pure functions; the autograd function around them is written once per operation.

What is saved for the backward is therefore the same in every backend of an operation, and said in its module's docstring.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Kernels:
    """One backend's forward and backward. Their arguments and results are stated by the operation's autograd function."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def triton_kernels(module: str, name: str = "KERNELS") -> Kernels:
    """The Triton kernels of fusions/triton/<module>.py, imported on first use: Triton is optional."""
    return getattr(importlib.import_module(f"fusions.triton.{module}"), name)


def wide(x: Tensor) -> Tensor:
    """x in fp32 if it is bf16 or fp16: what kernels compute in."""
    return x.float() if x.dtype in HALF else x


def as_row(parameter: Tensor | None, width: int) -> Tensor | None:
    """A bias that broadcasts over everything but the last dimension, as [width]; others are returned as they are."""
    if parameter is None or parameter.numel() != width or parameter.shape[-1:] != (width,):
        return parameter
    return parameter.reshape(width)
