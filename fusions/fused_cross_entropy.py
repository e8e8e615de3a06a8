"""Cross entropy of logits whose vocabulary is split over the tensor-parallel group.

    loss = log Z - (1 - a) x_target - (a / V) sum_v x_v + z log(Z)^2      Z = sum_v exp(x_v), a = label_smoothing

Shapes: logits [..., v/t] (this rank's columns), target int64 [...] with ids of the whole vocabulary; loss fp32 [...].
Columns at or beyond `vocab_size` are padding: they are in no sum and their gradient is 0. Statistics are fp32 at least,
the gradient has the logits' dtype, the logits are never written. A target outside
the vocabulary gives nan. Smoothing is torch's, over the true vocabulary.
Collectives: reference one MAX and one SUM per quantity (two; three with smoothing); fused one MAX and one packed SUM.
Saved for the backward, per logit: compile the logits themselves (their own bytes); the reference keeps fp32 exponentials.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusions.jit import jit_fuser


def reference(
    logits: Tensor,
    target: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The definition in plain PyTorch; autograd finds the gradient. `tp_group` None: the logits are whole."""
    x = _wide(logits)
    start = _first_column(logits, tp_group)
    columns = _true_columns(logits.shape[-1], start, vocab_size)
    if columns < x.shape[-1]:
        padding = torch.arange(x.shape[-1], device=x.device) >= columns
        x = x.masked_fill(padding, float("-inf"))
    peak = _all_reduce(x.detach().amax(-1), dist.ReduceOp.MAX, tp_group)
    log_z = _AllReduceSum.apply(torch.exp(x - peak[..., None]).sum(-1), tp_group).log() + peak
    local = target - start
    mine = (local >= 0) & (local < columns)
    picked = x.gather(-1, torch.where(mine, local, 0)[..., None])[..., 0]
    target_logit = _AllReduceSum.apply(torch.where(mine, picked, 0.0), tp_group)
    loss = log_z - (1.0 - label_smoothing) * target_logit
    if label_smoothing > 0:
        total = _AllReduceSum.apply(x[..., :columns].sum(-1), tp_group)
        loss = loss - (label_smoothing / _vocabulary(logits, tp_group, vocab_size)) * total
    if z_loss > 0:
        loss = loss + z_loss * log_z.square()
    loss = torch.where(_impossible(target, ignore_index, _vocabulary(logits, tp_group, vocab_size)), torch.nan, loss)
    return torch.where(target == ignore_index, 0.0, loss)


def compiled(
    logits: Tensor,
    target: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The same: one pass over the logits forward, one backward, two collectives."""
    start = _first_column(logits, tp_group)
    columns = _true_columns(logits.shape[-1], start, vocab_size)
    smoothing_per_column = label_smoothing / _vocabulary(logits, tp_group, vocab_size)
    options = (start, columns, ignore_index, label_smoothing, smoothing_per_column, z_loss)
    loss = _CrossEntropy.apply(logits, target, tp_group, options)
    return torch.where(_impossible(target, ignore_index, _vocabulary(logits, tp_group, vocab_size)), torch.nan, loss)


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits, and per token the target, the largest logit and the sum of exponentials.

    Not log Z: its rounding error (half an ulp of about 10) would be a relative error of every probability.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, tp_group: Any, options: tuple[Any, ...]) -> Tensor:
        start, columns, ignore_index, smoothing, per_column, z_loss = options
        counted = target != ignore_index
        local = target - start
        mine = (local >= 0) & (local < columns)
        if columns > 0:
            true = logits[..., :columns]
            peak, exponentials, total = _statistics(true, smoothing > 0)
            picked = _wide(true.gather(-1, torch.where(mine, local, 0)[..., None])[..., 0])
        else:  # A rank that holds padding only.
            peak = _wide(logits).new_full(target.shape, torch.finfo(torch.float32).min)
            exponentials = total = picked = torch.zeros_like(peak)
        picked = torch.where(mine, picked, 0.0)
        if tp_group is not None:
            local_peak = peak
            peak = _all_reduce(peak, dist.ReduceOp.MAX, tp_group)
            parts = [exponentials * torch.exp(local_peak - peak), picked, *([total] if smoothing > 0 else [])]
            exponentials, picked, *rest = _all_reduce(torch.stack(parts), dist.ReduceOp.SUM, tp_group).unbind()
            total = rest[0] if rest else total
        log_z = exponentials.log() + peak
        loss = log_z - (1.0 - smoothing) * picked
        if smoothing > 0:
            loss = loss - per_column * total
        if z_loss > 0:
            loss = loss + z_loss * log_z.square()
        ctx.save_for_backward(logits, torch.where(mine, local, -1).int(), peak, exponentials, counted)
        ctx.options = options
        return torch.where(counted, loss, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, peak, exponentials, counted = ctx.saved_tensors
        _, columns, _, smoothing, per_column, z_loss = ctx.options
        grad = torch.where(counted, grad, 0.0)
        factor = grad / exponentials
        if z_loss > 0:
            factor = factor * (1.0 + 2.0 * z_loss * (exponentials.log() + peak))
        if columns == logits.shape[-1]:
            return _gradient(logits, local, peak, grad, factor, smoothing, per_column), None, None, None
        dx = torch.zeros_like(logits)
        if columns > 0:
            dx[..., :columns] = _gradient(logits[..., :columns], local, peak, grad, factor, smoothing, per_column)
        return dx, None, None, None


@jit_fuser
def _statistics(logits: Tensor, with_total: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Per token: the largest logit, the sum of exp(logit - largest), and the sum of the logits if asked for."""
    x = _wide(logits)
    peak = x.amax(-1)
    return peak, torch.exp(x - peak[..., None]).sum(-1), x.sum(-1) if with_total else None


@jit_fuser
def _gradient(
    logits: Tensor, local: Tensor, peak: Tensor, grad: Tensor, factor: Tensor, smoothing: float, per_column: float
) -> Tensor:
    """`factor` is the upstream gradient / sum of exponentials, per token."""
    exponentials = torch.exp(_wide(logits) - peak[..., None])
    column = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.int32)
    gradient = exponentials * factor[..., None]
    if smoothing > 0:
        gradient = gradient - per_column * grad[..., None]
    at_target = torch.where(column == local[..., None], ((1.0 - smoothing) * grad)[..., None], 0.0)
    return (gradient - at_target).to(logits.dtype)


class _AllReduceSum(torch.autograd.Function):
    """Sum over the group forward, identity backward: every rank's loss is the same one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _all_reduce(x, dist.ReduceOp.SUM, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _all_reduce(x: Tensor, op: Any, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return x
    x = x.contiguous().clone()
    dist.all_reduce(x, op, group=group)
    return x


def _impossible(target: Tensor, ignore_index: int, vocabulary: int) -> Tensor:
    """Targets that no column stands for. Their loss is nan: an error would have to be read from the device."""
    return ((target < 0) | (target >= vocabulary)) & (target != ignore_index)


def _first_column(logits: Tensor, group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group) * logits.shape[-1]


def _true_columns(width: int, start: int, vocab_size: int | None) -> int:
    """How many of this rank's columns are not padding."""
    return width if vocab_size is None else max(0, min(width, vocab_size - start))


def _vocabulary(logits: Tensor, group: dist.ProcessGroup | None, vocab_size: int | None) -> int:
    return vocab_size or logits.shape[-1] * (1 if group is None else dist.get_world_size(group))


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


BACKENDS = {"cross_entropy": {"reference": reference, "compile": compiled}}


# ---- Megatron's names -------------------------------------------------------------------------------------------------


def fused_vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: dist.ProcessGroup | None, *, vocab_size: int | None = None
) -> Tensor:
    """Loss [s, b] of logits [s, b, v/t] and targets [s, b], with two collectives."""
    return compiled(vocab_parallel_logits, target, tp_group, vocab_size=vocab_size)


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: dist.ProcessGroup | None = None,
    *,
    vocab_size: int | None = None,
) -> Tensor:
    """The plain form of the same loss; smoothing spreads over the whole vocabulary at every group size."""
    return reference(vocab_parallel_logits, target, tp_group, vocab_size=vocab_size, label_smoothing=label_smoothing)
