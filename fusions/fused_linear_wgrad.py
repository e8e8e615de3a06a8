"""A linear layer whose weight gradient is added straight into where gradients are kept, by the product that computes it.

    y = x W^T;   dx = dy W;   total += dy^T x        total: fp32 [out, in], allocated by the first product of a step

Shapes: x [..., in], weight [out, in], y [..., out]. Without it autograd makes the gradient in the compute dtype, then reads and
writes it and the total once more to add them. Saved for the backward: x and the weight, as F.linear saves them.
On a GPU the half-precision product is added to the fp32 total in cuBLAS; on a CPU both must be fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusions import apex, transformer_engine


class GradientSlot(Protocol):
    """Where the gradient of one weight is kept."""

    def read(self) -> Tensor | None:
        """The total so far as [out, in], or None before the first product of a step."""

    def write(self, total: Tensor) -> None:
        """Keep a new total."""


class Pending(Protocol):
    """A tensor that may still be on its way."""

    def wait(self) -> Tensor:
        """The tensor, complete."""
        ...


class Around(Protocol):
    """Communication around a product: x is brought together before it, the gradient of the whole x is summed after it."""

    def gather(self, x: Tensor) -> Pending:
        """Start to bring x together; the whole."""
        ...

    def reduce(self, grad: Tensor) -> Pending:
        """Start to sum the gradient of the whole x over the ranks; the gradient of x. May write into `grad`."""
        ...


Accumulate = Callable[[Tensor, Tensor, Tensor], None]  # (x [n, in], dy [n, out], total [out, in]): total += dy^T x


def reference(x: Tensor, weight: Tensor, slot: GradientSlot | None, around: Around | None = None) -> Tensor:
    """The definition: autograd computes the gradient and adds it; `slot` is not used."""
    return F.linear(x, weight) if around is None else _Linear.apply(x, weight, None, None, around)


def addmm(x: Tensor, weight: Tensor, slot: GradientSlot, around: Around | None = None) -> Tensor:
    """The same with the addition inside torch's own product."""
    return _Linear.apply(x, weight, slot, add_product, around)


def with_apex(x: Tensor, weight: Tensor, slot: GradientSlot, around: Around | None = None) -> Tensor:
    """The same with Apex's fused_weight_gradient_mlp_cuda."""
    return _Linear.apply(x, weight, slot, apex.accumulate_wgrad, around)


def with_transformer_engine(x: Tensor, weight: Tensor, slot: GradientSlot, around: Around | None = None) -> Tensor:
    """The same with TransformerEngine's accumulating GEMM."""
    return _Linear.apply(x, weight, slot, transformer_engine.accumulate_wgrad, around)


def add_product(x: Tensor, grad: Tensor, total: Tensor) -> None:
    """total += grad^T x, in one product where there is one: not for half precision into fp32 on a CPU."""
    if total.dtype == x.dtype:
        total.addmm_(grad.t(), x)
    elif total.is_cuda:
        torch.addmm(total, grad.t(), x, out_dtype=total.dtype, out=total)
    else:
        total.add_(grad.t() @ x)


class _Linear(torch.autograd.Function):
    """Saves x, as it is before it is brought together, and weight.

    With `accumulate` the weight's own gradient is None: it is in the slot, so that nothing adds it twice.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, slot: Any, accumulate: Accumulate | None, around: Around | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.slot, ctx.accumulate, ctx.around = slot, accumulate, around
        return F.linear(x if around is None else around.gather(x).wait(), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        around, gathered, reduced = ctx.around, None, None
        if around is not None and needs_weight:
            gathered = around.gather(x)
        dx = grad @ weight if needs_x else None
        if gathered is not None:
            x = gathered.wait()
        if around is not None and dx is not None:
            reduced = around.reduce(dx)
        dweight = None
        if needs_weight:
            dweight = _weight_gradient(ctx, x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1]), weight)
        return dx if reduced is None else reduced.wait(), dweight, None, None, None


def _weight_gradient(ctx: Any, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor | None:
    """dW of x [n, in] and dy [n, out]; None where it was added to the slot."""
    if ctx.accumulate is None:
        return grad.t() @ x
    total = ctx.slot.read()
    if total is None and x.dtype == torch.float32:
        ctx.slot.write(grad.t() @ x)
        return None
    if total is None:
        total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        ctx.slot.write(total)
    ctx.accumulate(x, grad, total)
    return None


BACKENDS = {
    "linear_wgrad": {
        "reference": reference,
        "addmm": addmm,
        "apex": with_apex,
        "transformer_engine": with_transformer_engine,
    }
}


# ---- Megatron's names -------------------------------------------------------------------------------------------------


class _MainGrad:
    """The slot of a weight that carries `main_grad`, as Megatron's optimizer wants it."""

    def __init__(self, weight: Tensor):
        self.weight: Any = weight

    def read(self) -> Tensor:
        self.weight.grad_added_to_main_grad = True
        return self.weight.main_grad

    def write(self, total: Tensor) -> None:
        raise RuntimeError("main_grad is allocated by the optimizer")


def linear_with_grad_accumulation(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input W^T + bias; the weight's gradient is added to `weight.main_grad` (fp32), and `grad_added_to_main_grad` set.

    Raises AttributeError if the weight has no `main_grad`.
    """
    if not hasattr(weight, "main_grad"):
        raise AttributeError("the weight has no main_grad to accumulate into; set weight.main_grad to a tensor of its shape")
    y = addmm(input, weight, _MainGrad(weight))
    return y if bias is None else y + bias
