"""Pads each expert's tokens to a multiple: the first zeros of an expert's column become ones until the count is a multiple.

Shapes: routing_map bool or int [t, e] -> the same shape and dtype. A column that would need more than its t rows is filled.
No gradient; nothing is saved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusions.jit import jit_fuser


def reference(routing_map: Tensor, pad_multiple: int) -> Tensor:
    """The definition, in plain PyTorch."""
    ones = routing_map.bool()
    missing = -ones.sum(0) % pad_multiple  # [e]
    rank_of_zero = (~ones).cumsum(0, dtype=torch.int32)  # 1 for the first zero of a column
    return (ones | (rank_of_zero <= missing)).to(routing_map.dtype)


_compiled = jit_fuser(reference)


def compiled(routing_map: Tensor, pad_multiple: int) -> Tensor:
    """The same, compiled; on a CPU, where Inductor's running sum takes twice as long as PyTorch's own, the plain form."""
    return (reference if routing_map.device.type == "cpu" else _compiled)(routing_map, pad_multiple)


def triton(routing_map: Tensor, pad_multiple: int) -> Tensor:
    """The same with a Triton kernel: one program per expert."""
    from fusions.triton import pad_routing_map  # here, since Triton is optional

    return pad_routing_map.pad(routing_map, pad_multiple)


BACKENDS = {"pad_routing_map": {"reference": reference, "compile": compiled, "triton": triton}}


# ---- Megatron's names -------------------------------------------------------------------------------------------------


def fused_pad_routing_map(routing_map: Tensor, pad_multiple: int) -> Tensor:
    """The padded map as int32, as Megatron's is."""
    with torch.no_grad():
        return compiled(routing_map, pad_multiple).to(torch.int32)
