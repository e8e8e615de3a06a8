"""Dynamic loss scaling for fp16, whose smallest numbers are too large for many gradients (Micikevicius et al. 2018,
arXiv:1710.03740). All of it on the device: nothing is read on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from configs.run import LossScaleConfig, TrainingConfig


class LossScaler:
    """The factor on the loss. A step whose gradient overflowed is skipped by the optimizer; the factor then falls, once
    `hysteresis` overflows have come since it last grew, and it grows after `growth_interval` steps without one."""

    def __init__(self, config: LossScaleConfig, device: torch.device):
        self.config = config
        self.scale, self.steps, self.patience = (torch.zeros((), device=device) for _ in range(3))
        self.restart()

    def restart(self) -> None:
        """As at the first iteration."""
        self.scale.fill_(self.config.initial)
        self.steps.zero_()
        self.patience.fill_(self.config.hysteresis)

    @torch.no_grad()
    def update(self, overflow: Tensor) -> None:
        """After a step; `overflow` boolean scalar: its gradient was not finite."""
        c = self.config
        patience = torch.where(overflow, self.patience - 1, self.patience)
        steps = torch.where(overflow, 0.0, self.steps + 1)
        grown = steps >= c.growth_interval
        lower = (self.scale * c.backoff_factor).clamp(min=c.minimum)
        scale = torch.where(overflow & (patience <= 0), lower, self.scale)
        self.scale.copy_(torch.where(grown, scale * c.growth_factor, scale))
        self.steps.copy_(torch.where(grown, 0.0, steps))
        self.patience.copy_(torch.where(grown, float(c.hysteresis), patience))

    def state(self) -> dict[str, Tensor]:
        """The live tensors of a checkpoint."""
        return {"scale": self.scale, "steps": self.steps, "patience": self.patience}


def loss_scaler(config: TrainingConfig, device: torch.device) -> LossScaler | None:
    """The scaler of an fp16 run; other precisions need none."""
    return LossScaler(config.loss_scale, device) if config.precision == "fp16" else None
