"""What a step does: the FLOPs of its matrix products, as PyTorch's FLOP counter has them, and the bytes its operations move."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

# They read as much as they write, however large the table is.
_LOOK_UPS = ("embedding", "gather", "index", "index_select")
_NOTHING = ("empty", "empty_like", "new_empty", "empty_strided", "detach", "alias")

Operation = tuple[int, int]  # (FLOPs, bytes moved) of one call


def _count_cpu_attention() -> None:
    """PyTorch's counter knows attention's kernels but the CPU's: the same products, by its own formulas, from here on."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    if forward not in flop_registry:
        register_flop_formula(forward)(lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v))
        register_flop_formula(backward)(lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v))


_count_cpu_attention()


class StepWork(TorchDispatchMode):
    """Counts the operations of a step by (FLOPs, bytes). Collectives are not in it.

    Moved is every distinct tensor read and every one written, once: what an operation cannot do without.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[Operation] = Counter()
        self._hidden = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """It changes nothing."""
        return True

    @contextlib.contextmanager
    def as_one_operation(self, inputs: Any) -> Iterator[list[Any]]:
        """What is inside moves its inputs and what is put into the list."""
        outputs: list[Any] = []
        before, self._hidden = self._hidden, True
        try:
            yield outputs
        finally:
            self._hidden = before
        if not before:
            self.operations[0, _moved(_tensors(inputs)) + _moved(_tensors(outputs))] += 1

    @property
    def flops(self) -> int:
        """Of all operations."""
        return sum(flops * calls for (flops, _), calls in self.operations.items())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is DTensor for t in types):
            return NotImplemented  # its operations on local tensors come one by one
        result = func(*args, **(kwargs or {}))
        flops = _flops(func, args, kwargs or {}, result)
        if flops or not (self._hidden or _moves_nothing(func)):
            self.operations[flops, _bytes(func, args, kwargs or {}, result)] += 1
        return result


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    packet = getattr(func, "_overloadpacket", None)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    return 0


def _bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    read, made = _tensors((args, kwargs)), _tensors(result)
    storages = {t.untyped_storage()._cdata for t in read}
    new = [t for t in made if t.untyped_storage()._cdata not in storages]
    if func.__name__.split(".")[0] in _LOOK_UPS:
        return 2 * _moved(new)
    return _moved(read) + _moved(new) + _moved(_tensors([args[i] for i in _written(func) if i < len(args)]))


@functools.cache
def _moves_nothing(func: Any) -> bool:
    name = func.__name__.split(".")[0]
    return func.namespace not in ("aten", "prims") or func.is_view or name in _NOTHING


@functools.cache
def _written(func: Any) -> tuple[int, ...]:
    """The places of the arguments that are written into."""
    arguments = func._schema.arguments
    return tuple(
        i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write and not a.kwarg_only
    )


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _moved(tensors: list[Tensor]) -> int:
    """Bytes of distinct tensors; one that was expanded has no more than its storage."""
    distinct = {(t.untyped_storage()._cdata, t.storage_offset(), t.shape): t for t in tensors}
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in distinct.values())
