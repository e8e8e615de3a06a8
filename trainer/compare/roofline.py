"""How close a fused operation comes to the memory's speed: the bytes it must move, and the time it takes beside a copy's."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusions.autotune import timed
from fusions.catalogue import OPERATIONS
from fusions.registry import REFERENCE, Counters, Decision, FusionPlan
from fusions.samples import Sample, sample
from trainer.compare.turns import ALL, Budget, take_turns

Call = Callable[[], Any]
COPY = "copy"
PARTS = ("forward", "backward")


@dataclass
class Implementation:
    """One implementation, called once: what it needs to be timed, and what it saved."""

    outs: list[Tensor]
    upstream: list[Tensor]
    saved_bytes: int
    written_bytes: int  # by the backward: gradients that are not an upstream gradient handed on
    forward: Call
    backward: Call | None


def implementation(function: Callable[..., Any], call: Sample) -> Implementation:
    """Run the forward once, counting the storages that autograd keeps; parameters and inputs count once each."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(*call.args, **call.kwargs)
    outs = [o for o in (result if isinstance(result, tuple) else (result,)) if isinstance(o, Tensor)]
    flowing, leaves = [o for o in outs if o.requires_grad], call.leaves()
    upstream = [torch.randn_like(o) for o in flowing]

    def backward() -> Any:
        return torch.autograd.grad(flowing, leaves, upstream, retain_graph=True, allow_unused=True)

    forward = lambda: function(*call.args, **call.kwargs)  # noqa: E731
    grads = [g for g in backward() if g is not None] if flowing else []
    handed_on = {u.data_ptr() for u in upstream}
    written = sum(g.nbytes for g in {g.data_ptr(): g for g in grads}.values() if g.data_ptr() not in handed_on)
    return Implementation(outs, upstream, sum(storages.values()), written, forward, backward if flowing else None)


def must_move(part: str, call: Sample, one: Implementation, operation: str) -> int:
    """Bytes that the operation can't avoid reading or writing."""
    if operation == "adamw":
        return 28 * sum(p.numel() for p in call.args[0].parameters)
    inputs = sum(a.nbytes for a in (*call.args, *call.kwargs.values()) if isinstance(a, Tensor))
    if part == "forward":
        return inputs + sum(o.nbytes for o in one.outs)
    return sum(u.nbytes for u in one.upstream) + one.saved_bytes + one.written_bytes


def time_in_turns(calls: dict[str, Call], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each call in each round; two calls warm it up."""
    for call in calls.values():
        call()
        call()
    contestants = {name: lambda call=call: timed(call, device) for name, call in calls.items()}
    turns = take_turns(contestants, [], Budget(rounds=rounds))
    return {name: list(by_round.values()) for name, by_round in turns.seconds[ALL].items()}


def roofline(
    plan: FusionPlan, counters: Counters, steps: int, gemm_rate: float, device: torch.device, rounds: int = 9
) -> list[dict[str, Any]]:
    """One row for each fused operation of a run and each of its passes, at the shapes of the run.

    `floor_ms` is what a copy of as many bytes takes; where the operation holds a matrix product, what that takes at `gemm_rate`
    (FLOP/s), if it is more (`bound`: memory or arithmetic). `headroom_ms`: what a step would gain at the floor, by the number of
    calls in a step that `counters` saw in `steps` steps.
    """
    by_request: dict[Any, list[Decision]] = {}
    for decision in plan.decisions:
        if decision.runs != REFERENCE and decision.facts is not None:
            by_request.setdefault((decision.operation, decision.runs, decision.facts), []).append(decision)
    rows = []
    for (operation, backend, facts), decisions in by_request.items():
        calls = sum(counters.site(d.flag, d.site).fused for d in decisions) / steps
        call = sample(operation, facts, device)
        mine = implementation(OPERATIONS[operation].function(backend), call)
        for part in PARTS:
            run = mine.forward if part == "forward" else mine.backward
            if run is not None:
                moved = must_move(part, call, mine, operation)
                rows.append(
                    {
                        "operation": operation,
                        "backend": backend,
                        "flags": sorted({d.flag for d in decisions}),
                        "sites": [d.site for d in decisions],
                        "part": part,
                        "shape": list(facts.shape),
                        "calls_per_step": calls,
                        **_against_copy(run, moved, rounds, device),
                    }
                )
                product_ms = _matrix_flops(operation, part, call) / gemm_rate * 1e3
                rows[-1]["bound"] = "arithmetic" if product_ms > rows[-1]["copy_ms"] else "memory"
                rows[-1]["floor_ms"] = max(product_ms, rows[-1]["copy_ms"])
    for row in rows:
        row["headroom_ms"] = row["calls_per_step"] * max(0.0, row["ms"] - row["floor_ms"])
    return rows


def _matrix_flops(operation: str, part: str, call: Sample) -> float:
    """FLOPs of the matrix products in an operation; in the backward two, and a third where logits are made again."""
    if operation not in ("linear_wgrad", "linear_cross_entropy"):
        return 0.0
    x, weight = call.args[0], call.args[1]
    product = 2.0 * x.numel() * weight.shape[0]
    if part == "forward":
        return product
    return (2 if operation == "linear_wgrad" else 3) * product


def _against_copy(run: Call, moved: int, rounds: int, device: torch.device) -> dict[str, float]:
    """Times of an operation that must move so many bytes, and of a copy that moves as many."""
    source = torch.ones(max(1, moved // 8), device=device)  # read and written: 4 bytes each way
    target = torch.empty_like(source)
    times = time_in_turns({COPY: lambda: target.copy_(source), "operation": run}, rounds, device)
    seconds, copying = times["operation"], times[COPY]
    return {
        "bytes": moved,
        "ms": statistics.median(seconds) * 1e3,
        "copy_ms": statistics.median(copying) * 1e3,
        "gigabytes_per_second": moved / statistics.median(seconds) / 1e9,
        "copy_gigabytes_per_second": moved / statistics.median(copying) / 1e9,
        "share_of_copy_bandwidth": statistics.median(c / s for c, s in zip(copying, seconds, strict=True)),
    }
