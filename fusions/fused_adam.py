"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) over all parameters of a group at once.

    g = gradient / scale;   m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2
    p = p (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

An update is `f(Group, lr, betas, eps, scale, skip)`. `scale` and `skip` are fp32 scalars on the device (of clipping, and of a
step whose gradient isn't finite): nothing changes where skip is 1, the step counter included, and nothing is read on the
host. Where a group has `copies`, the parameters in the compute dtype, they are written too; Triton's in the same pass.
Bytes moved per parameter: 28 in one pass (read p, g, m, v; write p, m, v), and 2 for a bf16 copy; the reference moves about 80.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fusions import apex, transformer_engine


@dataclass
class Group:
    """The local tensors of parameters that share a weight decay; fp32, in one order. `steps` are fp32 scalars."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    weight_decay: float
    copies: list[Tensor] = field(default_factory=list)


Update = Callable[[Group, float, tuple[float, float], float, Tensor, Tensor], None]


def reference(group: Group, lr: float, betas: tuple[float, float], eps: float, scale: Tensor, skip: Tensor) -> None:
    """The definition, one parameter after the other."""
    keep = skip == 0
    for p, g, m, v, step in zip(
        group.parameters, group.gradients, group.exp_avgs, group.exp_avg_sqs, group.steps, strict=True
    ):
        t = step + 1
        g = g / scale
        m_new = betas[0] * m + (1 - betas[0]) * g
        v_new = betas[1] * v + (1 - betas[1]) * g * g
        m_hat, v_hat = m_new / (1 - betas[0] ** t), v_new / (1 - betas[1] ** t)
        p_new = p * (1 - lr * group.weight_decay) - lr * m_hat / (v_hat.sqrt() + eps)
        for old, new in ((p, p_new), (m, m_new), (v, v_new), (step, t)):
            old.copy_(torch.where(keep, new, old))
    write_copies(group)


def torch_fused(group: Group, lr: float, betas: tuple[float, float], eps: float, scale: Tensor, skip: Tensor) -> None:
    """PyTorch's fused AdamW: one kernel over all tensors on a GPU, one vectorised loop each on a CPU.

    It leaves the gradients divided by `scale`.
    """
    adamw(
        group.parameters,
        group.gradients,
        group.exp_avgs,
        group.exp_avg_sqs,
        [],
        group.steps,
        fused=True,
        grad_scale=scale,
        found_inf=skip,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=group.weight_decay,
        eps=eps,
        maximize=False,
    )
    write_copies(group)


def triton(group: Group, lr: float, betas: tuple[float, float], eps: float, scale: Tensor, skip: Tensor) -> None:
    """One Triton kernel over all tensors, the compute copies included."""
    from fusions.triton import adam  # here, since Triton is optional

    adam.step(group, lr, betas, eps, scale, skip)


def with_apex(group: Group, lr: float, betas: tuple[float, float], eps: float, scale: Tensor, skip: Tensor) -> None:
    """Apex's FusedAdam, on our state."""
    _by_optimizer(apex.adamw, group, lr, betas, eps, scale, skip)


def with_transformer_engine(
    group: Group, lr: float, betas: tuple[float, float], eps: float, scale: Tensor, skip: Tensor
) -> None:
    """TransformerEngine's FusedAdam, on our state."""
    _by_optimizer(transformer_engine.adamw, group, lr, betas, eps, scale, skip)


def write_copies(group: Group) -> None:
    """The parameters in the compute dtype, in a pass of their own."""
    if group.copies:
        torch._foreach_copy_(group.copies, group.parameters)


@dataclass(frozen=True)
class _ScaleAndSkip:
    """What a FusedAdam asks of a GradScaler."""

    scale: Tensor
    skip: Tensor

    def _get_scale_async(self) -> Tensor:
        return self.scale

    def _check_inf_per_device(self, optimizer: Any) -> dict[torch.device, Tensor]:
        return {self.skip.device: self.skip}


_OPTIMIZERS: dict[tuple[Any, ...], tuple[Any, list[torch.nn.Parameter]]] = {}


def _by_optimizer(
    make: Callable[..., Any], group: Group, lr: float, betas: tuple[float, float], eps: float, scale: Tensor, skip: Tensor
) -> None:
    """One step of a class that owns its state: it is given ours, and its counter is copied back."""
    key = (make, *(p.data_ptr() for p in group.parameters))
    if key not in _OPTIMIZERS:
        own = [torch.nn.Parameter(p, requires_grad=True) for p in group.parameters]  # share storage
        optimizer = make([{"params": own, "weight_decay": group.weight_decay}], lr, betas, eps)
        for p, m, v in zip(own, group.exp_avgs, group.exp_avg_sqs, strict=True):
            optimizer.state[p].update(exp_avg=m, exp_avg_sq=v)
        _OPTIMIZERS[key] = (optimizer, own)
    optimizer, own = _OPTIMIZERS[key]
    for p, g in zip(own, group.gradients, strict=True):
        p.grad = g
    state = optimizer.param_groups[0]
    lr_tensor = state["lr"]
    if isinstance(lr_tensor, Tensor):
        lr_tensor.fill_(lr)
    else:
        state["lr"] = lr
    state["step"] = group.steps[0].to(torch.int).reshape(1)
    optimizer.step(grad_scaler=_ScaleAndSkip(scale, skip))
    for step in group.steps:
        step.copy_(state["step"][0])
    write_copies(group)


BACKENDS = {
    "adamw": {
        "reference": reference,
        "torch": torch_fused,
        "triton": triton,
        "apex": with_apex,
        "transformer_engine": with_transformer_engine,
    }
}
