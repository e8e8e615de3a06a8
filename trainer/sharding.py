"""Data parallel by PyTorch's own engine: fully_shard, a group of parameters per layer and one for the rest of the model.

    data_sharding   parameters of a layer outside its forward and backward     optimizer state, gradients
    none            whole (fully_shard over shards of one rank, HSDP)          whole, equal on all ranks
    optimizer       whole from the forward to the end of the backward          1 / shards
    full            1 / shards                                                 1 / shards

Parameters at rest are fp32 whatever the precision; a layer computes with a copy in the compute dtype, and gradients are summed in
fp32.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from configs.run import ParallelConfig
from models.language_model import LanguageModel
from models.transformer_block import TransformerBlock
from trainer.meshes import Meshes


def shard_over_data(model: LanguageModel, meshes: Meshes, parallel: ParallelConfig) -> None:
    """Hand the model's parameters to fully_shard, in place; nothing at data-parallel size 1.

    Gradients are summed over the data-parallel ranks, not averaged: each loss was divided by the global count before.
    """
    if meshes.data is None:
        return
    full = parallel.data_sharding == "full"
    half = None if model.compute_dtype == torch.float32 else model.compute_dtype
    options: dict[str, Any] = {
        "mesh": meshes.data,
        "mp_policy": MixedPrecisionPolicy(half, torch.float32, cast_forward_inputs=False),
        "shard_placement_fn": lambda parameter: _placement(parameter, parallel.shard_size),
    }
    stacks = [m for m in model.modules() if isinstance(m, TransformerBlock)]
    for stack in stacks:
        for layer in stack.layers:
            fully_shard(layer, reshard_after_forward=full, **options)
    # Embeddings and output layer are used at both ends of a step: gathered again in between, they would only move twice.
    fully_shard(model, reshard_after_forward=False, **options)
    layers: list[Any] = [layer for stack in stacks for layer in stack.layers]
    for before, after in itertools.pairwise(layers):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    for module in _sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no average


def _placement(parameter: nn.Parameter, shards: int) -> Shard | None:
    """Dimension 0 where it is divisible; else the last divisible one, for a weight with few key/value groups: cut unevenly in
    dimension 0, it would be padded to `shards` times its size in every gather."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    divisible = [dim for dim in reversed(range(1, local.dim())) if local.shape[dim] % shards == 0]
    return Shard(divisible[0]) if local.shape[0] % shards and divisible else None


def sync_gradients(model: nn.Module, last: bool, full: bool) -> None:
    """Before a micro-batch: gradients are summed over the ranks after the last one only, and whole layers are kept until then
    (under `full` each micro-batch gathers them again)."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last or full)


def free_whole_parameters(model: nn.Module) -> None:
    """After a forward without a backward: give the gathered parameters back, so that the sharded ones are the module's again."""
    for module in _sharded_modules(model):
        module.reshard()


def accumulated_gradients(model: nn.Module) -> list[torch.Tensor]:
    """The whole gradients that fully_shard keeps between micro-batches, before they are summed over the ranks."""
    found = []
    for module in _sharded_modules(model):
        group = module._get_fsdp_state()._fsdp_param_group
        for parameter in [] if group is None else group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            kept = parameter.unsharded_accumulated_grad if whole is None or whole.grad is None else whole.grad
            found += [] if kept is None else [kept.to_local() if isinstance(kept, DTensor) else kept]
    return found


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
