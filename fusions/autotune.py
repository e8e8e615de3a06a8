"""What `auto` measures: each backend that can run and is right, forward and backward, on the run's own shapes."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusions.fused_adam import Group
from fusions.registry import REFERENCE, Request
from fusions.samples import Sample, sample


@dataclass(frozen=True)
class Measured:
    """Milliseconds of forward and backward together by backend; and why a candidate was left out."""

    times: dict[str, float]
    left_out: dict[str, str]


def measure(request: Request, device: torch.device, rounds: int = 7) -> Measured:
    """Time each candidate, the reference included.

    Candidates take turns, every other round backwards, after two rounds of warm-up; the figure is the median. A candidate that
    fails, or whose result isn't the reference's, is left out with the reason.
    """
    call = sample(request.operation.name, request.facts, device)
    functions = {name: request.operation.function(name) for name in request.candidates()}
    expected = observe(functions[REFERENCE], call)
    left_out = {name: why for name, f in functions.items() if name != REFERENCE and (why := objection(f, call, expected))}
    times: dict[str, list[float]] = {name: [] for name in functions if name not in left_out}
    for number in range(rounds + 2):
        for name in times if number % 2 else reversed(times):
            seconds = timed(lambda f=functions[name]: run(f, call), device)
            if number >= 2:
                times[name].append(seconds)
    return Measured({name: statistics.median(values) * 1e3 for name, values in times.items()}, left_out)


def run(function: Callable[..., Any], call: Sample) -> list[Tensor]:
    """The results, then the gradient of every leaf (zeros where it has none); the upstream gradient is ones."""
    result = function(*call.args, **call.kwargs)
    outs = [o for o in (result if isinstance(result, tuple) else (result,)) if isinstance(o, Tensor)]
    flowing, leaves = [o for o in outs if o.requires_grad], call.leaves()
    if not flowing:
        return outs
    ones = [torch.ones_like(o) for o in flowing]
    grads = torch.autograd.grad(flowing, leaves, ones, allow_unused=True)
    zeros = (torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves, strict=True))
    return [o.detach() for o in outs] + list(zeros)


def observe(function: Callable[..., Any], call: Sample) -> list[Tensor]:
    """What a call on copies of its arguments returns and leaves behind: in a gradient slot, or in an optimizer's state."""
    own = copy.deepcopy(call)
    found = run(function, own)
    for argument in own.args:
        if isinstance(argument, Group):
            found += [*argument.parameters, *argument.exp_avgs, *argument.exp_avg_sqs, *argument.steps]
        elif hasattr(argument, "read") and argument.read() is not None:
            found[-1] = argument.read()  # the weight's gradient is there, not in autograd
    return found


def objection(function: Callable[..., Any], call: Sample, expected: list[Tensor]) -> str:
    """Why a candidate can't be chosen; "" for one that computes the same, as far as its dtype can tell."""
    try:
        ours = observe(function, call)
    except Exception as error:  # whatever a compiler or kernel raises here must not end the job
        return f"it fails here: {type(error).__name__}: {error}".splitlines()[0][:300]
    if len(ours) != len(expected):
        return f"it gives {len(ours)} results, the reference {len(expected)}"
    for mine, true in zip(ours, expected, strict=True):
        if mine.shape != true.shape or (not true.is_floating_point() and not torch.equal(mine, true)):
            return "its result isn't the reference's"
        if true.is_floating_point() and true.numel():
            allowed = 64 * torch.finfo(true.dtype).eps * max(true.double().abs().max().item(), 1e-6)
            worst = (mine.double() - true.double()).abs().max().item()
            if not worst <= allowed:
                return f"its result isn't the reference's: off by {worst:.2g}, {allowed:.2g} is rounding"
    return ""


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
