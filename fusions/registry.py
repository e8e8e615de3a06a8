"""From a requested fusion to the kernel that runs, with every reason written down.

    resolve(requests) -> FusionPlan           pure: no torch, no device, no global
    FusionPlan.decision(flag, site)           what was asked, what runs, what stood in the way
    BoundFusion                               the callable in a layer's slot; counts what really ran

A plan has one decision per (flag, site kind): the final norm is decided apart from the norms of the layers.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from fusions.machine import Machine

REFERENCE = "reference"


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


@dataclass(frozen=True)
class Backend:
    """One implementation family. `obstacles` is the only statement of when it can be used."""

    name: str
    obstacles: Callable[[Facts], list[Obstacle]]
    shape_obstacles: Callable[[tuple[int, ...]], list[Obstacle]] = lambda shape: []


@dataclass(frozen=True)
class Fusion:
    """One flag: the module that holds `BACKENDS[operation][backend]`, and its backends, best first."""

    flag: str
    module: str
    backends: tuple[Backend, ...]

    def backend(self, name: str) -> Backend | None:
        """The backend of that name, or None where this fusion has none."""
        return next((b for b in self.backends if b.name == name), None)


@dataclass(frozen=True)
class Request:
    """A flag's value at one site kind."""

    fusion: Fusion
    site: str
    operation: str  # key of the module's BACKENDS: "layer_norm", "bias_gelu_tanh"…
    asked: bool | str
    facts: Facts
    without_effect: str = ""  # why the flag can't matter here ("" where it does)


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

    @property
    def fell_back(self) -> bool:
        """Whether a fusion was asked for, could matter, and is not what runs."""
        return self.asked is not False and self.runs == REFERENCE and not self.note

    @property
    def why(self) -> str:
        """The reasons in one line."""
        return "; ".join([*([self.note] if self.note else []), *(f"{o} ({b})" for b, o in self.obstacles)])


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
        rows = [{**asdict(d), "obstacles": [{"backend": b, **asdict(o)} for b, o in d.obstacles]} for d in self.decisions]
        return {"strict": self.strict, "decisions": rows}

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """(flag, site, asked, runs, why) of each decision, for a table."""
        return [(d.flag, d.site, _word(d.asked), d.runs, d.why) for d in self.decisions]


def resolve(requests: list[Request], strict: bool = False) -> FusionPlan:
    """Decide every request. Raises FusionError if a named backend, or any fusion under `strict`, can't run."""
    decisions = [_decide(request) for request in requests]
    refused: dict[tuple[str, str, str], list[str]] = {}  # (flag, asked, why) -> sites
    for decision in decisions:
        if decision.fell_back and (strict or isinstance(decision.asked, str)):
            refused.setdefault((decision.flag, _word(decision.asked), decision.why), []).append(decision.site)
    if refused:
        raise FusionError("\n".join(_refusal(*key, sites) for key, sites in refused.items()))
    return FusionPlan(tuple(decisions), strict)


def _decide(request: Request) -> Decision:
    fusion, asked = request.fusion, request.asked

    def decision(runs: str, passed_over: list[tuple[str, Obstacle]] | None = None, note: str = "") -> Decision:
        return Decision(fusion.flag, request.site, request.operation, asked, runs, tuple(passed_over or []), note)

    if request.without_effect:
        return decision(REFERENCE, note=f"no effect: {request.without_effect}")
    if asked is False:
        return decision(REFERENCE)
    passed_over: list[tuple[str, Obstacle]] = []
    candidates = [b for b in fusion.backends if asked is True or b.name == asked]
    if not candidates:
        have = ", ".join(b.name for b in fusion.backends)
        passed_over.append((str(asked), Obstacle("backend", f"there is none of this operation; it has {have}")))
    for backend in candidates:
        obstacles = backend.obstacles(request.facts) + backend.shape_obstacles(request.facts.shape)
        if not obstacles:
            return decision(backend.name, passed_over)
        passed_over += [(backend.name, o) for o in obstacles]
    return decision(REFERENCE, passed_over)


def _refusal(flag: str, asked: str, why: str, sites: list[str]) -> str:
    rule = "strict_fusions is true" if asked == "true" else f"{asked!r} was required"
    way_out = "or strict_fusions=false" if asked == "true" else "or true to allow the reference"
    where = f"transformer.{flag} at {', '.join(sites)}"
    return f"{where}: {rule} but it can't run here: {why}. Set transformer.{flag}=false, {way_out}."


def _word(asked: bool | str) -> str:
    return str(asked).lower() if isinstance(asked, bool) else asked


@dataclass
class SiteCounts:
    """What ran at one site kind since the start."""

    fused: int = 0
    reference: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)  # reason -> calls that fell back for it

    @property
    def calls(self) -> int:
        """All calls of the site."""
        return self.fused + self.reference


class Counters:
    """The calls of every site of one model, filled by BoundFusion."""

    def __init__(self) -> None:
        self.sites: dict[tuple[str, str], SiteCounts] = {}

    def site(self, flag: str, site: str) -> SiteCounts:
        """The counts of a site kind, made on first use."""
        return self.sites.setdefault((flag, site), SiteCounts())

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain data for metrics.jsonl: {"flag @ site": {fused, reference, fallbacks}}."""
        return {f"{flag} @ {site}": asdict(counts) for (flag, site), counts in sorted(self.sites.items())}

    def never_called(self, plan: FusionPlan) -> list[Decision]:
        """Decisions that are active but whose kernel was never called: a fault."""
        return [d for d in plan.decisions if d.runs != REFERENCE and self.site(d.flag, d.site).fused == 0]


class BoundFusion:
    """The operation a plan chose for one site, as a callable for a layer's slot.

    Checks the backend's shape obstacles once per new input shape; a shape it can't do runs the reference and is
    counted with its reason (or raises FusionError under strict). Shared by all layers of a site kind.
    """

    def __init__(self, fusion: Fusion, decision: Decision, counters: Counters, strict: bool):
        operations = importlib.import_module(fusion.module).BACKENDS[decision.operation]
        self.decision, self.strict = decision, strict
        self._reference: Callable[..., Any] = operations[REFERENCE]
        self._function: Callable[..., Any] = operations[decision.runs]
        backend = fusion.backend(decision.runs)
        self._shape_obstacles = backend.shape_obstacles if backend else None
        self._reason_by_shape: dict[tuple[int, ...], str] = {}
        self._counts = counters.site(decision.flag, decision.site)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: D102  said by the class
        if self._shape_obstacles is None:
            self._counts.reference += 1
            return self._reference(x, *args, **kwargs)
        shape = tuple(x.shape)
        reason = self._reason_by_shape.get(shape)
        if reason is None:
            reason = self._reason_by_shape[shape] = "; ".join(map(str, self._shape_obstacles(shape)))
        if not reason:
            self._counts.fused += 1
            return self._function(x, *args, **kwargs)
        if self.strict:
            raise FusionError(f"{self.decision.flag} at {self.decision.site}: {reason}, and strict_fusions is true")
        self._counts.reference += 1
        self._counts.fallbacks[reason] = self._counts.fallbacks.get(reason, 0) + 1
        return self._reference(x, *args, **kwargs)
