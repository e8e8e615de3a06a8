"""What `auto` measures: each backend that can run and is right, forward and backward, on the run's own shapes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusions.registry import REFERENCE, Request
from fusions.samples import Sample, sample


def measure(request: Request, device: torch.device, rounds: int = 7) -> dict[str, float]:
    """Milliseconds of forward and backward together of each candidate, the reference included.

    Candidates take turns, every other round backwards, after two rounds of warm-up; the figure is the median. A candidate whose
    result isn't the reference's is left out.
    """
    call = sample(request.operation.name, request.facts, device)
    functions = {name: request.operation.function(name) for name in request.candidates()}
    expected = run(functions[REFERENCE], call)
    right = {name: f for name, f in functions.items() if name == REFERENCE or agrees(run(f, call), expected)}
    times: dict[str, list[float]] = {name: [] for name in right}
    for number in range(rounds + 2):
        for name, function in right.items() if number % 2 else reversed(right.items()):
            seconds = timed(lambda f=function: run(f, call), device)
            if number >= 2:
                times[name].append(seconds)
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def run(function: Callable[..., Any], call: Sample) -> list[Tensor]:
    """The results and the gradients of all leaves; the upstream gradient is ones."""
    outs = function(*call.args, **call.kwargs)
    outs = [o for o in (outs if isinstance(outs, tuple) else (outs,)) if isinstance(o, Tensor)]
    flowing, leaves = [o for o in outs if o.requires_grad], call.leaves()
    if not flowing:
        return outs
    grads = torch.autograd.grad(flowing, leaves, [torch.ones_like(o) for o in flowing], allow_unused=True)
    return [o.detach() for o in outs] + [g for g in grads if g is not None]


def agrees(ours: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether a backend computes the same, as far as its dtype can tell; exact equality is for the parity tests."""
    for mine, true in zip(ours, expected, strict=False):
        if mine.shape != true.shape:
            return False
        if not mine.is_floating_point():
            if not torch.equal(mine, true):
                return False
            continue
        scale = true.double().abs().max().item() if true.numel() else 0.0
        allowed = 64 * torch.finfo(true.dtype).eps * max(scale, 1e-6)
        if not (mine.double() - true.double()).abs().max().item() <= allowed:
            return False
    return True


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elapsed = time.perf_counter() - begin
    del result
    return elapsed
