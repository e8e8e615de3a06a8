"""Cross entropy of logits whose vocabulary is split over the tensor-parallel group.

    loss = log Z - (1 - a) x_target - (a / V) sum_v x_v + z log(Z)^2      Z = sum_v exp(x_v), a = label_smoothing
    x = c tanh(logits / c) with `soft_cap` c (Gemma 2, arXiv:2408.00118), else the logits

Shapes: logits [..., v/t] (this rank's columns), target int64 [...] with ids of the whole vocabulary; loss fp32 [...].
Columns at or beyond `vocab_size` are padding: they are in no sum and their gradient is 0. Statistics are fp32 at least,
the gradient has the logits' dtype, the logits are never written. A target outside
the vocabulary gives nan. Smoothing is torch's, over the true vocabulary.
Collectives: reference one MAX and one SUM per quantity (two; three with smoothing); fused one MAX and one packed SUM.
Saved for the backward, per logit: fused the logits themselves (their own bytes), and 13 bytes per token; the reference keeps
fp32 exponentials. The fused kernels read the logits as they are: an fp32 copy of them never exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusions import transformer_engine
from fusions.jit import jit_fuser
from fusions.kernels import Kernels, triton_kernels, wide


def reference(
    logits: Tensor,
    target: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
) -> Tensor:
    """The definition in plain PyTorch; autograd finds the gradient. `tp_group` None: the logits are whole."""
    x = wide(logits)
    x = x if soft_cap is None else soft_cap * torch.tanh(x / soft_cap)
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
    loss = torch.where(impossible(target, ignore_index, _vocabulary(logits, tp_group, vocab_size)), torch.nan, loss)
    return torch.where(target == ignore_index, 0.0, loss)


def compiled(logits: Tensor, target: Tensor, tp_group: dist.ProcessGroup | None, **options: Any) -> Tensor:
    """The same: one pass over the logits forward, one backward, two collectives. Options as in `reference`."""
    return _fused(COMPILED, logits, target, tp_group, **options)


def triton(logits: Tensor, target: Tensor, tp_group: dist.ProcessGroup | None, **options: Any) -> Tensor:
    """The same with Triton kernels."""
    return _fused(triton_kernels("cross_entropy"), logits, target, tp_group, **options)


@dataclass(frozen=True)
class LossRule:
    """The loss of one rank's columns: the first of them, how many are not padding, and the options."""

    start: int
    columns: int
    vocabulary: int
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None

    @property
    def smoothing_per_column(self) -> float:
        """a / V."""
        return self.label_smoothing / self.vocabulary


def loss_rule(width: int, tp_group: dist.ProcessGroup | None, vocab_size: int | None, **options: Any) -> LossRule:
    """The rule for logits of `width` columns on each rank of the group."""
    start = 0 if tp_group is None else dist.get_rank(tp_group) * width
    vocabulary = vocab_size or width * (1 if tp_group is None else dist.get_world_size(tp_group))
    return LossRule(start, _true_columns(width, start, vocab_size), vocabulary, **options)


def _fused(
    kernels: Kernels,
    logits: Tensor,
    target: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    vocab_size: int | None = None,
    **options: Any,
) -> Tensor:
    rule = loss_rule(logits.shape[-1], tp_group, vocab_size, **options)
    loss = _CrossEntropy.apply(logits, target, tp_group, rule, kernels)
    return torch.where(impossible(target, rule.ignore_index, rule.vocabulary), torch.nan, loss)


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits, and per token the target, the largest logit and the sum of exponentials.

    Not log Z: its rounding error (half an ulp of about 10) would be a relative error of every probability.
    Kernels: forward(logits, rule) -> (peak, sum of exp(x - peak), sum of x or None) per token; backward(logits, local target,
    peak, factor, grad, rule) -> gradient, 0 in padding columns.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, tp_group: Any, rule: LossRule, kernels: Kernels) -> Tensor:
        local, mine = local_target(target, rule)
        if rule.columns > 0:
            picked = logits.gather(-1, torch.where(mine, local, 0)[..., None])[..., 0]
            statistics = (*kernels.forward(logits, rule), picked)
        else:
            statistics = nothing(target, logits)
        loss, peak, exponentials = combine(statistics, mine, target != rule.ignore_index, tp_group, rule)
        ctx.save_for_backward(logits, torch.where(mine, local, -1).int(), peak, exponentials, target != rule.ignore_index)
        ctx.rule, ctx.kernels = rule, kernels
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, peak, exponentials, counted = ctx.saved_tensors
        if ctx.rule.columns == 0:
            return torch.zeros_like(logits), None, None, None, None
        grad = torch.where(counted, grad, 0.0)
        factor = upstream_factor(grad, peak, exponentials, ctx.rule)
        return ctx.kernels.backward(logits, local, peak, factor, grad, ctx.rule), None, None, None, None


def local_target(target: Tensor, rule: LossRule) -> tuple[Tensor, Tensor]:
    """(target as a column of this rank, whether it is one)."""
    local = target - rule.start
    return local, (local >= 0) & (local < rule.columns)


def nothing(target: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(peak, exponentials, total, picked) of a rank that holds padding only."""
    zero = torch.zeros_like(target, dtype=wide(logits).dtype)
    return zero.fill_(torch.finfo(torch.float32).min), torch.zeros_like(zero), torch.zeros_like(zero), torch.zeros_like(zero)


def combine(
    statistics: tuple[Tensor, Tensor, Tensor | None, Tensor], mine: Tensor, counted: Tensor, tp_group: Any, rule: LossRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Each rank's (peak, exponentials, total, picked logit) -> (loss, peak, exponentials) of all: one MAX, one packed SUM."""
    peak, exponentials, total, picked = statistics
    picked = wide(picked)
    picked = picked if rule.soft_cap is None else rule.soft_cap * torch.tanh(picked / rule.soft_cap)
    picked = torch.where(mine, picked, 0.0)
    smoothing = rule.label_smoothing
    if tp_group is not None:
        local_peak = peak
        peak = _all_reduce(peak, dist.ReduceOp.MAX, tp_group)
        parts = [exponentials * torch.exp(local_peak - peak), picked, *([total] if smoothing > 0 else [])]
        exponentials, picked, *rest = _all_reduce(torch.stack(parts), dist.ReduceOp.SUM, tp_group).unbind()  # pyright: ignore
        total = rest[0] if rest else total
    log_z = exponentials.log() + peak
    loss = log_z - (1.0 - smoothing) * picked
    if smoothing > 0 and total is not None:
        loss = loss - rule.smoothing_per_column * total
    if rule.z_loss > 0:
        loss = loss + rule.z_loss * log_z.square()
    return torch.where(counted, loss, 0.0), peak, exponentials


def upstream_factor(grad: Tensor, peak: Tensor, exponentials: Tensor, rule: LossRule) -> Tensor:
    """What each exp(x - peak) is multiplied with in the gradient, per token."""
    factor = grad / exponentials
    return factor * (1.0 + 2.0 * rule.z_loss * (exponentials.log() + peak)) if rule.z_loss > 0 else factor


def _statistics(logits: Tensor, rule: LossRule) -> tuple[Tensor, Tensor, Tensor | None]:
    return _statistics_kernel(logits, rule.columns, rule.label_smoothing > 0, rule.soft_cap)


def _gradient(logits: Tensor, local: Tensor, peak: Tensor, factor: Tensor, grad: Tensor, rule: LossRule) -> Tensor:
    a, b = rule.label_smoothing, rule.smoothing_per_column
    return _gradient_kernel(logits, local, peak, factor, grad, rule.columns, a, b, rule.soft_cap)


@jit_fuser
def _statistics_kernel(
    logits: Tensor, columns: int, with_total: bool, soft_cap: float | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    x = wide(logits[..., :columns])
    x = x if soft_cap is None else soft_cap * torch.tanh(x / soft_cap)
    peak = x.amax(-1).clamp(min=torch.finfo(x.dtype).min)  # finite where this rank's logits are all -inf: their sum is 0
    return peak, torch.exp(x - peak[..., None]).sum(-1), x.sum(-1) if with_total else None


@jit_fuser
def _gradient_kernel(
    logits: Tensor,
    local: Tensor,
    peak: Tensor,
    factor: Tensor,
    grad: Tensor,
    columns: int,
    smoothing: float,
    per_column: float,
    soft_cap: float | None,
) -> Tensor:
    x = wide(logits)
    bend = None if soft_cap is None else torch.tanh(x / soft_cap)
    x = x if bend is None or soft_cap is None else soft_cap * bend
    column = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.int32)
    gradient = torch.exp(x - peak[..., None]) * factor[..., None]
    if smoothing > 0:
        gradient = gradient - per_column * grad[..., None]
    gradient = gradient - torch.where(column == local[..., None], ((1.0 - smoothing) * grad)[..., None], 0.0)
    gradient = gradient if bend is None else gradient * (1.0 - bend * bend)
    if columns < logits.shape[-1]:
        gradient = torch.where(column < columns, gradient, 0.0)
    return gradient.to(logits.dtype)


COMPILED = Kernels(_statistics, _gradient)


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


def impossible(target: Tensor, ignore_index: int, vocabulary: int) -> Tensor:
    """Targets that no column stands for. Their loss is nan: an error would have to be read from the device."""
    return ((target < 0) | (target >= vocabulary)) & (target != ignore_index)


def _first_column(logits: Tensor, group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group) * logits.shape[-1]


def _true_columns(width: int, start: int, vocab_size: int | None) -> int:
    """How many of this rank's columns are not padding."""
    return width if vocab_size is None else max(0, min(width, vocab_size - start))


def _vocabulary(logits: Tensor, group: dist.ProcessGroup | None, vocab_size: int | None) -> int:
    return vocab_size or logits.shape[-1] * (1 if group is None else dist.get_world_size(group))


BACKENDS = {
    "cross_entropy": {
        "reference": reference,
        "compile": compiled,
        "triton": triton,
        "transformer_engine": transformer_engine.cross_entropy,
    }
}


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
