"""The bytes of all tensors alive, moment by moment, of fake tensors and of real ones: what a step needs, whoever allocates it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PARAMETERS, GRADIENTS, OPTIMIZER_STATE = "parameters", "gradients", "optimizer state"
COPIES, ACTIVATIONS = "copies of parameters", "activations"
KINDS = PARAMETERS, GRADIENTS, OPTIMIZER_STATE, COPIES, ACTIVATIONS
# What makes a copy of a parameter in the compute dtype, or in the order a product wants it.
_COPYING = ("_to_copy", "clone", "copy_")


@dataclass
class _Storage:
    """One block of memory: its size now, and what it is for."""

    bytes: int
    kind: str


class LiveTensors(TorchDispatchMode):
    """While active, follows every tensor an operation gets or returns, by its storage.

    Copies of parameters are fully_shard's gathered ones, and casts. Of a compiled function only the inputs are seen, and the
    results where `see` is told of them. fully_shard gives memory back without an operation, by the size of a storage: that is
    watched too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, _Storage] = {}
        self._changes: list[tuple[_Storage, int, bool]] = []  # (what, bytes more or less, whether it may be a peak)
        self._hidden = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """It changes nothing, so functions stay compiled under it."""
        return True

    def know(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say what these tensors are for, now or once they have been followed for a while."""
        for tensor in tensors:
            self._see(tensor.to_local() if isinstance(tensor, DTensor) else tensor).kind = kind

    def see(self, tree: Any) -> None:
        """Take note of tensors that no operation has returned: the results of a compiled function."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                self._see(leaf)

    @contextlib.contextmanager
    def as_one_operation(self) -> Iterator[None]:
        """What is allocated and freed inside never was: a fused kernel keeps it in registers."""
        before, self._hidden = self._hidden, True
        try:
            yield
        finally:
            self._hidden = before
            self._changes.append((_Storage(0, ACTIVATIONS), 0, not before))

    def at_peaks(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by kind at the moment when they were the most together: before half of the gradients had come, and after.

        While gradients come, activations go, so what a step needs the most is where the first is or where the last is.
        """
        come: dict[int, int] = {}
        for number, (storage, change, _) in enumerate(self._changes):
            if storage.kind == GRADIENTS and change > 0:
                come.setdefault(id(storage), number)
        middle = sorted(come.values())[len(come) // 2] if come else len(self._changes)
        return self._peak_within(0, middle), self._peak_within(middle, len(self._changes))

    def at_peak(self) -> dict[str, int]:
        """Bytes by kind at the moment when they were the most together."""
        return max(self.at_peaks(), key=lambda memory: sum(memory.values()))

    def _peak_within(self, start: int, end: int) -> dict[str, int]:
        total = most = last = 0
        for number, (_, change, counts) in enumerate(self._changes[:end]):
            total += change
            if counts and number >= start and total > most:
                most, last = total, number + 1
        found: dict[str, int] = dict.fromkeys(KINDS, 0)
        for storage, change, _ in self._changes[:last]:
            found[storage.kind] += change
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is DTensor for t in types):
            return NotImplemented  # its operations on local tensors come one by one
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in given:
            self._see(tensor)
        source = self._see(given[0]).kind if given and func.__name__.split(".")[0] in _COPYING else ACTIVATIONS
        kind = COPIES if source in (PARAMETERS, COPIES) else ACTIVATIONS
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf, kind)
        return result

    def __enter__(self) -> Any:
        self._resize: Any = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            result = self._resize(storage, size)
            self._resized(storage, size)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def _see(self, tensor: Tensor, kind: str = ACTIVATIONS) -> _Storage:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._storages.get(key)
        if known is None:
            known = self._storages[key] = _Storage(storage.nbytes(), kind)
            weakref.finalize(storage, self._gone, key, known).atexit = False
            self._note(known, known.bytes)
        elif known.bytes != storage.nbytes():
            self._resized(storage, storage.nbytes())
        return known

    def _resized(self, storage: Any, size: int) -> None:
        known = self._storages.get(storage._cdata)
        if known is not None and size != known.bytes:
            known.kind = COPIES if known.kind == ACTIVATIONS else known.kind
            change, known.bytes = size - known.bytes, size
            self._note(known, change)

    def _gone(self, key: int, known: _Storage) -> None:
        if self._storages.get(key) is known:
            del self._storages[key]
        self._note(known, -known.bytes)
        known.bytes = 0

    def _note(self, storage: _Storage, change: int) -> None:
        self._changes.append((storage, change, not self._hidden))
