"""dropout(softmax(scale * scores, masked)) over the last dimension, optionally with a sink.

Shapes: scores [b, n, sq, sk]; attention_mask boolean, broadcasting to it, True = masked out. Causal: a query sees the keys
up to its own position, the last query the last key; window W: the W last of those. The masks combine. The probability of a
masked key is exactly 0, and a row with every key masked gives zeros and zero gradients. A sink is one more logit per head
(neither scaled nor masked) that takes its share and is then left out: exp(x) / (exp(sink) + sum exp(x)); sink 0 is "softmax
off by one", a parameter [n] a learnable one. Saved for the backward, per element: fused 4 bytes in fp32 (the probabilities), 2
in half precision (the scores; the probabilities are computed again, since rounded ones would give gradients far worse than
the reference's), and 8 bytes per row; the reference fp32 probabilities, and 1 byte of dropout mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fusions import apex
from fusions.fused_bias_dropout import drop_rule
from fusions.jit import jit_fuser
from fusions.kernels import HALF, Kernels, triton_kernels, wide
from fusions.random import MaskKey, dropout, keep_mask_expression, random_mask_key


def reference(
    scores: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    window: int | None = None,
    in_fp32: bool = True,
    dropout_prob: float = 0.0,
    mask_key: MaskKey | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """The definition in plain PyTorch. `dropout_prob` 0 draws nothing; `mask_key` None draws from torch's generator."""
    x = scores.float() if in_fp32 and scores.dtype in HALF else scores
    x = x if scale == 1.0 else x * scale
    hidden = causal_mask(x.shape[-2], x.shape[-1], window, x.device) if causal or window else None
    if attention_mask is not None:
        hidden = attention_mask if hidden is None else attention_mask | hidden
    if hidden is not None:  # the lowest finite number, not -inf: a row with every key masked stays finite, and is set to 0
        x = x.masked_fill(hidden, torch.finfo(x.dtype).min)
    probs = torch.softmax(x, -1) if sink is None else _with_sink(x, sink, -1)
    if hidden is not None and (attention_mask is not None or x.shape[-2] > x.shape[-1]):  # only then can a row be empty
        probs = probs.masked_fill(hidden, 0.0)
    probs = probs.to(scores.dtype)
    if dropout_prob > 0:
        probs = dropout(probs, dropout_prob, mask_key or random_mask_key(probs))
    return probs


def _with_sink(x: Tensor, sink: Tensor, dim: int) -> Tensor:
    """The softmax of x [b, n, sq, sk] with one more column, which is then left out."""
    column = sink.to(x.dtype).reshape(-1, 1, 1).expand(*x.shape[:-1], 1)
    return torch.softmax(torch.cat([x, column], dim), dim)[..., :-1]


def compiled(scores: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
    """The same in one pass forward and one backward. Options as in `reference`."""
    return _fused(_COMPILED, scores, attention_mask, **options)


def triton(scores: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
    """The same with Triton kernels."""
    return _fused(triton_kernels("softmax"), scores, attention_mask, **options)


def _fused(
    kernels: Kernels,
    scores: Tensor,
    attention_mask: Tensor | None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    window: int | None = None,
    in_fp32: bool = True,
    dropout_prob: float = 0.0,
    mask_key: MaskKey | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Always fp32 inside, so `in_fp32` changes nothing."""
    drop = _drop_rule(scores, mask_key, dropout_prob)
    return _Softmax.apply(scores, attention_mask, sink, drop, (scale, causal or bool(window), window), kernels)


def causal_mask(sq: int, sk: int, window: int | None, device: torch.device) -> Tensor:
    """Boolean [sq, sk], True = masked out: keys after the query, and keys more than `window` - 1 before it."""
    make = _make_causal_mask if torch.compiler.is_compiling() else _kept_causal_mask  # in a graph it costs nothing to make
    return make(sq, sk, window, device)


def _make_causal_mask(sq: int, sk: int, window: int | None, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # the cache outlives the mode of its first caller
        distance = torch.arange(sk - sq, sk, device=device)[:, None] - torch.arange(sk, device=device)
        return distance < 0 if window is None else (distance < 0) | (distance >= window)


_kept_causal_mask = functools.lru_cache(maxsize=16)(_make_causal_mask)


def forget_kept_masks() -> None:
    """Make causal masks anew, as in `fusions.random.forget_kept_tensors`."""
    _kept_causal_mask.cache_clear()


DropRule = tuple[Tensor, Tensor, float]  # first and second row keys, probability
MaskRule = tuple[float, bool, int | None]  # scale, causal, window


def _drop_rule(x: Tensor, key: MaskKey | None, prob: float) -> DropRule | None:
    if prob == 0:
        return None
    key = key or random_mask_key(x)
    return key.first, key.second, prob


class _Softmax(torch.autograd.Function):
    """Saves the probabilities before dropout (fp32) or the scores (half), and per row 8 bytes of statistics and 8 of key.

    Kernels: forward(scores, mask, sink, drop, rule) -> (output, probabilities to save or None, peak, share);
    backward(grad, saved, mask, sink, peak, share, drop, rule, half) -> (dscores, dsink per row or None).
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, mask: Any, sink: Any, drop: DropRule | None, rule: MaskRule, kernels: Kernels
    ) -> Tensor:
        ctx.drop, ctx.rule, ctx.kernels = drop, rule, kernels
        ctx.half = scores.dtype in HALF
        out, probs, peak, share = kernels.forward(scores, mask, _per_head(sink, scores), drop, rule)
        ctx.save_for_backward(scores if ctx.half else probs, mask if ctx.half else None, sink, peak, share)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, mask, sink, peak, share = ctx.saved_tensors
        wanted = _per_head(sink, saved) if ctx.needs_input_grad[2] else None
        dscores, rows = ctx.kernels.backward(grad, saved, mask, wanted, peak, share, ctx.drop, ctx.rule, ctx.half)
        dsink = None if rows is None else rows.sum_to_size(wanted.shape).reshape(sink.shape).to(sink.dtype)  # pyright: ignore
        return dscores, None, dsink, None, None, None


def _per_head(sink: Tensor | None, scores: Tensor) -> Tensor | None:
    """fp32 [n, 1, 1] (or [1, 1, 1]) of a sink [n] or a scalar."""
    return None if sink is None else wide(sink).reshape(-1, 1, 1).contiguous()


def _forward(scores: Tensor, mask: Any, sink: Any, drop: DropRule | None, rule: MaskRule) -> tuple[Any, ...]:
    may_be_empty = mask is not None or scores.shape[-2] > scores.shape[-1]
    expression = None if drop is None else drop_rule(scores, *drop)
    if scores.dtype in HALF:
        out, peak, share = _forward_half(scores, mask, sink, expression, rule, may_be_empty)
        return out, None, peak, share
    probs, dropped, peak, share = _forward_full(scores, mask, sink, expression, rule, may_be_empty)
    return probs if dropped is None else dropped, probs, peak, share


def _backward(
    grad: Tensor, saved: Tensor, mask: Any, sink: Any, peak: Tensor, share: Tensor, drop: Any, rule: MaskRule, half: bool
) -> tuple[Tensor, Tensor | None]:
    expression = None if drop is None else drop_rule(grad, *drop)
    if half:
        return _backward_half(grad, saved, mask, sink, peak, share, expression, rule)
    if sink is None:
        return _backward_full(grad, saved, None, None, None, expression, rule[0])
    return _backward_full(grad, saved, sink, peak, share, expression, rule[0])


@jit_fuser
def _forward_full(
    scores: Tensor, mask: Any, sink: Any, drop: Any, rule: MaskRule, may_be_empty: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    weights, share, peak = _weights_and_share(_masked(scores, mask, rule), sink, may_be_empty)
    probs = weights * share
    return probs, None if drop is None else _drop(probs, drop), peak, share


@jit_fuser
def _backward_full(
    grad: Tensor, probs: Tensor, sink: Any, peak: Any, share: Any, drop: Any, scale: float
) -> tuple[Tensor, Tensor | None]:
    return _gradient(grad, probs, sink, peak, share, drop, scale)


@jit_fuser
def _forward_half(
    scores: Tensor, mask: Any, sink: Any, drop: Any, rule: MaskRule, may_be_empty: bool
) -> tuple[Tensor, Tensor, Tensor]:
    weights, share, peak = _weights_and_share(_masked(scores, mask, rule), sink, may_be_empty)
    probs = (weights * share).to(scores.dtype)
    return probs if drop is None else _drop(probs, drop), peak, share


@jit_fuser
def _backward_half(
    grad: Tensor, scores: Tensor, mask: Any, sink: Any, peak: Tensor, share: Tensor, drop: Any, rule: MaskRule
) -> tuple[Tensor, Tensor | None]:
    probs = torch.exp(_masked(scores, mask, rule) - peak) * share
    dscores, rows = _gradient(grad.float(), probs, sink, peak, share, drop, rule[0])
    return dscores.to(grad.dtype), rows


def _masked(scores: Tensor, mask: Any, rule: MaskRule) -> Tensor:
    """scale * scores, -inf where masked, in fp32 at least."""
    scale, causal, window = rule
    x = wide(scores) * scale
    hidden = mask
    if causal:
        sq, sk = x.shape[-2:]
        rows = torch.arange(sk - sq, sk, device=x.device, dtype=torch.int32)  # int32: half the vector work of int64
        distance = rows[:, None] - torch.arange(sk, device=x.device, dtype=torch.int32)
        outside = distance < 0 if window is None else (distance < 0) | (distance >= window)
        hidden = outside if mask is None else mask | outside
    return x if hidden is None else torch.where(hidden, float("-inf"), x)


def _weights_and_share(x: Tensor, sink: Any, may_be_empty: bool) -> tuple[Tensor, Tensor, Tensor]:
    """exp(x - peak), 1 / its row's sum with the sink's part (1 for a row with every key masked), and the peak."""
    peak = x.amax(-1, keepdim=True)
    if sink is not None:
        peak = torch.maximum(peak, sink)
    elif may_be_empty:
        peak = torch.where(peak == float("-inf"), 0.0, peak)
    weights = torch.exp(x - peak)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - peak)
    elif may_be_empty:
        total = torch.where(total == 0, 1.0, total)
    return weights, 1.0 / total, peak


def _gradient(
    grad: Tensor, probs: Tensor, sink: Any, peak: Any, share: Any, drop: Any, scale: float
) -> tuple[Tensor, Tensor | None]:
    g = grad if drop is None else _drop(grad, drop)
    through = (probs * g).sum(-1, keepdim=True)
    dsink = None if sink is None else -torch.exp(sink - peak) * share * through
    return scale * probs * (g - through), dsink


def _drop(x: Tensor, drop: Any) -> Tensor:
    counters, first, second, threshold, keep_scale = drop
    return torch.where(keep_mask_expression(counters, first, second, threshold), x * keep_scale, 0.0)


_COMPILED = Kernels(_forward, _backward)
BACKENDS = {
    "scale_mask_softmax": {
        "reference": reference,
        "compile": compiled,
        "triton": triton,
        "apex": apex.scale_mask_softmax,
    }
}


# ---- Megatron's names -------------------------------------------------------------------------------------------------


class ScaledUpperTriangMaskedSoftmax:
    """`apply(x [ab, sq, sk], scale)`: softmax of scale * x with a causal mask."""

    @staticmethod
    def apply(inputs: Tensor, scale: float) -> Tensor:
        """Probabilities [ab, sq, sk]."""
        return compiled(inputs[None], causal=True, scale=1.0 if scale is None else float(scale))[0]


class ScaledMaskedSoftmax:
    """`apply(x [b, np, sq, sk], mask, scale)`: softmax of scale * x where mask (True = masked out)."""

    @staticmethod
    def apply(inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Probabilities [b, np, sq, sk]."""
        return compiled(inputs, None if mask is None else mask.bool(), scale=1.0 if scale is None else float(scale))


class ScaledSoftmax:
    """`apply(x [b, np, sq, sk], scale)`: softmax of scale * x."""

    @staticmethod
    def apply(inputs: Tensor, scale: float) -> Tensor:
        """Probabilities [b, np, sq, sk]."""
        return compiled(inputs, scale=1.0 if scale is None else float(scale))


class SoftmaxOne(nn.Module):
    """exp(x) / (exp(offset) + sum exp(x)); `denominator_offset` a number, a scalar tensor or one per head [np].

    Evan Miller 2023, "Attention is off by one": with offset 0 the probabilities may sum to less than 1.
    """

    def __init__(self, dim: int | None = None, denominator_offset: Tensor | float = 1.0):
        super().__init__()
        self.dim, self.denominator_offset = -1 if dim is None else dim, denominator_offset

    def forward(self, x: Tensor) -> Tensor:
        """Probabilities of x [b, np, sq, sk]."""
        return _with_sink(x, torch.as_tensor(self.denominator_offset, dtype=x.dtype, device=x.device), self.dim)


class FusedScaleMaskSoftmax(nn.Module):
    """Megatron's module. `window_size` is its tuple (keys before the query, keys after it), both inclusive.

    A given mask is combined with the causal and window masks (Megatron uses it alone). `mask_func` is accepted for its
    callers and not called: a masked probability is exactly 0 here.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: Any,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[..., Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
        window_size: tuple[int, int] | None = None,
    ):
        super().__init__()
        assert not (input_in_fp16 and input_in_bf16), "both fp16 and bf16 flags cannot be active at the same time"
        assert scale is None or softmax_in_fp32, "softmax should be in fp32 when scaled"
        self.causal = getattr(attn_mask_type, "name", attn_mask_type) == "causal"
        self.fused, self.softmax_in_fp32, self.scale = scaled_masked_softmax_fusion, softmax_in_fp32, scale
        self.window_size = window_size

    def forward(self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None) -> Tensor:
        """Probabilities [b, np, sq, sk] of scores of that shape."""
        assert input.dim() == 4, f"expected scores [b, np, sq, sk], got {list(input.shape)}"
        if self.is_kernel_available(mask, *input.shape):
            return self.forward_fused_softmax(input, mask, softmax_offset)
        return self.forward_torch_softmax(input, mask, softmax_offset)

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Whether the fused form runs: it has no limit on shapes, so exactly when it was asked for."""
        return bool(self.fused and b * np * sq * sk > 0)

    def forward_fused_softmax(self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None) -> Tensor:
        """The compiled form."""
        return compiled(input, mask, sink=softmax_offset, **self._options(input, mask))

    def forward_torch_softmax(self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None) -> Tensor:
        """The plain form."""
        options = self._options(input, mask)
        return reference(input, mask, in_fp32=self.softmax_in_fp32, sink=softmax_offset, **options)

    @staticmethod
    def get_batch_per_block(sq: int, sk: int, b: int, np: int) -> int:
        """Rows that one block of Apex's kernel takes: 8 of up to 128 keys, 4 of more. Nothing here depends on it."""
        return 8 if sk <= 128 else 4

    def _options(self, input: Tensor, mask: Tensor | None) -> dict[str, Any]:
        sq, sk = input.shape[-2:]
        causal = self.causal and sq > 1
        if causal and mask is None:
            assert sq == sk, "causal mask is only for self attention"
        window = None if self.window_size is None or self.window_size[0] < 0 else self.window_size[0] + 1
        if window is not None and not self.causal and self.window_size is not None and self.window_size[1] != 0:
            raise ValueError(f"window_size {self.window_size}: keys after the query are only supported as 0")
        return {"scale": self.scale if self.scale is not None else 1.0, "causal": causal, "window": window}
