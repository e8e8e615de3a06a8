"""AdamW with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101), over fp32 parameters at rest."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from configs.run import OptimizerConfig


class Optimizer:
    """PyTorch's AdamW in its fused form; clipping and the skip of a step happen inside its one pass.

    Matrices and embeddings decay; every parameter of one dimension (norms, biases) does not. State exists from the start,
    so that a checkpoint is complete at any iteration.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig):
        named = list(model.named_parameters())
        self.names = {id(parameter): name for name, parameter in named}
        self.parameters = [parameter for _, parameter in named]
        self.clip_grad = config.clip_grad
        decay = [p for p in self.parameters if p.dim() >= 2]
        no_decay = [p for p in self.parameters if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
        betas = (config.betas[0], config.betas[1])
        self.adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=config.learning_rate, betas=betas, eps=config.eps, fused=True
        )
        for parameter in self.parameters:
            self.adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def describe(self) -> str:
        """How many tensors and elements decay and don't."""
        words = []
        for group in self.adamw.param_groups:
            count, elements = len(group["params"]), sum(p.numel() for p in group["params"])
            words.append(f"{count} tensors, {elements:,} elements, weight decay {group['weight_decay']}")
        return "AdamW: " + "; ".join(words)

    def step(self, learning_rate: float, norm: Tensor, skip: Tensor) -> None:
        """One update. Gradients are scaled to a global norm of at most clip_grad; nothing changes where `skip` is 1.

        `norm` and `skip` are fp32 scalars on the device: nothing is read on the host.
        """
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        # The names are those of GradScaler's contract with fused optimizers: gradients are divided by grad_scale.
        scale = torch.clamp((norm + 1e-6) / self.clip_grad, min=1.0) if self.clip_grad > 0 else torch.ones_like(norm)
        self.adamw.grad_scale, self.adamw.found_inf = scale, skip  # pyright: ignore[reportAttributeAccessIssue]
        self.adamw.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """The state's tensors under `optimizer.<kind>.<parameter>`, the live ones: loading writes into them."""
        return {
            f"optimizer.{kind}.{self.names[id(p)]}": value
            for p in self.parameters
            for kind, value in self.adamw.state[p].items()
        }
