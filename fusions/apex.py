"""Adapters to NVIDIA's Apex (built from its source; the package of that name on PyPI is another one).

Nothing of Apex is imported before a call. When each kernel can be used is said in obstacles.py; entry points and arguments are
those of Apex 6424da3b (2026-07-08). An Apex softmax or rope backward writes into the gradient it is given, so it gets a copy.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusions.obstacles import APEX_FAST_NORM_SIZES, apex_rows_per_block
from fusions.random import MaskKey, dropout, random_mask_key


def _module(name: str) -> Any:
    return importlib.import_module(name)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, memory_efficient: bool = False) -> Tensor:
    """FastLayerNorm (one CTA or more per row, persistent) for the widths it was built for, FusedLayerNorm for others."""
    from_output = memory_efficient and _invertible(weight, bias)
    if x.shape[-1] in APEX_FAST_NORM_SIZES and not _missing("fast_layer_norm"):
        fast = _module("apex.contrib.layer_norm.layer_norm")
        return fast.FastLayerNormFN.apply(x, weight, bias, eps, from_output)
    affine = _module("apex.normalization.fused_layer_norm")
    return affine.FusedLayerNormAffineFunction.apply(x, weight, bias, x.shape[-1:], eps, from_output)


def rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, memory_efficient: bool = False) -> Tensor:
    """FusedRMSNorm; `bias` must be None."""
    affine = _module("apex.normalization.fused_layer_norm")
    from_output = memory_efficient and _invertible(weight, None)
    return affine.FusedRMSNormAffineFunction.apply(x, weight, x.shape[-1:], eps, from_output)


def _invertible(weight: Tensor, bias: Tensor | None) -> bool:
    """Apex finds its input again from the output even where a weight is 0, wrongly."""
    from fusions.fused_layer_norm import invertible

    return invertible(weight, bias)


def _missing(extension: str) -> bool:
    return importlib.util.find_spec(extension) is None


def scale_mask_softmax(
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
    """One of Apex's four softmax kernels; dropout follows as an operation of its own, with the same mask as everywhere."""
    from fusions.fused_softmax import causal_mask

    sq, sk = scores.shape[-2:]
    if causal and attention_mask is None and window is None:
        flat = scores.reshape(-1, sq, sk)
        probs = _Softmax.apply("scaled_upper_triang_masked_softmax_cuda", flat, None, scale).view(scores.shape)
    elif not causal and window is None and attention_mask is None:
        probs = _Softmax.apply("scaled_softmax_cuda", scores.contiguous(), None, scale)
    else:
        hidden = causal_mask(sq, sk, window, scores.device) if causal or window else None
        mask = attention_mask if hidden is None else hidden if attention_mask is None else attention_mask | hidden
        mask = mask.expand(scores.shape[0], 1, sq, sk).contiguous()  # pyright: ignore[reportOptionalMemberAccess]
        fits = 16 < sk <= 4096 and sq % apex_rows_per_block(sk) == 0 and sk % 4 == 0
        kernel = "scaled_masked_softmax_cuda" if fits else "generic_scaled_masked_softmax_cuda"
        probs = _Softmax.apply(kernel, scores.contiguous(), mask, scale)
    return dropout(probs, dropout_prob, mask_key or random_mask_key(probs)) if dropout_prob > 0 else probs


class _Softmax(torch.autograd.Function):
    """Saves the probabilities, in the scores' dtype: 2 bytes per element."""

    @staticmethod
    def forward(ctx: Any, kernel: str, scores: Tensor, mask: Any, scale: float) -> Tensor:
        extension = _module(kernel)
        probs = extension.forward(scores, scale) if mask is None else extension.forward(scores, mask, scale)
        ctx.save_for_backward(probs)
        ctx.extension, ctx.scale = extension, scale
        return probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        (probs,) = ctx.saved_tensors
        own = grad.clone(memory_format=torch.contiguous_format)  # the kernel works in place
        return None, ctx.extension.backward(own, probs, ctx.scale), None, None


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """fused_rotary_positional_embedding with cached cosines; halves only, one position per row."""
    return _Rope.apply(x.contiguous(), cos.contiguous(), sin.contiguous())


class _Rope(torch.autograd.Function):
    """Saves cos and sin."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _module("fused_rotary_positional_embedding").forward_cached(x, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        own = grad.clone(memory_format=torch.contiguous_format)
        return _module("fused_rotary_positional_embedding").backward_cached(own, cos, sin, False), None, None


def accumulate_wgrad(x: Tensor, grad: Tensor, total: Tensor) -> None:
    """total += grad^T x in total's dtype: x [n, in], grad [n, out], total [out, in] fp32 or the inputs' dtype."""
    extension = _module("fused_weight_gradient_mlp_cuda")
    kernel = extension.wgrad_gemm_accum_fp32 if total.dtype == torch.float32 else extension.wgrad_gemm_accum_fp16
    kernel(x.contiguous(), grad.contiguous(), total)  # it reads raw pointers


def adamw(parameters: list[dict[str, Any]], learning_rate: float, betas: tuple[float, float], eps: float) -> Any:
    """Apex's FusedAdam in its AdamW form, capturable: the learning rate and the step stay on the device."""
    return _module("apex.optimizers.fused_adam").FusedAdam(
        parameters, lr=learning_rate, betas=betas, eps=eps, adam_w_mode=True, capturable=True
    )
