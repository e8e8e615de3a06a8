"""LayerNorm and RMSNorm over the last dimension.

    LayerNorm  (x - mean) / sqrt(var + eps) * weight + bias          Ba et al. 2016, arXiv:1607.06450
    RMSNorm    x / sqrt(mean(x^2) + eps) * weight                    Zhang & Sennrich 2019, arXiv:1910.07467

Shapes: x [..., h]; weight, bias [h] or None. Statistics in fp32 at least; the output has x's dtype. Saved for the backward,
per element: x (its own bytes), and 4 or 8 bytes per row. `memory_efficient`: the output instead of x, which the layer after
it saves anyway, so 0 bytes; the normalised row is then found again as (y - bias) / weight, in the rounding of y's dtype, and
where a weight is 0, or below 1/64 of max(1, |its bias|), x is saved after all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fusions import apex, transformer_engine
from fusions.column_sum import block_sums, row_block, total
from fusions.jit import jit_fuser
from fusions.kernels import Kernels, triton_kernels, wide


def reference_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, memory_efficient: bool = False
) -> Tensor:
    """torch's own LayerNorm. `memory_efficient` only concerns what fused forms save."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def reference_rms_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, memory_efficient: bool = False
) -> Tensor:
    """The definition in plain PyTorch; `bias` must be None."""
    normalised = wide(x) * torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + eps)
    return (normalised if weight is None else normalised * weight).to(x.dtype)


def compiled_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, memory_efficient: bool = False
) -> Tensor:
    """LayerNorm with compiled kernels; on a CPU PyTorch's native one, where that saves what was asked for.

    It is a single pass already, at 0.7 of copy bandwidth, where Inductor's loops came to 0.45 forward and 0.25 backward (AVX2,
    torch 2.13).
    """
    if x.device.type == "cpu" and not memory_efficient:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return _norm(_COMPILED, x, weight, bias, eps, False, memory_efficient)


def compiled_rms_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, memory_efficient: bool = False
) -> Tensor:
    """RMSNorm with compiled kernels."""
    return _norm(_COMPILED, x, weight, bias, eps, True, memory_efficient)


def triton_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, memory_efficient: bool = False
) -> Tensor:
    """LayerNorm with Triton kernels."""
    return _norm(triton_kernels("norm"), x, weight, bias, eps, False, memory_efficient)


def triton_rms_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, memory_efficient: bool = False
) -> Tensor:
    """RMSNorm with Triton kernels."""
    return _norm(triton_kernels("norm"), x, weight, bias, eps, True, memory_efficient)


def _norm(
    kernels: Kernels, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool, memory_efficient: bool
) -> Tensor:
    from_output = memory_efficient and invertible(weight, bias)
    return _Norm.apply(x, weight, bias, eps, rms, from_output, kernels)


def invertible(weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the normalised row can be found again from the output: not where a weight is 0 or tiny beside its bias.

    Read on the host (on a GPU: one synchronisation per norm and call), since what is saved depends on it.
    """
    if weight is None:
        return True
    largest = torch.ones_like(weight) if bias is None else torch.clamp(bias.detach().abs(), min=1.0)
    return bool((weight.detach().abs() >= 2**-6 * largest).all())


class _Norm(torch.autograd.Function):
    """Saves x, or the output when that is enough, and mean and 1/std (4 bytes each per row; RMSNorm: one of them).

    Kernels: forward(x, weight, bias, eps, rms) -> (y, mean or None, rstd); backward(grad, saved, weight, bias, mean, rstd,
    from_output) -> (dx, partial sums of dweight and dbias).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, eps: float, rms: bool, from_output: bool, kernels: Kernels
    ) -> Tensor:
        y, mean, rstd = kernels.forward(x, weight, bias, eps, rms)
        ctx.save_for_backward(y if from_output else x, weight, bias, mean, rstd)
        ctx.kernels, ctx.from_output = kernels, from_output
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, weight, bias, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = ctx.kernels.backward(grad, saved, weight, bias, mean, rstd, ctx.from_output)
        return dx, total(dweight, weight), total(dbias, bias), None, None, None, None


def _forward(x: Tensor, weight: Any, bias: Any, eps: float, rms: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    return (*_rms_norm_forward(x, weight, eps),) if rms else _layer_norm_forward(x, weight, bias, eps)


def _backward(
    grad: Tensor, saved: Tensor, weight: Any, bias: Any, mean: Any, rstd: Tensor, from_output: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    if mean is None:
        return _rms_norm_backward(grad, saved, weight, rstd, from_output, row_block(saved))
    return _layer_norm_backward(grad, saved, weight, bias, mean, rstd, from_output, row_block(saved))


@jit_fuser
def _layer_norm_forward(x: Tensor, weight: Any, bias: Any, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd = layer_norm_expression(wide(x), weight, bias, eps)
    return y.to(x.dtype), mean, rstd


@jit_fuser
def _rms_norm_forward(x: Tensor, weight: Any, eps: float) -> tuple[Tensor, None, Tensor]:
    y, _, rstd = rms_norm_expression(wide(x), weight, eps)
    return y.to(x.dtype), None, rstd


def layer_norm_expression(x: Tensor, weight: Any, bias: Any, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(LayerNorm of x, mean, 1/std) as one pure expression, for use inside a compiled function."""
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    rstd = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    y = centred * rstd
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, mean, rstd


def rms_norm_expression(x: Tensor, weight: Any, eps: float) -> tuple[Tensor, None, Tensor]:
    """(RMSNorm of x, None, 1/rms) as one pure expression."""
    rstd = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    y = x * rstd
    return y if weight is None else y * weight, None, rstd


def gradient_expression(grad: Tensor, normalised: Tensor, weight: Any, rstd: Tensor, rms: bool) -> Tensor:
    """The gradient of what was normalised; for use inside a compiled function, everything in fp32 at least."""
    g = grad if weight is None else grad * weight
    through_scale = (g * normalised).mean(-1, keepdim=True)
    if rms:
        return (g - normalised * through_scale) * rstd
    return (g - g.mean(-1, keepdim=True) - normalised * through_scale) * rstd


@jit_fuser
def _layer_norm_backward(
    grad: Tensor, saved: Tensor, weight: Any, bias: Any, mean: Tensor, rstd: Tensor, from_output: bool, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    g, s = wide(grad), wide(saved)
    normalised = _undo_affine(s, weight, bias) if from_output else (s - mean) * rstd
    dx = gradient_expression(g, normalised, weight, rstd, False)
    return dx.to(saved.dtype), block_sums(g * normalised, block), block_sums(g, block)


@jit_fuser
def _rms_norm_backward(
    grad: Tensor, saved: Tensor, weight: Any, rstd: Tensor, from_output: bool, block: int
) -> tuple[Tensor, Tensor, None]:
    g, s = wide(grad), wide(saved)
    normalised = _undo_affine(s, weight, None) if from_output else s * rstd
    return gradient_expression(g, normalised, weight, rstd, True).to(saved.dtype), block_sums(g * normalised, block), None


def _undo_affine(y: Tensor, weight: Any, bias: Any) -> Tensor:
    y = y if bias is None else y - bias
    return y if weight is None else y / weight


_COMPILED = Kernels(_forward, _backward)
BACKENDS = {
    "layer_norm": {
        "reference": reference_layer_norm,
        "compile": compiled_layer_norm,
        "triton": triton_layer_norm,
        "apex": apex.layer_norm,
        "transformer_engine": transformer_engine.layer_norm,
    },
    "rms_norm": {
        "reference": reference_rms_norm,
        "compile": compiled_rms_norm,
        "triton": triton_rms_norm,
        "apex": apex.rms_norm,
        "transformer_engine": transformer_engine.rms_norm,
    },
}


# ---- Megatron's names -------------------------------------------------------------------------------------------------


class FusedLayerNorm(nn.Module):
    """Megatron's module. Reads `normalization`, `layernorm_zero_centered_gamma`, `persist_layer_norm`,
    `memory_efficient_layer_norm` and `sequence_parallel` of any config; what a config lacks is off.

    Parameters carry `sequence_parallel` as Megatron's do, for trainers that reduce their gradients by it.
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = True,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ):
        super().__init__()
        self.config, self.eps, self.hidden_size = config, eps, hidden_size
        self.zero_centered_gamma = bool(getattr(config, "layernorm_zero_centered_gamma", False))
        self.memory_efficient = bool(getattr(config, "memory_efficient_layer_norm", False))
        rms = getattr(config, "normalization", "LayerNorm") == "RMSNorm"
        operations = BACKENDS["rms_norm" if rms else "layer_norm"]
        self._function = operations["compile" if getattr(config, "persist_layer_norm", False) else "reference"]
        self.weight = nn.Parameter(torch.zeros(hidden_size) if self.zero_centered_gamma else torch.ones(hidden_size))
        self.bias = None if rms else nn.Parameter(torch.zeros(hidden_size))
        self.sequence_parallel = bool(getattr(config, "sequence_parallel", False))
        for parameter in self.parameters():
            parameter.sequence_parallel = self.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, input: Tensor) -> Tensor:
        """The norm of the last dimension of `input`."""
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        return self._function(input, weight, self.bias, self.eps, self.memory_efficient)
