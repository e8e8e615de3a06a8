"""Weights from a counter: a function of (seed, parameter's name, global element index).

So a model is the same model at every tensor-parallel size, and no rank ever holds more than its shard.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fusions.random import DropoutKeys, random_bits, site_words


@dataclass(frozen=True)
class InitRule:
    """How a parameter starts: normal with this standard deviation, or a constant where `std` is None."""

    std: float | None = None
    constant: float = 0.0


def normal(std: float) -> InitRule:
    """Normal with mean 0."""
    return InitRule(std=std)


def constant(value: float) -> InitRule:
    """The same value everywhere."""
    return InitRule(constant=value)


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter of the model's ParallelModules by its rule."""
    for prefix, module in model.named_modules():
        rules: dict[str, InitRule] = getattr(module, "init_rules", {})
        for name, rule in rules.items():
            _fill(module.get_parameter(name), rule, f"{prefix}.{name}", seed)


def _fill(parameter: Tensor, rule: InitRule, name: str, seed: int) -> None:
    local, offset = _local_and_offset(parameter)
    if rule.std is None:
        local.fill_(rule.constant)
    else:
        local.copy_(_normal(tuple(local.shape), offset, tuple(parameter.shape), name, seed, local.device) * rule.std)


def _local_and_offset(parameter: Tensor) -> tuple[Tensor, list[int]]:
    """The local tensor and the global index of its first element, one number per dimension."""
    offset = [0] * parameter.dim()
    if not isinstance(parameter, DTensor):
        return parameter, offset
    mesh, size = parameter.device_mesh, list(parameter.shape)
    # The innermost dimension of the mesh, tensor parallel, cuts first; what it leaves is cut again over the data-parallel ranks.
    for dim_of_mesh in reversed(range(mesh.ndim)):
        placement = parameter.placements[dim_of_mesh]
        if not placement.is_replicate():
            dim: int = placement.dim  # pyright: ignore[reportAttributeAccessIssue]  a Shard, or FSDP's _StridedShard
            each = -(-size[dim] // mesh.size(dim_of_mesh))
            start = min(mesh.get_local_rank(dim_of_mesh) * each, size[dim])
            offset[dim], size[dim] = offset[dim] + start, min(each, size[dim] - start)
    local = parameter.to_local()
    assert list(local.shape) == size, f"a shard of {list(local.shape)} where {size} was expected"
    return local, offset


def _normal(
    shape: tuple[int, ...], offset: list[int], global_shape: tuple[int, ...], name: str, seed: int, device: torch.device
) -> Tensor:
    """Standard normal numbers for one block of a tensor, fp64.

    A row is the last dimension; its key comes from its index among all rows. fp64, because vectorised and scalar erfinv
    may differ in the last bit, and which one an element gets depends on the shard it lies in.
    """
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for dim, size in enumerate(shape[:-1]):
        index = torch.arange(offset[dim], offset[dim] + size, device=device)
        rows = rows[..., None] * global_shape[dim] + index
    digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    words = site_words(seed, digest, 1).to(device)
    flat = rows.reshape(1, -1)
    key = DropoutKeys(words, torch.zeros(1, dtype=torch.int64, device=device)).hidden(0, flat[0])
    bits = random_bits(key, shape[-1], offset[-1]).reshape(shape)
    uniform = (bits.double() + (2**31 + 0.5)) / 2**32  # in (0, 1)
    return torch.erfinv(2 * uniform - 1) * math.sqrt(2)
