"""AdamW with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101), over fp32 parameters at rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from configs.run import OptimizerConfig
from fusions.catalogue import OPERATIONS
from fusions.fused_adam import Group, Update
from fusions.registry import REFERENCE, Counters, FusionPlan
from models.fusion_sites import OPTIMIZER_FLAG
from trainer.gradients import local_gradient, partial_parameters
from trainer.loss_scale import LossScaler

# The keys of the loss scale in a checkpoint.
LOSS_SCALE = {f"optimizer.loss_scale.{name}" for name in ("scale", "steps", "patience")}


@dataclass
class _State:
    """AdamW's state of one parameter, placed as the parameter is."""

    step: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class Optimizer:
    """AdamW by the backend the plan chose; clipping and the skip of a step happen inside its one pass.

    Matrices and embeddings decay; every parameter of one dimension (norms, biases) does not. State exists from the start,
    so that a checkpoint is complete at any iteration.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        plan: FusionPlan,
        counters: Counters,
        scaler: LossScaler | None = None,
    ):
        named = list(model.named_parameters())
        self.names = {id(parameter): name for name, parameter in named}
        self.parameters = [parameter for _, parameter in named]
        self.partial = partial_parameters(model)
        self.config, self.betas, self.scaler = config, (config.betas[0], config.betas[1]), scaler
        decision = plan.decision(OPTIMIZER_FLAG, "optimizer")
        self.update: Update = OPERATIONS[decision.operation].function(decision.runs)
        self.fused = decision.runs != REFERENCE
        self.counts = counters.site(OPTIMIZER_FLAG, "optimizer")
        self.states = {
            id(p): _State(
                torch.zeros((), dtype=torch.float32, device=p.device),
                torch.zeros_like(p, requires_grad=False),
                torch.zeros_like(p, requires_grad=False),
            )
            for p in self.parameters
        }
        matrices = [p for p in self.parameters if p.dim() >= 2]
        vectors = [p for p in self.parameters if p.dim() < 2]
        decays = ((matrices, config.weight_decay), (vectors, 0.0))
        self.groups = [(group, decay) for group, decay in decays if group]

    def describe(self) -> str:
        """How many tensors and elements decay and don't."""
        words = [
            f"{len(group)} tensors, {sum(p.numel() for p in group):,} elements, weight decay {decay}"
            for group, decay in self.groups
        ]
        return "AdamW: " + "; ".join(words)

    @torch.no_grad()
    def step(self, learning_rate: float, norm: Tensor, skip: Tensor) -> None:
        """One update. Gradients are scaled to a global norm of at most clip_grad; nothing changes where `skip` is 1.

        `norm`, of the gradient as it would be without loss scaling, and `skip` are fp32 scalars on the device: nothing is read on
        the host.
        """
        clip = self.config.clip_grad
        scale = torch.clamp((norm + 1e-6) / clip, min=1.0) if clip > 0 else torch.ones_like(norm)
        scale = scale if self.scaler is None else scale * self.scaler.scale
        for whole_group, decay in self.groups:
            parameters = [p for p in whole_group if _local(p).numel()]  # a rank may have nothing of a small one
            states = [self.states[id(p)] for p in parameters]
            group = Group(
                [_local(p) for p in parameters],
                [local_gradient(p) for p in parameters],
                [_local(state.exp_avg) for state in states],
                [_local(state.exp_avg_sq) for state in states],
                [state.step for state in states],
                decay,
            )
            self.update(group, learning_rate, self.betas, self.config.eps, scale, skip)
        if self.fused:
            self.counts.fused += 1
        else:
            self.counts.reference += 1

    def adopt(self, other: Optimizer) -> None:
        """Update the parameters of another optimizer, and its state, instead of one's own: the two take turns."""
        theirs = {other.names[id(p)]: p for p in other.parameters}
        swap = {id(p): theirs[self.names[id(p)]] for p in self.parameters}
        self.groups = [([swap[id(p)] for p in group], decay) for group, decay in self.groups]
        self.parameters, self.partial = ([swap[id(p)] for p in group] for group in (self.parameters, self.partial))
        self.names, self.states, self.scaler = other.names, other.states, other.scaler

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def restart(self) -> None:
        """As before the first step."""
        for state in self.states.values():
            for value in vars(state).values():
                value.zero_()
        if self.scaler is not None:
            self.scaler.restart()
        self.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """The state's tensors under `optimizer.<kind>.<parameter>` (and `optimizer.loss_scale.`), the live ones: loading writes
        into them."""
        scaler = {} if self.scaler is None else self.scaler.state()
        return {f"optimizer.loss_scale.{name}": value for name, value in scaler.items()} | {
            f"optimizer.{kind}.{self.names[id(p)]}": value
            for p in self.parameters
            for kind, value in vars(self.states[id(p)]).items()
        }


def _local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
