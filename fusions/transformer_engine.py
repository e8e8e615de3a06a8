"""Adapters to NVIDIA's TransformerEngine. Nothing of it is imported before a call.

When each can be used is said in obstacles.py; entry points and arguments are those of TransformerEngine 2.20.0.dev0
(2026-08-22).
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _module(name: str) -> Any:
    return importlib.import_module(f"transformer_engine.pytorch{name}")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, memory_efficient: bool = False) -> Tensor:
    """te.ops.LayerNorm with our parameters."""
    norm = _norm("LayerNorm", x.shape[-1], eps, x.dtype, x.device)
    return torch.func.functional_call(norm, {"weight": weight, "bias": bias}, (x,))


def rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, memory_efficient: bool = False) -> Tensor:
    """te.ops.RMSNorm with our parameters; `bias` must be None."""
    norm = _norm("RMSNorm", x.shape[-1], eps, x.dtype, x.device)
    return torch.func.functional_call(norm, {"weight": weight}, (x,))


@functools.lru_cache(maxsize=64)
def _norm(kind: str, width: int, eps: float, dtype: torch.dtype, device: torch.device) -> Any:
    return getattr(_module(".ops"), kind)(width, eps=eps, device=device, dtype=dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """te's apply_rotary_pos_emb of x [s, b, n, d]; it wants angles [s, 1, 1, d_rot], which cos and sin determine."""
    angles = torch.atan2(sin, cos)
    return _module(".attention.rope").apply_rotary_pos_emb(
        x, angles, tensor_format="sbhd", interleaved=interleaved, fused=True
    )


def qkv_rope(mixed: Tensor, split: tuple[int, int, int], cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """te's apply_fused_qkv_rotary_pos_emb of mixed [s, b, g, q + k + v widths] -> q, k, v [s, b, heads, d]."""
    angles = torch.atan2(sin, cos)
    return _module(".attention.rope").apply_fused_qkv_rotary_pos_emb(
        mixed, angles, angles, list(split), tensor_format="sbhd", interleaved=interleaved
    )


def cross_entropy(
    logits: Tensor, target: Tensor, tp_group: dist.ProcessGroup | None, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    **unused: Any,
) -> Tensor:  # fmt: skip
    """te's parallel_cross_entropy, which leaves the gradient in its input: it gets a copy, since logits are never written."""
    loss = _module(".cross_entropy").parallel_cross_entropy(
        logits.clone(), target, label_smoothing, False, tp_group, ignore_index, False
    )
    return loss.float()


def accumulate_wgrad(x: Tensor, grad: Tensor, total: Tensor) -> None:
    """total += grad^T x by te's GEMM with accumulation: x [n, in], grad [n, out], total [out, in]."""
    gemm = importlib.import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
    options = {"out_dtype": total.dtype, "layout": "NT", "out": total, "accumulate": True, "use_split_accumulator": True}
    gemm(x.contiguous(), grad.contiguous(), **options)


def adamw(parameters: list[dict[str, Any]], learning_rate: float, betas: tuple[float, float], eps: float) -> Any:
    """te's FusedAdam in its AdamW form, capturable."""
    return _module(".optimizers.fused_adam").FusedAdam(
        parameters, lr=learning_rate, betas=betas, eps=eps, adam_w_mode=True, capturable=True
    )
