"""Where a step's time goes: by fusion site, forward and backward, from PyTorch's profiler.

Every module and every slot of the model gets a named range. A forward operation belongs to the innermost range it runs in; a
backward operation to the site of the forward operation with the same sequence number. Layers of a stack are one site.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from trainer.loop import PHASES

_SITE, _STEP = "fuseline site: ", "fuseline step"
# Slots that are all that their module does: the module is the site.
_WHOLE = ("function", "product")
_FRAME = ("autograd::engine::evaluate_function: ", "autograd::")


def profile_steps(model: nn.Module, step: Callable[[], object], steps: int = 2) -> dict[str, Any]:
    """Seconds of a step: `total`, `sites: {path: {forward, backward}}`, and `phases` for what belongs to no site.

    The parts add up to the total. Times are the device's on a GPU (kernels), this thread's on a CPU, and are longer than without
    the profiler: what counts is their shares.
    """
    device = next(model.parameters()).device
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with _ranges(model), profile(activities=activities) as profiler:
        for _ in range(steps):
            with record_function(_STEP):
                step()
    return _Tally(list(profiler.events() or []), device.type == "cuda").result(steps)


class _Tally:
    """Adds the self times of all events up where they belong."""

    def __init__(self, events: list[Any], cuda: bool):
        self.cuda = cuda
        self.sites: dict[str, dict[str, float]] = defaultdict(lambda: {"forward": 0.0, "backward": 0.0})
        self.phases: dict[str, float] = defaultdict(float)
        site_of_sequence: dict[int, str] = {}
        inside = []
        for event in events:
            ancestors = list(_ancestors(event))
            if any(a.name == _STEP for a in ancestors):
                inside.append((event, ancestors))
        for event, ancestors in inside:
            site = _site(ancestors)
            if site and event.sequence_nr >= 0 and not event.name.startswith(_FRAME):
                site_of_sequence[event.sequence_nr] = site
        for event, ancestors in inside:
            self._add(event, ancestors, site_of_sequence)

    def _add(self, event: Any, ancestors: list[Any], site_of_sequence: dict[int, str]) -> None:
        seconds = (event.self_device_time_total if self.cuda else event.self_cpu_time_total) / 1e6
        site = _site(ancestors)
        if site:
            self.sites[site]["forward"] += seconds
            return
        frame = next((a for a in ancestors if a.name.startswith(_FRAME)), None)
        if frame is not None and (site := site_of_sequence.get(frame.sequence_nr, "")):
            self.sites[site]["backward"] += seconds
            return
        phase = next((a.name for a in ancestors if a.name in PHASES), "between the phases of a step")
        self.phases[phase] += seconds

    def result(self, steps: int) -> dict[str, Any]:
        """Seconds per step."""
        sites = {name: {part: s / steps for part, s in parts.items()} for name, parts in self.sites.items()}
        phases = {name: seconds / steps for name, seconds in self.phases.items()}
        total = sum(sum(parts.values()) for parts in sites.values()) + sum(phases.values())
        return {"total": total, "sites": sites, "phases": phases}


def _ancestors(event: Any) -> Iterator[Any]:
    """The event and all it is nested in, innermost first."""
    while event is not None:
        yield event
        event = event.cpu_parent


def _site(ancestors: list[Any]) -> str:
    """The innermost range's site, "" in none. (What recomputation runs inside a backward frame is in a range, too.)"""
    return next((a.name.removeprefix(_SITE) for a in ancestors if a.name.startswith(_SITE)), "")


@contextmanager
def _ranges(model: nn.Module) -> Iterator[None]:
    """Name every module and slot for the profiler, and take the names away again.

    A slot that calls a module (add, then norm) is one site: within it no other range opens, so that fused and unfused compare.
    """
    undo: list[Callable[[], None]] = []
    depth = [0]
    modules = dict(model.named_modules())
    compiled = [path for path, module in modules.items() if getattr(module, "_compiled_call_impl", None) is not None]
    # A compiled layer is one site, and nothing that it may call (the norm after the last one) can be touched: a range inside
    # would compile it anew.
    stacks = tuple({".".join(path.split(".")[:-2]) + "." for path in compiled})
    for path, module in modules.items():
        site = _SITE + re.sub(r"\.\d+", ".*", path)
        if path in compiled:
            call = module._compiled_call_impl
            assert call is not None, "that is what makes it compiled"
            module._compiled_call_impl = _in_range(call, site, depth, exclusive=True)
            undo.append(lambda m=module, c=call: setattr(m, "_compiled_call_impl", c))
        if stacks and path.startswith(stacks):
            continue
        if path:
            undo += _hooks(module, site, depth)
        for name, slot in list(vars(module).items()):
            if callable(slot) and not name.startswith("_") and not isinstance(slot, (nn.Module, type, torch.Tensor)):
                own = site if name in _WHOLE else f"{site}.{name}"
                setattr(module, name, _Slot(slot, own, depth))
                undo.append(lambda m=module, n=name, s=slot: setattr(m, n, s))
    try:
        yield
    finally:
        for action in undo:
            action()


class _Slot:
    """A slot's callable inside a range; everything else is the slot's own."""

    def __init__(self, slot: Any, name: str, depth: list[int]):
        self._slot, self._call = slot, _in_range(slot, name, depth, exclusive=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slot, name)


def _in_range(call: Callable[..., Any], name: str, depth: list[int], exclusive: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if depth[0]:
            return call(*args, **kwargs)
        depth[0] += exclusive
        try:
            with record_function(name):
                return call(*args, **kwargs)
        finally:
            depth[0] -= exclusive

    return run


def _hooks(module: nn.Module, name: str, depth: list[int]) -> list[Callable[[], None]]:
    open_ranges: list[record_function | None] = []

    def enter(*_: Any) -> None:
        open_ranges.append(None if depth[0] else record_function(name))
        if open_ranges[-1] is not None:
            open_ranges[-1].__enter__()

    def leave(*_: Any) -> None:
        last = open_ranges.pop()
        if last is not None:
            last.__exit__(None, None, None)

    return [module.register_forward_pre_hook(enter).remove, module.register_forward_hook(leave, always_call=True).remove]
