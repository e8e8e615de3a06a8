"""Sample calls of every fused operation, for `auto`, the benchmarks and the parity tests: one place that knows how to call each.

    sample("rope", Facts(...), device) -> Sample(args, kwargs)       backend(*sample.args, **sample.kwargs)

Floating-point arguments of the operation's dtype require a gradient where the operation has one for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusions.fused_adam import Group
from fusions.random import random_mask_key
from fusions.registry import Facts

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Sample:
    """The arguments of one call."""

    args: list[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def leaves(self) -> list[Tensor]:
        """The tensors that get a gradient."""
        return [a for a in (*self.args, *self.kwargs.values()) if isinstance(a, Tensor) and a.requires_grad]


def sample(operation: str, facts: Facts, device: torch.device | str) -> Sample:
    """A call of `operation` with the shape, dtype and options of `facts`. KeyError for an operation that has none."""
    return _SAMPLES[operation](_Maker(facts, torch.device(device)))


class _Maker:
    """Random tensors of the facts' dtype."""

    def __init__(self, facts: Facts, device: torch.device):
        self.facts, self.device, self.dtype, self.shape = facts, device, DTYPES[facts.dtype], facts.shape

    def option(self, name: str, default: Any = None) -> Any:
        value = self.facts.option(name)
        return default if value is None else value

    def leaf(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype or self.dtype).requires_grad_()

    def maybe(self, name: str, *shape: int, default: bool = True) -> Tensor | None:
        return self.leaf(*shape) if self.option(name, default) else None


def _bias_dropout_add(make: _Maker) -> Sample:
    x, residual = make.leaf(*make.shape), make.leaf(*make.shape)
    prob = make.option("dropout", 0.1)
    key = random_mask_key(x) if prob else None
    return Sample([x, make.maybe("bias", make.shape[-1]), residual, prob, True], {"mask_key": key})


def _residual_norm(make: _Maker) -> Sample:
    sample = _bias_dropout_add(make)
    x, bias, residual, prob, _ = sample.args
    width = make.shape[-1]
    rms = make.option("normalization", "LayerNorm") == "RMSNorm"
    options = {"prob": prob, "training": True, "eps": 1e-5, "rms": rms, **sample.kwargs}
    return Sample([x, bias, residual, make.leaf(width), None if rms else make.leaf(width)], options)


def _bias_gelu(make: _Maker) -> Sample:
    return Sample([make.leaf(*make.shape), make.maybe("bias", make.shape[-1]), make.option("activation", "gelu")])


def _gated(make: _Maker) -> Sample:
    """`facts.shape` is the input's: its last dimension holds gate and linear half."""
    weights = make.leaf(*make.shape[:-1], 1) if make.option("weighted") else None
    options: dict[str, Any] = {"clamp": make.option("clamp"), "fp8_input_store": make.option("fp8_input_store", False)}
    return Sample([make.leaf(*make.shape), make.maybe("bias", make.shape[-1]), weights], options)


def _bias_geglu(make: _Maker) -> Sample:
    sample = _gated(make)
    sample.kwargs |= {"act": make.option("act", "gelu_tanh"), "offset": make.option("offset", 0.0)}
    return sample


def _squared_relu(make: _Maker) -> Sample:
    weights = make.leaf(*make.shape[:-1], 1) if make.option("weighted") else None
    return Sample([make.leaf(*make.shape), make.maybe("bias", make.shape[-1]), weights])


def _layer_norm(make: _Maker) -> Sample:
    width = make.shape[-1]
    options = {"memory_efficient": make.option("memory_efficient", False)}
    return Sample([make.leaf(*make.shape), make.leaf(width), make.leaf(width), 1e-5], options)


def _rms_norm(make: _Maker) -> Sample:
    options = {"memory_efficient": make.option("memory_efficient", False)}
    return Sample([make.leaf(*make.shape), make.leaf(make.shape[-1]), None, 1e-5], options)


def _scale_mask_softmax(make: _Maker) -> Sample:
    scores = make.leaf(*make.shape)
    prob = make.option("dropout", 0.0)
    mask = (torch.rand(make.shape[0], 1, *make.shape[2:], device=make.device) < 0.3) if make.option("mask") else None
    sink = make.leaf(make.shape[1]) if make.option("sink") == "learnable" else None
    options = {
        "causal": make.option("causal", False),
        "window": make.option("window"),
        "scale": make.option("scale", 1.0),
        "dropout_prob": prob,
        "mask_key": random_mask_key(scores) if prob else None,
        "sink": torch.zeros((), device=make.device) if make.option("sink") == "off-by-one" else sink,
    }
    return Sample([scores, mask], options)


def _angles(make: _Maker, s: int, b: int, width: int) -> tuple[Tensor, Tensor]:
    """cos and sin [s, b or 1, 1, width]."""
    frequencies = 10000.0 ** -(torch.arange(0, width, 2, device=make.device) / width)
    positions = torch.arange(s, device=make.device)[:, None] + torch.arange(b, device=make.device)
    angles = (positions[..., None] * frequencies).repeat(1, 1, 2)[:, :, None]
    return angles.cos(), angles.sin()


def _rope(make: _Maker) -> Sample:
    s, b, _, d = make.shape
    tables = _angles(make, s, b if make.option("positions_per_sample") else 1, make.option("rotary_dim", d))
    return Sample([make.leaf(*make.shape), *tables, make.option("interleaved", False)])


def _qkv_rope(make: _Maker) -> Sample:
    """`facts.shape` is mixed's: [s, b, g, (n/g + 2) d]."""
    s, b, g, width = make.shape
    d = make.option("head_dim", width // 3)
    tables = _angles(make, s, b if make.option("positions_per_sample") else 1, make.option("rotary_dim", d))
    bias = make.maybe("qk_bias", g * width)
    return Sample([make.leaf(*make.shape), bias, d, *tables, make.option("interleaved", False)])


def _mla_query(make: _Maker) -> Sample:
    emb = make.option("emb_dim", make.shape[-1] // 2)
    options = {"inverse": make.option("inverse", False), "remove_interleaving": make.option("remove_interleaving", False)}
    return Sample([make.leaf(*make.shape), *_angles(make, make.shape[0], 1, emb), emb], options)


def _mla_key_value(make: _Maker) -> Sample:
    s, b, _, width = make.shape
    emb = make.option("emb_dim", 8)
    options = {"inverse": make.option("inverse", False), "remove_interleaving": make.option("remove_interleaving", False)}
    return Sample([make.leaf(*make.shape), make.leaf(s, b, 1, emb), *_angles(make, s, 1, emb), width // 2], options)


def _loss_options(make: _Maker, width: int) -> dict[str, Any]:
    options = {"label_smoothing": make.option("label_smoothing", 0.0), "z_loss": make.option("z_loss", 0.0)}
    return {**options, "soft_cap": make.option("soft_cap"), "vocab_size": width - make.option("padding", 0)}


def _cross_entropy(make: _Maker) -> Sample:
    options = _loss_options(make, make.shape[-1])
    target = torch.randint(0, options["vocab_size"], make.shape[:-1], device=make.device)
    target.view(-1)[::5] = -100 if make.option("ignored", False) else target.view(-1)[::5]
    return Sample([make.leaf(*make.shape), target, None], options)


def _linear_cross_entropy(make: _Maker) -> Sample:
    """`facts.shape` is the logits': hidden has the width of the option "hidden"."""
    options, hidden = _loss_options(make, make.shape[-1]), make.option("hidden", 64)
    target = torch.randint(0, options["vocab_size"], make.shape[:-1], device=make.device)
    with torch.no_grad():
        weight = make.leaf(make.shape[-1], hidden).div_(math.sqrt(hidden))
    return Sample([make.leaf(*make.shape[:-1], hidden), weight.requires_grad_(), target, None], options)


def _indices_to_multihot(make: _Maker) -> Sample:
    """`facts.shape` is the result's [n, e]."""
    n, experts = make.shape
    top_k = make.option("top_k", 2)
    indices = torch.rand(n, experts, device=make.device).argsort(1)[:, :top_k]
    indices = torch.where(torch.rand(n, top_k, device=make.device) < 0.3, -1, indices)
    return Sample([indices, make.leaf(n, top_k), experts])


def _pad_routing_map(make: _Maker) -> Sample:
    return Sample([torch.rand(*make.shape, device=make.device) < 0.2, make.option("multiple", 16)])


class _Slot:
    """A gradient slot of its own."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def read(self) -> Tensor | None:
        return self.total

    def write(self, total: Tensor) -> None:
        self.total = total


def _linear_wgrad(make: _Maker) -> Sample:
    """`facts.shape` is the output's; the input has the width of the option "inputs"."""
    inputs = make.option("inputs", make.shape[-1])
    return Sample([make.leaf(*make.shape[:-1], inputs), make.leaf(make.shape[-1], inputs), _Slot()])


def _adamw(make: _Maker) -> Sample:
    """`facts.shape` is the number of elements, in tensors of up to a million."""
    sizes = [min(1 << 20, make.shape[0] - start) for start in range(0, make.shape[0], 1 << 20)]

    def tensors() -> list[Tensor]:
        return [torch.rand(size, device=make.device) for size in sizes]

    steps = [torch.ones((), device=make.device) for _ in sizes]
    scalars = torch.ones((), device=make.device), torch.zeros((), device=make.device)
    group = Group(tensors(), tensors(), tensors(), tensors(), steps, weight_decay=0.1)
    return Sample([group, 1e-4, (0.9, 0.95), 1e-8, *scalars])


_SAMPLES: dict[str, Callable[[_Maker], Sample]] = {
    "bias_dropout_add": _bias_dropout_add,
    "residual_norm": _residual_norm,
    "bias_gelu": _bias_gelu,
    "bias_geglu": _bias_geglu,
    "bias_swiglu": _gated,
    "squared_relu": _squared_relu,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "scale_mask_softmax": _scale_mask_softmax,
    "rope": _rope,
    "qkv_rope": _qkv_rope,
    "mla_rope_query": _mla_query,
    "mla_rope_key_value": _mla_key_value,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "indices_to_multihot": _indices_to_multihot,
    "pad_routing_map": _pad_routing_map,
    "linear_wgrad": _linear_wgrad,
    "adamw": _adamw,
}
