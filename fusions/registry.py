"""From a requested fusion to the kernel that runs, with every reason written down.

    resolve(requests) -> FusionPlan           pure: no torch, no device, no global
    FusionPlan.decision(flag, site)           what was asked, what runs, what stood in the way
    BoundFusion                               the callable in a layer's slot; counts what really ran

A plan has one decision per (flag, site kind): the final norm is decided apart from the norms of the layers.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fusions.machine import Machine

REFERENCE = "reference"
# `auto` takes a backend only if it beats the reference by this much: below, the difference is noise of a shared machine.
AUTO_MARGIN = 0.98


@dataclass(frozen=True)
class Obstacle:
    """One reason why a backend can't run, and its kind: device, package, dtype, shape, option, compiler."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True)
class Facts:
    """What eligibility may depend on; everything of one site that is known before the first step."""

    machine: Machine
    dtype: str  # of the computation: fp32, bf16
    tensor_parallel_size: int
    sequence_parallel: bool
    shape: tuple[int, ...]  # of the site's input on one rank
    options: tuple[tuple[str, Any], ...] = ()  # activation, dropout, causal, window… as (name, value)

    def option(self, name: str) -> Any:
        """The value of an option; None where this site has no such option."""
        return dict(self.options).get(name)


@dataclass(frozen=True)
class Backend:
    """One implementation family. `obstacles` is the only statement of when it can be used."""

    name: str
    obstacles: Callable[[Facts], list[Obstacle]]
    shape_obstacles: Callable[[tuple[int, ...]], list[Obstacle]] = lambda shape: []

    def all_obstacles(self, facts: Facts) -> list[Obstacle]:
        """Everything that is known to stand in the way before the first step."""
        return self.obstacles(facts) + self.shape_obstacles(facts.shape)


@dataclass(frozen=True)
class Operation:
    """One fused operation: the module that holds `BACKENDS[name][backend]`, and its backends, best first."""

    name: str
    module: str
    backends: tuple[Backend, ...]

    def backend(self, name: str) -> Backend | None:
        """The backend of that name, or None where this operation has none."""
        return next((b for b in self.backends if b.name == name), None)

    def function(self, backend: str) -> Callable[..., Any]:
        """The implementation of a backend, or of "reference"; imports the operation's module."""
        return importlib.import_module(self.module).BACKENDS[self.name][backend]


@dataclass(frozen=True)
class Request:
    """A flag's value at one site kind."""

    flag: str
    site: str
    operation: Operation
    asked: bool | str
    facts: Facts
    without_effect: str = ""  # why the flag can't matter here ("" where it does)

    @property
    def key(self) -> str:
        """What a measured time depends on, beside the machine: operation, shape, dtype, options."""
        facts = self.facts
        options = " ".join(f"{k}={v}" for k, v in facts.options)
        shape = "x".join(map(str, facts.shape))
        return f"{self.operation.name} [{shape} {facts.dtype}] {options}"

    def obstacles(self, backend: Backend) -> list[Obstacle]:
        """What stands in a backend's way here. Triton's interpreter, which is slow, runs only if asked for by name."""
        device = self.facts.machine.device
        if backend.name == "triton" and self.asked != "triton" and device != "cuda":
            return [Obstacle("device", f"{device}, needs cuda")]
        return backend.all_obstacles(self.facts)

    def candidates(self) -> list[str]:
        """The backends without an obstacle, best first, and the reference: what is worth measuring."""
        return [*(b.name for b in self.operation.backends if not self.obstacles(b)), REFERENCE]


@dataclass(frozen=True)
class Decision:
    """What runs at one site kind, and why."""

    flag: str
    site: str
    operation: str
    asked: bool | str
    runs: str  # a backend's name, or "reference"
    obstacles: tuple[tuple[str, Obstacle], ...]  # (backend, obstacle) of every backend that was passed over
    note: str = ""
    times_ms: tuple[tuple[str, float], ...] = ()  # `auto`: forward and backward together, of every candidate
    facts: Facts | None = field(default=None, compare=False, repr=False)  # for the shapes that come at run time

    @property
    def fell_back(self) -> bool:
        """Whether a fusion was asked for, could matter, and is not what runs."""
        return self.asked not in (False, "auto") and self.runs == REFERENCE and not self.note

    @property
    def why(self) -> str:
        """The reasons in one line."""
        times = ", ".join(f"{name} {ms:.3g} ms" for name, ms in sorted(self.times_ms, key=lambda t: t[1]))
        notes = [text for text in (self.note, f"measured: {times}" if times else "") if text]
        # Of a backend that is made for another device, the rest is beside the point.
        elsewhere = {b for b, o in self.obstacles if o.kind == "device"}
        backends: dict[str, list[str]] = {}
        for name, obstacle in self.obstacles:
            if name not in elsewhere or obstacle.kind == "device":
                backends.setdefault(str(obstacle), []).append(name)
        return "; ".join([*notes, *(f"{text} ({', '.join(names)})" for text, names in backends.items())])


class FusionError(Exception):
    """A fusion that was required can't run; lists every obstacle."""


@dataclass(frozen=True)
class FusionPlan:
    """The decisions of a job. Equal on all ranks, or the job does not start."""

    decisions: tuple[Decision, ...]
    strict: bool = False

    def decision(self, flag: str, site: str) -> Decision:
        """The decision of (flag, site kind); KeyError if the plan has none."""
        for decision in self.decisions:
            if (decision.flag, decision.site) == (flag, site):
                return decision
        raise KeyError(f"no decision for {flag} at {site!r}; the plan has {[(d.flag, d.site) for d in self.decisions]}")

    def hash(self) -> str:
        """Equal for two plans that run the same kernels for the same reasons."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for fusions.json."""
        rows = []
        for decision in self.decisions:
            row = {**asdict(replace(decision, facts=None)), "times_ms": dict(decision.times_ms)}
            del row["facts"]
            rows.append(row | {"obstacles": [{"backend": b, **asdict(o)} for b, o in decision.obstacles]})
        return {"strict": self.strict, "decisions": rows}

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """(flag, site, asked, runs, why) of each decision, for a table."""
        return [(d.flag, d.site, _word(d.asked), d.runs, d.why) for d in self.decisions]


def resolve(
    requests: list[Request], strict: bool = False, times: dict[str, dict[str, float]] | None = None, required: bool = True
) -> FusionPlan:
    """Decide every request. `times`: milliseconds of each candidate by request key, for `auto`.

    Raises FusionError if a named backend, or any fusion under `strict`, can't run; not with `required` False.
    """
    decisions = [_decide(request, times or {}) for request in requests]
    refused: dict[tuple[str, str, str], list[str]] = {}  # (flag, asked, why) -> sites
    for decision in decisions:
        if required and decision.fell_back and (strict or isinstance(decision.asked, str)):
            refused.setdefault((decision.flag, _word(decision.asked), decision.why), []).append(decision.site)
    if refused:
        raise FusionError("\n".join(_refusal(*key, sites) for key, sites in refused.items()))
    return FusionPlan(tuple(decisions), strict)


def _decide(request: Request, times: dict[str, dict[str, float]]) -> Decision:
    operation, asked = request.operation, request.asked
    passed_over: list[tuple[str, Obstacle]] = []

    def decision(runs: str, note: str = "", times_ms: dict[str, float] | None = None) -> Decision:
        measured = tuple((times_ms or {}).items())
        return Decision(
            request.flag, request.site, operation.name, asked, runs, tuple(passed_over), note, measured, request.facts
        )

    if request.without_effect:
        return decision(REFERENCE, f"no effect: {request.without_effect}")
    if asked is False:
        return decision(REFERENCE)
    candidates = [b for b in operation.backends if asked in (True, "auto") or b.name == asked]
    if not candidates:
        have = ", ".join(b.name for b in operation.backends)
        passed_over.append((str(asked), Obstacle("backend", f"there is none of {operation.name}; it has {have}")))
    for backend in candidates:
        obstacles = request.obstacles(backend)
        if not obstacles and asked != "auto":
            return decision(backend.name)
        passed_over += [(backend.name, o) for o in obstacles]
    if asked != "auto":
        return decision(REFERENCE)
    measured = times.get(request.key)
    if measured is None:
        return decision(REFERENCE, "auto: not measured yet; the first start of a job measures")
    best = min(measured, key=lambda name: measured[name])
    worth_it = measured[best] < AUTO_MARGIN * measured.get(REFERENCE, float("inf"))
    return decision(best if worth_it else REFERENCE, times_ms=measured)


def _refusal(flag: str, asked: str, why: str, sites: list[str]) -> str:
    rule = "strict_fusions is true" if asked == "true" else f"{asked!r} was required"
    way_out = "or strict_fusions=false" if asked == "true" else "or true to allow the reference"
    key = flag if "." in flag else f"transformer.{flag}"
    return f"{key} at {', '.join(sites)}: {rule} but it can't run here: {why}. Set {key}=false, {way_out}."


def _word(asked: bool | str) -> str:
    return str(asked).lower() if isinstance(asked, bool) else asked


@dataclass
class SiteCounts:
    """What ran at one site kind since the start."""

    fused: int = 0
    reference: int = 0
    recomputed: int = 0  # calls made again in a backward, whatever they ran
    fallbacks: dict[str, int] = field(default_factory=dict)  # reason -> calls that fell back for it

    @property
    def calls(self) -> int:
        """All calls of the site."""
        return self.fused + self.reference


class Counters:
    """The calls of every site of one model, filled by BoundFusion."""

    def __init__(self) -> None:
        self.sites: dict[tuple[str, str], SiteCounts] = {}
        self.in_recompute = False

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """Calls inside are made again, for a backward; they are counted apart."""
        self.in_recompute = True
        try:
            yield
        finally:
            self.in_recompute = False

    def site(self, flag: str, site: str) -> SiteCounts:
        """The counts of a site kind, made on first use."""
        return self.sites.setdefault((flag, site), SiteCounts())

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain data for metrics.jsonl: {"flag @ site": {fused, reference, recomputed, fallbacks}}."""
        return {f"{flag} @ {site}": asdict(counts) for (flag, site), counts in sorted(self.sites.items())}

    def never_called(self, plan: FusionPlan) -> list[Decision]:
        """Decisions that are active but whose kernel was never called: a fault."""
        return [d for d in plan.decisions if d.runs != REFERENCE and self.site(d.flag, d.site).fused == 0]


class BoundFusion:
    """The operation a plan chose for one site, as a callable for a layer's slot.

    Checks the backend's shape obstacles once per new input shape; a shape it can't do runs the reference and is
    counted with its reason (or raises FusionError under strict). Shared by all layers of a site kind.
    """

    def __init__(self, operation: Operation, decision: Decision, counters: Counters, strict: bool):
        self.decision, self.strict = decision, strict
        self._reference: Callable[..., Any] = operation.function(REFERENCE)
        self._function: Callable[..., Any] = operation.function(decision.runs)
        self._backend = operation.backend(decision.runs)
        self._reason_by_shape: dict[tuple[int, ...], str] = {}
        self._counts, self._counters = counters.site(decision.flag, decision.site), counters

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: D102  said by the class
        if self._counters.in_recompute:
            return self._again(x, *args, **kwargs)
        if self._backend is None:
            self._counts.reference += 1
            return self._reference(x, *args, **kwargs)
        shape = tuple(x.shape)
        reason = self._reason_by_shape.get(shape)
        if reason is None:
            reason = self._reason_by_shape[shape] = self._obstacles(shape)
        if not reason:
            self._counts.fused += 1
            return self._function(x, *args, **kwargs)
        if self.strict:
            raise FusionError(f"{self.decision.flag} at {self.decision.site}: {reason}, and strict_fusions is true")
        self._counts.reference += 1
        self._counts.fallbacks[reason] = self._counts.fallbacks.get(reason, 0) + 1
        return self._reference(x, *args, **kwargs)

    def _again(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """What ran in the forward, for a shape seen there."""
        self._counts.recomputed += 1
        fits = self._backend is not None and not self._reason_by_shape.get(tuple(x.shape))
        return (self._function if fits else self._reference)(x, *args, **kwargs)

    def _obstacles(self, shape: tuple[int, ...]) -> str:
        """What a shape has against the backend, beyond what was known when the plan was made."""
        facts, backend = self.decision.facts, self._backend
        if facts is None or backend is None:
            return ""
        return "; ".join(map(str, backend.all_obstacles(replace(facts, shape=shape))))


class TracedFusion(BoundFusion):
    """The same inside a layer that is compiled as a whole.

    There a Python counter would recompile the layer at every call, so what ran is noted when the layer is traced, and whoever
    calls the layer counts.
    """

    _reason, _called = "", False

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: D102  said by the class
        self._called = True
        if self._backend is None:
            return self._reference(x, *args, **kwargs)
        self._reason = self._obstacles(tuple(x.shape))
        if not self._reason:
            return self._function(x, *args, **kwargs)
        if self.strict:
            raise FusionError(f"{self.decision.flag} at {self.decision.site}: {self._reason}, and strict_fusions is true")
        return self._reference(x, *args, **kwargs)

    def count(self, calls: int) -> None:
        """Note so many calls of the layer, if its trace has this site."""
        if not self._called:
            return
        if self._backend is not None and not self._reason:
            self._counts.fused += calls
            return
        self._counts.reference += calls
        if self._reason:
            self._counts.fallbacks[self._reason] = self._counts.fallbacks.get(self._reason, 0) + calls
