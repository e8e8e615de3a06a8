"""dropout(softmax(scale * scores, masked)) over the last dimension.

Shapes: scores [b, n, sq, sk]; attention_mask boolean, broadcasting to it, True = masked out. Causal: a query sees the keys
up to its own position, the last query the last key; window W: the W last of those. The masks combine. The probability of a
masked key is exactly 0, and a row with every key masked gives zeros and zero gradients. Saved for the backward, per
element: compile 4 bytes in fp32 (the probabilities), 2 in half precision (the scores; the probabilities are computed again,
since rounded ones would give gradients far worse than the reference's); the reference fp32 probabilities, and 1 byte of
dropout mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fusions.jit import jit_fuser
from fusions.random import MaskKey, column_counters, drop_threshold, dropout, keep_mask_expression, random_mask_key


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
) -> Tensor:
    """The definition in plain PyTorch. `dropout_prob` 0 draws nothing; `mask_key` None draws from torch's generator."""
    x = scores.float() if in_fp32 and scores.dtype in (torch.bfloat16, torch.float16) else scores
    x = x if scale == 1.0 else x * scale
    hidden = causal_mask(*x.shape[-2:], window, x.device) if causal or window else None
    if attention_mask is not None:
        hidden = attention_mask if hidden is None else attention_mask | hidden
    if hidden is None:
        probs = torch.softmax(x, -1)
    else:  # The lowest finite number, not -inf: a row with every key masked stays finite and is then set to 0.
        probs = torch.softmax(x.masked_fill(hidden, torch.finfo(x.dtype).min), -1)
        if attention_mask is not None or x.shape[-2] > x.shape[-1]:  # only then can a row have every key masked
            probs = probs.masked_fill(hidden, 0.0)
    probs = probs.to(scores.dtype)
    if dropout_prob > 0:
        probs = dropout(probs, dropout_prob, mask_key or random_mask_key(probs))
    return probs


def compiled(
    scores: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    window: int | None = None,
    in_fp32: bool = True,
    dropout_prob: float = 0.0,
    mask_key: MaskKey | None = None,
) -> Tensor:
    """The same in one pass forward and one backward; always fp32 inside, so `in_fp32` changes nothing."""
    drop = _drop_rule(scores, mask_key, dropout_prob)
    return _Softmax.apply(scores, attention_mask, drop, (scale, causal or bool(window), window))


@functools.lru_cache(maxsize=16)
def causal_mask(sq: int, sk: int, window: int | None, device: torch.device) -> Tensor:
    """Boolean [sq, sk], True = masked out: keys after the query, and keys more than `window` - 1 before it."""
    with torch.inference_mode(False):  # the cache outlives the mode of its first caller
        distance = torch.arange(sk - sq, sk, device=device)[:, None] - torch.arange(sk, device=device)
        return distance < 0 if window is None else (distance < 0) | (distance >= window)


DropRule = tuple[Tensor, Tensor, Tensor, Tensor, float]  # counters, first and second row keys, threshold, 1 / (1 - prob)
MaskRule = tuple[float, bool, int | None]  # scale, causal, window


def _drop_rule(x: Tensor, key: MaskKey | None, prob: float) -> DropRule | None:
    if prob == 0:
        return None
    key = key or random_mask_key(x)
    counters, threshold = column_counters(x.shape[-1], x.device), drop_threshold(prob, x.device)
    return counters, key.first, key.second, threshold, 1.0 / (1.0 - prob)


class _Softmax(torch.autograd.Function):
    """Saves the probabilities before dropout (fp32) or the scores and 8 bytes per row (half); 8 bytes per row of key."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Any, drop: DropRule | None, rule: MaskRule) -> Tensor:
        ctx.drop, ctx.rule = drop, rule
        ctx.half = scores.dtype in (torch.bfloat16, torch.float16)
        if ctx.half:
            out, peak, share = _forward_half(scores, mask, drop, rule)
            ctx.save_for_backward(scores, mask, peak, share)
            return out
        probs, dropped = _forward(scores, mask, drop, rule)
        ctx.save_for_backward(probs)
        return probs if dropped is None else dropped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kernel = _backward_half if ctx.half else _backward
        return kernel(grad, *ctx.saved_tensors, ctx.drop, ctx.rule), None, None, None


@jit_fuser
def _forward(scores: Tensor, mask: Any, drop: DropRule | None, rule: MaskRule) -> tuple[Tensor, Tensor | None]:
    weights, share, _ = _weights_and_share(
        _masked(scores, mask, rule), mask is not None or scores.shape[-2] > scores.shape[-1]
    )
    probs = weights * share
    return probs, None if drop is None else _drop(probs, drop)


@jit_fuser
def _backward(grad: Tensor, probs: Tensor, drop: DropRule | None, rule: MaskRule) -> Tensor:
    return _gradient(grad, probs, drop, rule[0])


@jit_fuser
def _forward_half(scores: Tensor, mask: Any, drop: DropRule | None, rule: MaskRule) -> tuple[Tensor, Tensor, Tensor]:
    weights, share, peak = _weights_and_share(
        _masked(scores, mask, rule), mask is not None or scores.shape[-2] > scores.shape[-1]
    )
    probs = (weights * share).to(scores.dtype)
    return probs if drop is None else _drop(probs, drop), peak, share


@jit_fuser
def _backward_half(
    grad: Tensor, scores: Tensor, mask: Any, peak: Tensor, share: Tensor, drop: DropRule | None, rule: MaskRule
) -> Tensor:
    probs = torch.exp(_masked(scores, mask, rule) - peak) * share
    return _gradient(grad.float(), probs, drop, rule[0]).to(grad.dtype)


def _masked(scores: Tensor, mask: Any, rule: MaskRule) -> Tensor:
    """scale * scores, -inf where masked, in fp32 at least."""
    scale, causal, window = rule
    x = (scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores) * scale
    hidden = mask
    if causal:
        sq, sk = x.shape[-2:]
        rows = torch.arange(sk - sq, sk, device=x.device, dtype=torch.int32)  # int32: half the vector work of int64
        distance = rows[:, None] - torch.arange(sk, device=x.device, dtype=torch.int32)
        outside = distance < 0 if window is None else (distance < 0) | (distance >= window)
        hidden = outside if mask is None else mask | outside
    return x if hidden is None else torch.where(hidden, float("-inf"), x)


def _weights_and_share(x: Tensor, may_be_empty: bool) -> tuple[Tensor, Tensor, Tensor]:
    """exp(x - peak), 1 / its row's sum (1 for a row with every key masked), and the peak."""
    peak = x.amax(-1, keepdim=True)
    if may_be_empty:
        peak = torch.where(peak == float("-inf"), 0.0, peak)
    weights = torch.exp(x - peak)
    total = weights.sum(-1, keepdim=True)
    if may_be_empty:
        total = torch.where(total == 0, 1.0, total)
    return weights, 1.0 / total, peak


def _gradient(grad: Tensor, probs: Tensor, drop: DropRule | None, scale: float) -> Tensor:
    g = grad if drop is None else _drop(grad, drop)
    return scale * probs * (g - (probs * g).sum(-1, keepdim=True))


def _drop(x: Tensor, drop: DropRule) -> Tensor:
    counters, first, second, threshold, keep_scale = drop
    return torch.where(keep_mask_expression(counters, first, second, threshold), x * keep_scale, 0.0)


BACKENDS = {"scale_mask_softmax": {"reference": reference, "compile": compiled}}


# ---- Megatron's names -------------------------------------------------------------------------------------------------


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
        if softmax_offset is not None:
            raise ValueError("softmax_offset is not supported: sinks do not exist yet; pass None")
        b, heads, sq, sk = input.shape
        if self.is_kernel_available(mask, b, heads, sq, sk):
            return self.forward_fused_softmax(input, mask)
        return self.forward_torch_softmax(input, mask)

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Whether the fused form runs: it has no limit on shapes, so exactly when it was asked for."""
        return bool(self.fused and b * np * sq * sk > 0)

    def forward_fused_softmax(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """The compiled form."""
        return compiled(input, mask, **self._options(input, mask))

    def forward_torch_softmax(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """The plain form."""
        return reference(input, mask, in_fp32=self.softmax_in_fp32, **self._options(input, mask))

    def _options(self, input: Tensor, mask: Tensor | None) -> dict[str, Any]:
        sq, sk = input.shape[-2:]
        causal = self.causal and sq > 1
        if causal and mask is None:
            assert sq == sk, "causal mask is only for self attention"
        window = None if self.window_size is None or self.window_size[0] < 0 else self.window_size[0] + 1
        if window is not None and not self.causal and self.window_size is not None and self.window_size[1] != 0:
            raise ValueError(f"window_size {self.window_size}: keys after the query are only supported as 0")
        return {"scale": self.scale if self.scale is not None else 1.0, "causal": causal, "window": window}
