"""Runs a comparison from outside the processes that train: groups of workers, losses, memory, turns, profiles. No torch here."""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.load import LoadedConfig
from trainer.compare.group import GroupDied, WorkerGroup
from trainer.compare.parity import NOISE_RUNS, judge
from trainer.compare.plan import ComparisonPlan, fusions_asked, groups, other_losses, processes, refusals
from trainer.compare.statistics import CONFIDENCE
from trainer.compare.turns import ContestantFailed, Pair, Turns, take_turns
from trainer.log import Log

_PROGRESS_SECONDS, _PROFILED_ARMS, _PROFILE_TURNS = 5.0, 4, 3


@dataclasses.dataclass
class Measured:
    """Everything that was measured, as plain data by arm."""

    arms: dict[str, dict[str, Any]]
    dead: dict[str, str]  # arm -> why
    noise: dict[str, list[dict[str, Any]]]  # reference arm -> its disturbed runs
    reference: dict[str, str]  # arm -> the arm that its losses are compared with
    turns: Turns
    steps_per_block: int
    notes: list[str]


class Conductor:
    """Asks the groups, one at a time; an arm that dies is noted and left out, and its group starts again without it."""

    def __init__(self, plan: ComparisonPlan, loaded: dict[str, LoadedConfig], log: Log):
        self.plan, self.loaded, self.log = plan, loaded, log
        self.dead = refusals(plan, loaded)
        self.notes: list[str] = []
        self.unsafe: set[str] = set()  # arms whose speed isn't shown without saying so
        self.arms: dict[str, dict[str, Any]] = {
            arm.name: {
                "name": arm.name,
                "overrides": list(arm.overrides),
                "environment": dict(arm.environment),
                "processes": processes(arm, loaded[arm.name].config),
                "config": loaded[arm.name].config.model_dump(),
                "sources": loaded[arm.name].sources,
            }
            for arm in plan.arms
        }
        self.reference = _references(self.arms)
        self._folder = tempfile.TemporaryDirectory(prefix="fuseline-")
        plan_path = Path(self._folder.name, "plan.json")
        plan.write(plan_path)
        self.groups: dict[str, WorkerGroup] = {}
        for members in groups(plan, loaded):
            first = members[0]
            count = processes(first, loaded[first.name].config)
            group = WorkerGroup(str(plan_path), first.name, count, dict(first.environment))
            self.groups |= {arm.name: group for arm in members}
        self._distinct = list(dict.fromkeys(self.groups.values()))

    @property
    def alive(self) -> list[str]:
        """Arms that haven't died."""
        return [name for name in self.arms if name not in self.dead]

    def run(self) -> Measured:
        """The whole comparison."""
        for name, why in self.dead.items():
            self.log.line(f"{name}: can't run here: {why}")
        try:
            noise = self._losses()
            for name in self.alive:
                found = judge(self.arms, noise, name, self.reference[name])
                if found["safe"] is False:
                    self.unsafe.add(name)
                    self.log.line(f"{name}: {found['sentence']}")
            self._memory()
            steps = self._warm_up()
            pairs = [pair for pair in self.plan.pairs if {pair.arm, pair.against} <= set(self.alive)]
            turns = Turns(CONFIDENCE, pairs, {}, ended="no two arms are left to compare")
            if pairs:
                contestants = {name: self._contestant(name, steps) for name in self.alive}
                turns = take_turns(contestants, pairs, self.plan.budget, progress=self._progress())
            self.dead |= turns.failures
            self.log.line(f"{turns.rounds} rounds; ended by: {turns.ended}")
            if self.plan.attribution:
                self._attribute()
            return Measured(self.arms, self.dead, noise, self.reference, turns, steps, self.notes)
        finally:
            for group in self._distinct:
                group.stop()
            self._folder.cleanup()

    def _ask(self, member: str, do: str, **arguments: Any) -> dict[str, Any]:
        group = self.groups[member]
        for other in self._distinct:
            if other is not group and other.running:
                other.pause()
        return group.ask(do, **arguments)

    def _try(self, arm: str, do: str, **arguments: Any) -> dict[str, Any] | None:
        """An answer, or None after noting the arm's death."""
        try:
            return self._ask(arm, do, arm=arm, **arguments)
        except GroupDied as error:
            self.dead[arm] = str(error)
            self.log.line(f"{arm}: DIED: {error}; the other arms go on")
            return None

    def _losses(self) -> dict[str, list[dict[str, Any]]]:
        """First iterations of each arm from the initial weights, and of the reference arms disturbed by rounding."""
        iterations = self.plan.loss_iters
        for name in self.alive:
            found = self._try(name, "losses", iterations=iterations, noise=None)
            if found is None:
                continue
            self.arms[name] |= found | {"machine": self.groups[name].facts["environment"]}
            first, usual = found["step_seconds"][0], statistics.median(found["step_seconds"][1:])
            hits, misses = found["compiled"]["hit"], found["compiled"]["miss"]
            compiled = f" ({hits + misses} graphs compiled, {hits} of them from the cache)" if hits + misses else ""
            self.log.line(
                f"{name}: first step {first:.1f} s{compiled}, then {usual * 1e3:.0f} ms; loss {found['losses'][0]:.4f} -> "
                f"{found['losses'][-1]:.4f} in {iterations} iterations"
            )
        noise: dict[str, list[dict[str, Any]]] = {}
        for name in dict.fromkeys(self.reference[arm] for arm in self.alive if self.reference[arm] != arm):
            if name in self.dead:
                continue
            runs = [self._try(name, "losses", iterations=iterations, noise=seed) for seed in NOISE_RUNS]
            noise[name] = [run for run in runs if run is not None]
        return noise

    def _memory(self) -> None:
        for name in self.alive:
            found = self._try(name, "memory")
            if found is None:
                continue
            self.arms[name]["memory"] = found
            if self.arms[name]["machine"]["gpu"]:
                start = self.arms[name]["config"]["training"]["micro_batch_size"]
                try:
                    largest = largest_that_fits(lambda size, arm=name: self._fits(arm, size), start)
                    self.arms[name]["largest_micro_batch"] = largest
                except GroupDied as error:
                    self.notes.append(f"the largest micro-batch of {name} is not known: {error}")

    def _fits(self, arm: str, micro_batch: int) -> bool:
        try:
            return self._ask(arm, "try_batch", arm=arm, micro_batch=micro_batch)["fits"]
        except GroupDied as error:
            if "OutOfMemory" in str(error) or "ALLOC_FAILED" in str(error):
                return False
            raise

    def _warm_up(self) -> int:
        """Warm every arm; the steps of a block."""
        for group in self._distinct:
            members = [name for name in self.alive if self.groups[name] is group]
            if members:
                try:
                    self._ask(members[0], "warm_up", arms=members)
                except GroupDied as error:
                    self.notes.append(f"the warm-up of {', '.join(members)} ended: {error}")
        usual = [statistics.median(self.arms[name]["step_seconds"][1:]) for name in self.alive]
        if self.plan.steps_per_block is not None or not usual:
            return self.plan.steps_per_block or 1
        return max(1, math.ceil(self.plan.BLOCK_SECONDS / min(usual)))

    def _contestant(self, name: str, steps: int) -> Callable[[], float]:
        blocks = self.arms[name].setdefault("blocks", [])

        def turn() -> float:
            try:
                found = self._ask(name, "turn", arm=name, steps=steps)
            except GroupDied as error:
                self.log.line(f"{name}: DIED: {error}; the other arms go on")
                raise ContestantFailed(str(error)) from None
            blocks.append(found)
            return found["seconds_per_step"] / self.arms[name]["tokens_per_step"]

        return turn

    def _progress(self) -> Callable[[int, Turns], None]:
        begin = last = time.perf_counter()

        def show(done: int, turns: Turns) -> None:
            nonlocal last
            now = time.perf_counter()
            if now - last < _PROGRESS_SECONDS and done != self.plan.budget.rounds:
                return
            last = now
            found = [(pair, e) for pair in turns.pairs if (e := turns.estimate(pair)) is not None]
            widest = max(found, key=lambda item: item[1].half_width, default=None)
            of = f"/{self.plan.budget.rounds}" if self.plan.budget.rounds else ""
            self.log.line(f"round {done}{of}, {now - begin:.0f} s  {_so_far(found, widest, self.unsafe)}")

        return show

    def _attribute(self) -> None:
        """Profiles in turns, then the roofline, of the first arms; with more than a few, of the two of the first pair."""
        names = [
            name for name in self.alive if name in {arm for pair in self.plan.pairs for arm in (pair.arm, pair.against)}
        ]
        if len(names) > _PROFILED_ARMS:
            first = self.plan.pairs[0]
            names = [name for name in (first.against, first.arm) if name in names]
            self.notes.append(
                f"attribution and roofline are those of {' and '.join(names)}: there are too many arms for all"
            )
        try:
            for _ in range(_PROFILE_TURNS):
                for name in names:
                    self.arms[name].setdefault("profiles", []).append(self._ask(name, "profile", arm=name))
            for name in names:
                self.arms[name]["roofline"] = self._ask(name, "roofline", arm=name)["rows"]
        except GroupDied as error:  # the verdict stands: what was measured before is not less true for it
            self.notes.append(f"attribution and roofline are not complete: {error}")


def largest_that_fits(fits: Callable[[int], bool], start: int, most: int = 1 << 20) -> int:
    """The largest size for which `fits` is true, given that `start` fits: doubled until it doesn't, then halved in between."""
    low, high = start, start * 2
    while high <= most and fits(high):
        low, high = high, high * 2
    while high - low > max(1, low // 16):  # to within a sixteenth: each try builds a model
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _references(arms: dict[str, dict[str, Any]]) -> dict[str, str]:
    """For each arm the one that its losses are compared with: of those that train alike, the one with the fewest fusions."""
    alike: list[list[str]] = []
    for name, arm in arms.items():
        home = next((group for group in alike if not other_losses(arms[group[0]]["config"], arm["config"])), None)
        if home is None:
            alike.append(home := [])
        home.append(name)
    return {name: min(group, key=lambda other: fusions_asked(arms[other]["config"])) for group in alike for name in group}


def _so_far(found: list[tuple[Pair, Any]], widest: tuple[Pair, Any] | None, unsafe: set[str]) -> str:
    if len(found) > 3 and widest is not None:
        pair, estimate = widest
        if math.isinf(estimate.half_width):
            return f"{len(found)} comparisons; too few rounds for their intervals yet"
        return f"{len(found)} comparisons, the widest interval is {pair.arm}'s: ±{estimate.half_width:.1%}"
    parts = []
    for pair, estimate in found:
        low, high = estimate.interval
        interval = f" [{low:.3f}, {high:.3f}]" if math.isfinite(high) else ""
        mark = " (NOT LOSS-SAFE)" if {pair.arm, pair.against} & unsafe else ""
        parts.append(f"{pair.arm} / {pair.against} {estimate.ratio:.3f}{interval}{mark}")
    return "  ".join(parts)
