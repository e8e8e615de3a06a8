"""The output projection and the vocabulary-parallel cross entropy as one, a chunk of tokens at a time: all logits never exist.

    loss = cross_entropy(hidden weight^T, target)          options and formula as in fused_cross_entropy.py

Shapes: hidden [..., h], weight [v/t, h] (this rank's rows), target int64 [...]; loss fp32 [...]. hidden is whole on every rank;
its gradient is this rank's part of a sum (the region function before it, or `sequence_parallel` below, adds the parts up).
Saved for the backward, per logit: nothing. Per token: hidden, and 13 bytes; the backward computes each chunk's logits again,
one more matrix product of the size of the forward's. The reference saves the logits and their exponentials.
The gradient of the weight is summed over the chunks in fp32, and in half precision rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusions import fused_cross_entropy
from fusions.fused_cross_entropy import (
    COMPILED,
    LossRule,
    combine,
    impossible,
    local_target,
    loss_rule,
    nothing,
    upstream_factor,
)
from fusions.fused_linear_wgrad import add_product
from fusions.kernels import HALF, Kernels, triton_kernels

CHUNK_BYTES = 32 << 20  # of logits at a time: large enough for a matrix product at full speed, small beside a GPU's memory


def reference(hidden: Tensor, weight: Tensor, target: Tensor, tp_group: dist.ProcessGroup | None, **options: Any) -> Tensor:
    """The definition: all the logits, then their loss."""
    return fused_cross_entropy.reference(torch.nn.functional.linear(hidden, weight), target, tp_group, **options)


def compiled(hidden: Tensor, weight: Tensor, target: Tensor, tp_group: dist.ProcessGroup | None, **options: Any) -> Tensor:
    """Chunk by chunk, with the compiled kernels of the cross entropy."""
    return _fused(COMPILED, hidden, weight, target, tp_group, **options)


def triton(hidden: Tensor, weight: Tensor, target: Tensor, tp_group: dist.ProcessGroup | None, **options: Any) -> Tensor:
    """Chunk by chunk, with the Triton kernels of the cross entropy."""
    return _fused(triton_kernels("cross_entropy"), hidden, weight, target, tp_group, **options)


def _fused(
    kernels: Kernels,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    tp_group: Any,
    *,
    vocab_size: int | None = None,
    **options: Any,
) -> Tensor:
    rule = loss_rule(weight.shape[0], tp_group, vocab_size, **options)
    flat, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    loss = _LinearCrossEntropy.apply(flat, weight, labels, tp_group, rule, kernels).view(target.shape)
    return torch.where(impossible(target, rule.ignore_index, rule.vocabulary), torch.nan, loss)


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Slices of the tokens whose logits fill CHUNK_BYTES; equal but for the last, so that kernels are compiled twice at most."""
    rows = max(1, CHUNK_BYTES // max(1, weight.shape[0] * hidden.element_size()))
    return [slice(start, min(start + rows, hidden.shape[0])) for start in range(0, hidden.shape[0], rows)]


class _LinearCrossEntropy(torch.autograd.Function):
    """Saves hidden, weight, and per token the target, the largest logit and the sum of exponentials."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, tp_group: Any, rule: LossRule, kernels: Kernels
    ) -> Tensor:
        local, mine = local_target(target, rule)
        if rule.columns > 0 and hidden.shape[0] > 0:
            parts = []
            for chunk in _chunks(hidden, weight):
                logits = hidden[chunk] @ weight.t()
                picked = logits.gather(-1, torch.where(mine[chunk], local[chunk], 0)[:, None])[:, 0]
                parts.append((*kernels.forward(logits, rule), picked))
                del logits
            peak, exponentials, total, picked = zip(*parts, strict=True)
            whole = None if total[0] is None else torch.cat(total)
            statistics = (torch.cat(peak), torch.cat(exponentials), whole, torch.cat(picked))
        else:
            statistics = nothing(target, hidden)
        counted = target != rule.ignore_index
        loss, peak, exponentials = combine(statistics, mine, counted, tp_group, rule)
        ctx.save_for_backward(hidden, weight, torch.where(mine, local, -1).int(), peak, exponentials, counted)
        ctx.rule, ctx.kernels = rule, kernels
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, peak, exponentials, counted = ctx.saved_tensors
        if ctx.rule.columns == 0:
            return torch.zeros_like(hidden), torch.zeros_like(weight), None, None, None, None
        grad = torch.where(counted, grad, 0.0)
        factor = upstream_factor(grad, peak, exponentials, ctx.rule)
        dhidden = torch.empty_like(hidden)
        wide = torch.float32 if weight.dtype in HALF else weight.dtype
        dweight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        for chunk in _chunks(hidden, weight):
            logits = hidden[chunk] @ weight.t()
            d = ctx.kernels.backward(logits, local[chunk], peak[chunk], factor[chunk], grad[chunk], ctx.rule)
            del logits
            torch.mm(d, weight, out=dhidden[chunk])
            add_product(hidden[chunk], d, dweight)
        return dhidden, dweight.to(weight.dtype), None, None, None, None


BACKENDS = {"linear_cross_entropy": {"reference": reference, "compile": compiled, "triton": triton}}


# ---- Megatron's names (its dev branch) ---------------------------------------------------------------------------------


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    sequence_parallel: bool = False,
) -> Tensor:
    """The loss of hidden [n, h] (this rank's [n/t, h] under sequence parallel), weight [v/t, h] and labels [n].

    `reduction`: "mean" over the counted labels, "sum" or "none". Gradients are complete on every rank.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; expected 'mean', 'sum' or 'none'")
    if tp_group is not None:
        hidden = _Gather.apply(hidden, tp_group) if sequence_parallel else _Copy.apply(hidden, tp_group)
    losses = compiled(hidden, weight, labels, tp_group, ignore_index=ignore_index)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (labels != ignore_index).sum().clamp(min=1)


class _Copy(torch.autograd.Function):
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Gather(torch.autograd.Function):
    """All-gather of dimension 0 forward, own slice of the all-reduced gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None
