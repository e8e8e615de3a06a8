"""Does every backend compute what the reference computes? Output and every gradient, against fp64, in each dtype.

The rule: a kernel's error against fp64 is at most twice that of the plain reference in the same dtype (and two units of its
precision). Used by the tests, and by scripts/gpu_check.py on machines that the tests have not seen.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fusions.catalogue import OPERATIONS
from fusions.fused_adam import Group
from fusions.machine import Machine
from fusions.registry import Facts, Obstacle
from fusions.samples import DTYPES, Sample, sample

Options = dict[str, Any]

# Shapes: odd, one, longer than a Triton program's registers (17000); options: what changes the arithmetic.
CASES: list[tuple[str, tuple[int, ...], Options]] = [
    ("bias_dropout_add", (5, 3, 33), {"dropout": 0.3}),
    ("bias_dropout_add", (1, 1, 1), {"dropout": 0.3, "bias": False}),
    ("bias_dropout_add", (4, 3, 2049), {"dropout": 0.0}),
    ("residual_norm", (5, 3, 33), {"dropout": 0.3}),
    ("residual_norm", (4, 2, 130), {"dropout": 0.3, "normalization": "RMSNorm"}),
    ("residual_norm", (2, 1, 17000), {"dropout": 0.3, "bias": False}),
    ("bias_gelu", (5, 3, 33), {"activation": "gelu_tanh"}),
    ("bias_gelu", (5, 3, 33), {"activation": "gelu"}),
    ("bias_gelu", (4, 1, 1), {"activation": "quick_gelu", "bias": False}),
    ("bias_gelu", (3, 1030), {"activation": "silu"}),
    ("bias_gelu", (3, 65), {"activation": "relu"}),
    ("bias_geglu", (5, 3, 34), {"clamp": 1.0, "weighted": True, "act": "quick_gelu", "offset": 1.0}),
    ("bias_geglu", (5, 3, 34), {}),
    ("bias_geglu", (3, 2062), {"act": "gelu", "bias": False}),
    ("bias_swiglu", (5, 3, 34), {}),
    ("bias_swiglu", (5, 34), {"weighted": True, "clamp": 1.0, "bias": False}),
    ("bias_swiglu", (1, 2), {"bias": False}),
    ("squared_relu", (5, 3, 33), {"weighted": True, "bias": False}),
    ("squared_relu", (5, 1030), {}),
    ("layer_norm", (5, 3, 33), {}),
    ("layer_norm", (5, 3, 128), {"memory_efficient": True}),
    ("layer_norm", (2, 17000), {}),
    ("rms_norm", (5, 3, 33), {}),
    ("rms_norm", (5, 3, 128), {"memory_efficient": True}),
    ("rms_norm", (2, 17000), {}),
    ("scale_mask_softmax", (2, 4, 17, 17), {"causal": True, "dropout": 0.2, "scale": 2.0}),
    ("scale_mask_softmax", (2, 4, 9, 13), {"mask": True, "sink": "learnable"}),
    ("scale_mask_softmax", (2, 2, 5, 5), {"causal": True, "window": 3, "mask": True, "sink": "off-by-one"}),
    ("scale_mask_softmax", (2, 2, 9, 1), {}),
    ("scale_mask_softmax", (1, 1, 2, 17000), {"causal": True, "dropout": 0.2}),
    ("rope", (5, 3, 2, 12), {"rotary_dim": 8}),
    ("rope", (5, 3, 2, 12), {"interleaved": True, "positions_per_sample": True}),
    ("rope", (1, 1, 1, 2), {}),
    ("qkv_rope", (5, 3, 2, 48), {"head_dim": 12, "rotary_dim": 8}),
    ("qkv_rope", (5, 3, 2, 24), {"head_dim": 8, "interleaved": True, "qk_bias": False, "positions_per_sample": True}),
    ("mla_rope_query", (5, 3, 2, 14), {"emb_dim": 6}),
    ("mla_rope_query", (5, 3, 2, 14), {"emb_dim": 6, "inverse": True, "remove_interleaving": True}),
    ("mla_rope_key_value", (5, 3, 2, 16), {"emb_dim": 6}),
    ("mla_rope_key_value", (5, 3, 2, 16), {"emb_dim": 6, "inverse": True, "remove_interleaving": True}),
    ("cross_entropy", (5, 3, 37), {"label_smoothing": 0.1, "z_loss": 1e-3, "padding": 4, "ignored": True}),
    ("cross_entropy", (3, 17000), {}),
    ("cross_entropy", (3, 64), {"soft_cap": 2.0, "label_smoothing": 0.1}),
    ("linear_cross_entropy", (5, 3, 37), {"label_smoothing": 0.1, "z_loss": 1e-3, "padding": 4, "hidden": 16}),
    ("linear_cross_entropy", (600, 1000), {"hidden": 16, "soft_cap": 2.0}),
    ("indices_to_multihot", (7, 9), {"top_k": 3}),
    ("pad_routing_map", (50, 6), {"multiple": 8}),
    ("linear_wgrad", (5, 3, 12), {"inputs": 8}),
]  # fmt: skip
# Options that a kernel's obstacles look at, as they are where a case doesn't say otherwise.
DEFAULTS: Options = {
    "affine": True, "memory_efficient": False, "sink": "vanilla", "interleaved": False, "magnitude": 1.0,
    "positions_per_sample": False, "qk_bias": True, "z_loss": 0.0, "soft_cap": None, "padding": 0,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One backend in one case, in one dtype, in one memory layout of its inputs ("contiguous" or "strided")."""

    operation: str
    backend: str
    dtype: str
    shape: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    layout: str = "contiguous"

    def __str__(self) -> str:
        words = ",".join(f"{k}={v}" for k, v in self.options)
        return f"{self.operation}-{self.backend}-{self.dtype}-{'x'.join(map(str, self.shape))}-{words}-{self.layout}"

    def facts(self, machine: Machine) -> Facts:
        """The facts of the case on a machine."""
        return Facts(machine, self.dtype, 1, False, self.shape, tuple((DEFAULTS | dict(self.options)).items()))

    def obstacles(self, machine: Machine) -> list[Obstacle]:
        """Why the backend can't run the case there."""
        backend = OPERATIONS[self.operation].backend(self.backend)
        assert backend is not None, f"{self.operation} has no backend {self.backend}"
        return backend.all_obstacles(self.facts(machine))


def comparisons(whole: bool) -> Iterator[Comparison]:
    """Every backend of every case: in all dtypes and both layouts, or (not `whole`) mostly in fp32."""
    seen: set[str] = set()
    for operation, shape, options in CASES:
        first = operation not in seen
        seen.add(operation)
        for dtype in ("fp32", "bf16", "fp16") if whole else ("fp32", "bf16") if first else ("fp32",):
            for layout in ("contiguous", "strided") if whole and len(shape) > 1 else ("contiguous",):
                for backend in OPERATIONS[operation].backends:
                    yield Comparison(operation, backend.name, dtype, shape, tuple(options.items()), layout)


def differences(case: Comparison, machine: Machine, device: str) -> list[str]:
    """What the backend gets wrong in the case, in words; nothing where it keeps the rule."""
    operation, kind = OPERATIONS[case.operation], DTYPES[case.dtype]
    torch.manual_seed(zlib.crc32(repr((case.operation, case.shape, case.options)).encode()))
    call = sample(case.operation, case.facts(machine), device)
    rounded = _map(call, lambda t: t.to(kind).double())
    plain_function, function = operation.function("reference"), operation.function(case.backend)
    exact = values(plain_function, rounded, torch.float64, "contiguous")
    plain = values(plain_function, rounded, kind, "contiguous")
    fused = values(function, rounded, kind, case.layout)
    found = []
    # A memory-efficient norm finds its input again from a rounded output: stated as 8 times, not 2.
    factor = 8.0 if dict(case.options).get("memory_efficient") else 2.0
    for number, (true, ours, theirs) in enumerate(zip(exact, fused, plain, strict=True)):
        if ours.shape != theirs.shape or (ours.dtype != theirs.dtype and case.operation != "linear_wgrad"):
            found.append(f"value {number}: {ours.dtype} {list(ours.shape)} instead of {theirs.dtype} {list(theirs.shape)}")
        elif not true.is_floating_point():
            found += [] if torch.equal(ours, theirs) else [f"value {number} differs"]
        else:
            allowed = factor * _worst(theirs, true) + 2 * torch.finfo(kind).eps * (
                true.abs().max().item() if true.numel() else 0
            )
            if not _worst(ours, true) <= allowed:
                found.append(f"value {number}: error {_worst(ours, true):.3e}, allowed {allowed:.3e}")
    return found


def values(function: Callable[..., Any], call: Sample, dtype: torch.dtype, layout: str) -> list[Tensor]:
    """The results, then the gradient of every leaf, with fixed upstream gradients."""
    call = _map(call, lambda t: t.to(dtype), layout)
    result = function(*call.args, **call.kwargs)
    outs = list(result) if isinstance(result, tuple) else [result]
    flowing = [o for o in outs if o.requires_grad]
    upstream = [torch.linspace(-1, 1, o.numel(), device=o.device).view(o.shape).bfloat16().to(o.dtype) for o in flowing]
    leaves = call.leaves()
    if flowing:
        torch.autograd.backward(flowing, upstream)
    grads = [leaf.grad for leaf in leaves]
    slot = call.args[-1]
    if hasattr(slot, "read"):  # the weight gradient of a fused linear is in its slot
        grads[1] = grads[1] if grads[1] is not None else slot.read()
        slot.write(None)
    return [o.detach() for o in outs] + [g for g in grads if g is not None]


def adamw_differences(backend: str, device: str) -> list[str]:
    """What an AdamW backend gets wrong in three steps, the second of them skipped, against the reference in fp64."""
    update, generator = OPERATIONS["adamw"].function(backend), torch.Generator().manual_seed(0)
    tensors = [[torch.randn(n, generator=generator) for n in (1, 33, 5000)] for _ in range(2)]

    def group(dtype: torch.dtype) -> Group:
        p, g = ([t.to(device, dtype, copy=True) for t in kind] for kind in tensors)
        first, second = ([torch.zeros_like(t) for t in p] for _ in range(2))
        steps = [torch.zeros((), device=device) for _ in p]
        return Group(p, g, first, second, steps, 0.1, [t.bfloat16() for t in p])

    ours, exact = group(torch.float32), group(torch.float64)
    for skip in (0.0, 1.0, 0.0):
        for one, step in ((ours, update), (exact, OPERATIONS["adamw"].function("reference"))):
            one.gradients = [t.to(device, one.parameters[0].dtype, copy=True) for t in tensors[1]]
            step(one, 1e-2, (0.9, 0.95), 1e-8, torch.tensor(2.0, device=device), torch.tensor(skip, device=device))
    found = []
    for kind, allowed in (("parameters", 1e-6), ("exp_avgs", 1e-6), ("exp_avg_sqs", 1e-6), ("steps", 0.0), ("copies", 0.02)):
        worst = max(_worst(a, b) for a, b in zip(getattr(ours, kind), getattr(exact, kind), strict=True))
        found += [] if worst <= allowed else [f"{kind}: off by {worst:.2e}, allowed {allowed:.0e}"]
    return found


def _map(call: Sample, change: Callable[[Tensor], Tensor], layout: str = "contiguous") -> Sample:
    """The call with its differentiable tensors changed; strided: every second element of a wider tensor's last dimension."""

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        new = change(value.detach())
        if layout == "strided" and new.dim() > 0:
            new = new.repeat_interleave(2, -1)[..., ::2]
        return new.requires_grad_()

    return Sample([one(a) for a in call.args], {k: one(v) for k, v in call.kwargs.items()})


def _worst(value: Tensor, true: Tensor) -> float:
    return (value.double() - true.double()).abs().max().item() if true.numel() else 0.0
