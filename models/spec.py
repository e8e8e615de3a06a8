"""ModuleSpec: what sits in a slot of a layer, said before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModuleSpec:
    """A class, arguments fixed now, and the specs of its own slots."""

    module: type
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None


Slot = ModuleSpec | type | Callable[..., Any]


def build_module(slot: Slot, *args: Any, **kwargs: Any) -> Any:
    """Build a spec or a class with these arguments; any other callable is the thing itself and is returned as it is."""
    if isinstance(slot, ModuleSpec):
        if slot.submodules is not None:
            kwargs["submodules"] = slot.submodules
        return slot.module(*args, **slot.params, **kwargs)
    if isinstance(slot, type):
        return slot(*args, **kwargs)
    return slot
