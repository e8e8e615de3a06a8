"""LayerNorm and RMSNorm over the last dimension.

    LayerNorm  (x - mean) / sqrt(var + eps) * weight + bias          Ba et al. 2016, arXiv:1607.06450
    RMSNorm    x / sqrt(mean(x^2) + eps) * weight                    Zhang & Sennrich 2019, arXiv:1910.07467

Shapes: x [..., h]; weight, bias [h] or None. Statistics in fp32 at least; the output has x's dtype. Saved for the
backward: x, and 4 or 8 bytes per row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fusions.column_sum import block_sums, row_block, total
from fusions.jit import jit_fuser


def reference_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """torch's own LayerNorm."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def reference_rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The definition in plain PyTorch; `bias` must be None."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normalized if weight is None else normalized * weight).to(x.dtype)


def compiled_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm with compiled kernels."""
    return _LayerNorm.apply(x, weight, bias, eps)


def compiled_rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """RMSNorm with compiled kernels."""
    return _RMSNorm.apply(x, weight, eps)


class _LayerNorm(torch.autograd.Function):
    """Saves x, mean and 1/std (4 bytes each per row).

    On a CPU both passes are PyTorch's native kernels: they are single passes already, at 0.7 of copy bandwidth, where
    Inductor's loops came to 0.45 forward and 0.25 backward (AVX2, torch 2.13; scripts/bench_fusions.py).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, eps: float) -> Tensor:
        kernel = _native_forward if x.device.type == "cpu" else _layer_norm_forward
        y, mean, rstd = kernel(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        if x.device.type == "cpu":
            wanted = list(ctx.needs_input_grad[:3])
            return (
                *torch.ops.aten.native_layer_norm_backward(grad, x, x.shape[-1:], mean, rstd, weight, bias, wanted),
                None,
            )
        dx, dweight, dbias = _layer_norm_backward(grad, x, weight, mean, rstd, row_block(x))
        return dx, total(dweight, weight), total(dbias, bias), None


class _RMSNorm(torch.autograd.Function):
    """Saves x and 1/rms (4 bytes per row)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, eps: float) -> Tensor:
        y, rstd = _rms_norm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = _rms_norm_backward(grad, x, weight, rstd, row_block(x))
        return dx, total(dweight, weight), None


def _native_forward(x: Tensor, weight: Any, bias: Any, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)


@jit_fuser
def _layer_norm_forward(x: Tensor, weight: Any, bias: Any, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    wide = _wide(x)
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    rstd = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    y = centred * rstd
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype), mean, rstd


@jit_fuser
def _layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Any, mean: Tensor, rstd: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _wide(grad)
    normalized = (_wide(x) - mean) * rstd
    g = wide if weight is None else wide * weight
    mean_g, mean_gx = g.mean(-1, keepdim=True), (g * normalized).mean(-1, keepdim=True)
    dx = ((g - mean_g - normalized * mean_gx) * rstd).to(x.dtype)
    return dx, block_sums(wide * normalized, block), block_sums(wide, block)


@jit_fuser
def _rms_norm_forward(x: Tensor, weight: Any, eps: float) -> tuple[Tensor, Tensor]:
    wide = _wide(x)
    rstd = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    y = wide * rstd
    return (y if weight is None else y * weight).to(x.dtype), rstd


@jit_fuser
def _rms_norm_backward(grad: Tensor, x: Tensor, weight: Any, rstd: Tensor, block: int) -> tuple[Tensor, Tensor]:
    wide = _wide(grad)
    normalized = _wide(x) * rstd
    g = wide if weight is None else wide * weight
    dx = ((g - normalized * (g * normalized).mean(-1, keepdim=True)) * rstd).to(x.dtype)
    return dx, block_sums(wide * normalized, block)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


BACKENDS = {
    "layer_norm": {"reference": reference_layer_norm, "compile": compiled_layer_norm},
    "rms_norm": {"reference": reference_rms_norm, "compile": compiled_rms_norm},
}


# ---- Megatron's names -------------------------------------------------------------------------------------------------


class FusedLayerNorm(nn.Module):
    """Megatron's module: reads `normalization`, `layernorm_zero_centered_gamma` and `persist_layer_norm` of any config."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **ignored: Any):
        super().__init__()
        self.eps, self.hidden_size = eps, hidden_size
        self.zero_centered_gamma = bool(config.layernorm_zero_centered_gamma)
        rms = config.normalization == "RMSNorm"
        operations = BACKENDS["rms_norm" if rms else "layer_norm"]
        self._function = operations["compile" if config.persist_layer_norm else "reference"]
        self.weight = nn.Parameter(torch.zeros(hidden_size) if self.zero_centered_gamma else torch.ones(hidden_size))
        self.bias = None if rms else nn.Parameter(torch.zeros(hidden_size))

    def forward(self, input: Tensor) -> Tensor:
        """The norm of the last dimension of `input`."""
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        return self._function(input, weight, self.bias, self.eps)
