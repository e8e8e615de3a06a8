"""One generated suite: operation x backend x dtype x shapes and options; output and every gradient against fp64.

The rule is DESIGN's: a kernel's error is at most twice that of the plain reference in the same dtype. By default a few cases of
each operation run, in the dtypes that matter; `-m parity` runs the whole product. Triton's kernels run on a GPU, or in Triton's
interpreter.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

from fusions.catalogue import OPERATIONS
from fusions.machine import probe
from fusions.registry import Facts
from fusions.samples import DTYPES, Sample, sample

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# (operation, shape, options); the first of each operation also runs by default in bf16.
CASES: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
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


def combinations(whole: bool) -> list[Any]:
    seen: set[str] = set()
    found = []
    for operation, shape, options in CASES:
        first = operation not in seen
        seen.add(operation)
        for dtype in ("fp32", "bf16", "fp16"):
            if not whole and (dtype == "fp16" or (dtype == "bf16" and not first)):
                continue
            for backend in OPERATIONS[operation].backends:
                words = ",".join(f"{k}={v}" for k, v in options.items())
                name = f"{operation}-{backend.name}-{dtype}-{'x'.join(map(str, shape))}-{words}"
                found.append(pytest.param(operation, backend.name, dtype, shape, options, id=name))
    return found


def facts_of(operation: str, dtype: str, shape: tuple[int, ...], options: dict[str, Any]) -> Facts:
    machine = dataclasses.replace(probe(DEVICE), triton_interpreted=True)
    extra = {"affine": True, "memory_efficient": False, "sink": "vanilla", "interleaved": False, "magnitude": 1.0} | options
    return Facts(machine, dtype, 1, False, shape, tuple(extra.items()))


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.requires_grad:
        return value.detach().to(dtype).requires_grad_()
    return value


def run(function: Any, call: Sample, dtype: torch.dtype) -> list[Tensor]:
    """Outputs, then the gradient of every leaf, with fixed upstream gradients."""
    args = [cast(a, dtype) for a in call.args]
    kwargs = {k: cast(v, dtype) for k, v in call.kwargs.items()}
    outs = function(*args, **kwargs)
    outs = list(outs) if isinstance(outs, tuple) else [outs]
    leaves = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.requires_grad]
    flowing = [o for o in outs if o.requires_grad]
    upstream = [
        torch.linspace(-1, 1, o.numel(), dtype=torch.float64, device=o.device).reshape(o.shape).bfloat16() for o in flowing
    ]
    if flowing:
        torch.autograd.backward(flowing, [u.to(o.dtype) for u, o in zip(upstream, flowing, strict=True)])
    grads = [leaf.grad for leaf in leaves]
    slot = args[-1]
    if hasattr(slot, "read"):  # the weight gradient of a fused linear is in its slot
        grads[1] = grads[1] if grads[1] is not None else slot.read()
        slot.write(None)
    return [o.detach() for o in outs] + grads


def check(operation: str, backend: str, dtype: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    facts = facts_of(operation, dtype, shape, options)
    obstacles = OPERATIONS[operation].backend(backend).all_obstacles(facts)
    if obstacles:
        pytest.skip("; ".join(map(str, obstacles)))
    torch.manual_seed(zlib.crc32(repr((operation, shape, options)).encode()))
    call = sample(operation, facts, DEVICE)
    kind = DTYPES[dtype]
    plain_function, function = OPERATIONS[operation].function("reference"), OPERATIONS[operation].function(backend)
    exact = run(plain_function, rounded(call, kind), torch.float64)
    plain = run(plain_function, rounded(call, kind), kind)
    fused = run(function, rounded(call, kind), kind)
    for number, (true, ours, theirs) in enumerate(zip(exact, fused, plain, strict=True)):
        assert ours.shape == theirs.shape, f"value {number}: {ours.shape} instead of {theirs.shape}"
        if not true.is_floating_point():
            assert torch.equal(ours, theirs)
            continue
        assert operation == "linear_wgrad" or ours.dtype == theirs.dtype, (
            f"value {number}: {ours.dtype} instead of {theirs.dtype}"
        )
        scale = true.abs().max().item()
        allowed = tolerance_factor(options) * worst(theirs, true) + 2 * torch.finfo(kind).eps * scale
        assert worst(ours, true) <= allowed, f"value {number}: error {worst(ours, true):.3e}, allowed {allowed:.3e}"


def tolerance_factor(options: dict[str, Any]) -> float:
    """Twice the plain form's error; a memory-efficient norm finds its input again from a rounded output, stated as 8 times."""
    return 8.0 if options.get("memory_efficient") else 2.0


def rounded(call: Sample, dtype: torch.dtype) -> Sample:
    """The same numbers for all three: what the dtype can hold."""

    def fit(value: Any) -> Any:
        if isinstance(value, Tensor) and value.requires_grad:
            return value.detach().to(dtype).double().requires_grad_()
        return value

    return Sample([fit(a) for a in call.args], {k: fit(v) for k, v in call.kwargs.items()})


def worst(value: Tensor, true: Tensor) -> float:
    return (value.double() - true.double()).abs().max().item() if true.numel() else 0.0


@pytest.mark.parametrize(("operation", "backend", "dtype", "shape", "options"), combinations(whole=False))
def test_parity(operation: str, backend: str, dtype: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    check(operation, backend, dtype, shape, options)


@pytest.mark.parity
@pytest.mark.parametrize(("operation", "backend", "dtype", "shape", "options"), combinations(whole=True))
def test_whole_parity(operation: str, backend: str, dtype: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    check(operation, backend, dtype, shape, options)
