"""Expert indices and probabilities per token, turned into one column per expert.

Shapes: indices int [n, k] (-1: an expert of another rank; no expert twice in a row), probs [n, k] -> multihot bool [n, e],
probs [n, e] (0 elsewhere). The gradient of probs [n, k] is gathered back; that of a -1 is 0. Saved: the indices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusions.jit import jit_fuser
from fusions.kernels import Kernels, triton_kernels

Pair = tuple[Tensor, Tensor]


def reference(indices: Tensor, probs: Tensor, num_experts: int) -> Pair:
    """The definition, in plain PyTorch."""
    safe = torch.where(indices >= 0, indices, num_experts).long()
    multihot = torch.zeros(len(indices), num_experts + 1, dtype=torch.bool, device=indices.device).scatter(1, safe, True)
    spread = torch.zeros(len(indices), num_experts + 1, dtype=probs.dtype, device=probs.device).scatter(1, safe, probs)
    return multihot[:, :-1].contiguous(), spread[:, :-1].contiguous()


def compiled(indices: Tensor, probs: Tensor, num_experts: int) -> Pair:
    """The same in one pass forward and one backward; on a CPU the forward is PyTorch's native scatter, which is faster."""
    return _ToMultihot.apply(indices, probs, num_experts, _COMPILED)


def triton(indices: Tensor, probs: Tensor, num_experts: int) -> Pair:
    """The same with Triton kernels."""
    return _ToMultihot.apply(indices, probs, num_experts, triton_kernels("indices_converter"))


class _ToMultihot(torch.autograd.Function):
    """Kernels: forward(indices, probs, e) -> (multihot, probs); backward(grad of probs [n, e], indices) -> [n, k]."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, probs: Tensor, num_experts: int, kernels: Kernels) -> Pair:
        multihot, spread = kernels.forward(indices, probs, num_experts)
        ctx.save_for_backward(indices)
        ctx.kernels = kernels
        ctx.mark_non_differentiable(multihot)
        return multihot, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        return None, ctx.kernels.backward(grad, indices), None, None


def _forward(indices: Tensor, probs: Tensor, num_experts: int) -> Pair:
    return (reference if probs.device.type == "cpu" else _forward_kernel)(indices, probs, num_experts)


@jit_fuser
def _forward_kernel(indices: Tensor, probs: Tensor, num_experts: int) -> Pair:
    experts = torch.arange(num_experts, device=indices.device, dtype=torch.int32)
    narrow = indices.to(torch.int32)
    chosen = narrow[:, :1] == experts  # [n, e]
    spread = torch.where(chosen, probs[:, :1], 0.0)
    for k in range(1, indices.shape[1]):
        here = narrow[:, k : k + 1] == experts
        chosen, spread = chosen | here, torch.where(here, probs[:, k : k + 1], spread)
    return chosen, spread


@jit_fuser
def _backward(grad: Tensor, indices: Tensor) -> Tensor:
    return torch.where(indices >= 0, grad.gather(1, indices.clamp(min=0).long()), 0.0)


_COMPILED = Kernels(_forward, _backward)
BACKENDS = {"indices_to_multihot": {"reference": reference, "compile": compiled, "triton": triton}}


# ---- Megatron's names -------------------------------------------------------------------------------------------------


class IndicesToMultihot:
    """Megatron's handle: `IndicesToMultihot.apply(indices, probs_indices, num_of_local_experts)`."""

    @staticmethod
    def apply(indices: Tensor, probs_indices: Tensor, num_of_local_experts: int) -> Pair:
        """fused_indices_to_multihot."""
        return compiled(indices, probs_indices, num_of_local_experts)


def fused_indices_to_multihot(indices: Tensor, probs_indices: Tensor, num_of_local_experts: int) -> Pair:
    """(multihot bool [n, e], probs [n, e]) of indices and probs [n, k]."""
    return compiled(indices, probs_indices, num_of_local_experts)
