"""Tolerance by comparison: a kernel's error against fp64 is at most twice that of plain PyTorch in the same dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def outputs_and_gradients(
    function: Callable[..., Tensor], inputs: list[Any], dtype: torch.dtype, grad: Tensor
) -> list[Tensor]:
    """The output and the gradient of every floating-point input, computed in `dtype`."""
    cast = [x.detach().to(dtype).requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
    y = function(*cast)
    y.backward(grad.to(y.dtype))
    return [y.detach()] + [x.grad for x in cast if isinstance(x, Tensor) and x.is_floating_point()]


def compare_with_fp64(
    reference: Callable[..., Tensor],
    kernel: Callable[..., Tensor],
    inputs: list[Any],
    dtype: torch.dtype,
    factor: float = 2.0,
) -> None:
    """Assert the rule for the output and every gradient; inputs are rounded to `dtype` first, so all see the same numbers."""
    rounded = [x.to(dtype).double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
    shape = reference(*rounded).shape
    grad = (
        torch.linspace(-1, 1, max(1, shape.numel()), dtype=torch.float64)[: shape.numel()].reshape(shape).to(dtype).double()
    )
    exact = outputs_and_gradients(reference, rounded, torch.float64, grad)
    plain = outputs_and_gradients(reference, rounded, dtype, grad)
    fused = outputs_and_gradients(kernel, rounded, dtype, grad)
    for number, (true, ours, theirs) in enumerate(zip(exact, fused, plain, strict=True)):
        assert ours.shape == true.shape and ours.dtype == theirs.dtype
        scale = true.abs().max().item() if true.numel() else 0.0
        allowed = factor * _error(theirs, true) + torch.finfo(dtype).eps * scale
        assert _error(ours, true) <= allowed, f"value {number}: error {_error(ours, true):.3e}, allowed {allowed:.3e}"


def _error(value: Tensor, true: Tensor) -> float:
    return (value.double() - true).abs().max().item() if true.numel() else 0.0


def relative(a: Tensor, b: Tensor, whole: float = 0.0) -> float:
    """|a - b| / max(|b|, 1e-3 whole): DESIGN's equality of gradients, with `whole` the norm of all of them."""
    return float((a.double() - b.double()).norm() / max(float(b.double().norm()), 1e-3 * whole, 1e-300))
