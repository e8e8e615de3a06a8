"""Contestants take turns, so that the machine's drift hits all alike: the engine under every comparison. NumPy only.

A turn is one timed block of one contestant. The two of a comparison always run one right after the other, since a busy machine's
noise grows with the time between them: with many comparisons, what they are compared with runs once in each. Rounds come in
twos, an order drawn anew and then its reverse (A B B A, or B A A B), so that whatever grows with time, or follows from who came
before, cancels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trainer.compare.statistics import CONFIDENCE, Estimate, fewest_rounds, paired_ratio

Contestant = Callable[[], float]  # runs one block; seconds of one unit of its work (a step, a token, a call)


class ContestantFailed(Exception):
    """A contestant can't go on; the others do. The text says why."""


@dataclass(frozen=True)
class Pair:
    """One comparison: `arm` over `against`."""

    arm: str
    against: str

    @property
    def key(self) -> str:
        """Its name."""
        return f"{self.arm} / {self.against}"


@dataclass(frozen=True)
class Budget:
    """When to stop: after `rounds`, or once every interval is narrower than ±`until_resolved`, or out of time.

    An interval's width, not whether it excludes 1, is what ends a comparison: to stop at the first significant look would find
    differences where there are none. 20 rounds at least, so that a few that happen to agree don't end it.
    """

    rounds: int | None = None
    until_resolved: float | None = None
    seconds: float = 600.0

    FEWEST = 20

    def ends(self, done: int, elapsed: float, estimates: Callable[[], Sequence[Estimate]]) -> str:
        """Why it ends here, "" where it goes on."""
        if self.rounds is not None:
            return "all rounds done" if done >= self.rounds else ""
        if elapsed > self.seconds:
            return f"the time limit of {self.seconds:.0f} s"
        width = self.until_resolved
        if width is not None and self._looks_at(done) and all(e.half_width <= width for e in estimates()):
            return f"every interval is within ±{width:.1%}"
        return ""

    def _looks_at(self, done: int) -> bool:
        """At 20, 22, 24… 200, 220… rounds: the fewer looks, the less a lucky one can mislead."""
        return done >= self.FEWEST and done % (2 * max(1, 10 ** (len(str(done)) - 2))) == 0


ALL = ""  # the name of the bout of all contestants, where there is no pair


@dataclass
class Turns:
    """The blocks: of each bout (a pair, by its key) and each of its contestants, by round. After a failure there are fewer."""

    confidence: float
    pairs: list[Pair]
    seconds: dict[str, dict[str, dict[int, float]]]  # bout -> contestant -> round -> seconds of one unit of work
    order: dict[str, list[tuple[int, str]]] = field(
        default_factory=dict
    )  # contestant -> (round, bout) of each of its blocks
    failures: dict[str, str] = field(default_factory=dict)
    rounds: int = 0
    ended: str = ""

    def series(self, pair: Pair) -> dict[int, tuple[float, float]]:
        """round -> (seconds of what it is compared with, seconds of the arm)."""
        base, mine = self.seconds[pair.key][pair.against], self.seconds[pair.key][pair.arm]
        return {number: (base[number], mine[number]) for number in sorted(set(base) & set(mine))}

    def estimate(self, pair: Pair) -> Estimate | None:
        """The ratio so far, None before the first round."""
        both = list(self.series(pair).values())
        if not both:
            return None
        base, mine = zip(*both, strict=True)
        return paired_ratio(base, mine, confidence=self.confidence, comparisons=len(self.pairs))

    def estimates(self, pairs: Sequence[Pair]) -> list[Estimate]:
        """Those of `pairs` that have a round."""
        return [found for pair in pairs if (found := self.estimate(pair)) is not None]


def take_turns(
    contestants: Mapping[str, Contestant],
    pairs: Sequence[Pair],
    budget: Budget,
    *,
    confidence: float = CONFIDENCE,
    progress: Callable[[int, Turns], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Turns:
    """Run rounds until the budget ends them: in each, every pair's two blocks; without pairs, one block of every contestant.

    `progress(rounds done, turns so far)` is called after each round. A contestant that raises ContestantFailed is left out from
    there on, with the pairs it is in.
    """
    bouts = {pair.key: (pair.against, pair.arm) for pair in pairs} or {ALL: tuple(contestants)}
    turns = Turns(confidence, list(pairs), {key: {name: {} for name in names} for key, names in bouts.items()})
    turns.order = {name: [] for name in contestants}
    shuffle, order, begin = np.random.Generator(np.random.PCG64(0)), [], clock()
    while not turns.ended:
        order = order[::-1] if turns.rounds % 2 else _new_order(bouts, shuffle)
        for key, name in order:
            if not set(bouts[key]) & set(turns.failures):
                _one_turn(turns, key, name, contestants[name])
        turns.rounds += 1
        if progress is not None:
            progress(turns.rounds, turns)
        open_pairs = [pair for pair in pairs if not {pair.arm, pair.against} & set(turns.failures)]
        if pairs and not open_pairs:
            turns.ended = "no two arms are left to compare"
        else:
            turns.ended = budget.ends(turns.rounds, clock() - begin, lambda now=open_pairs: turns.estimates(now))
    return turns


def _new_order(bouts: dict[str, tuple[str, ...]], shuffle: np.random.Generator) -> list[tuple[str, str]]:
    """(bout, contestant) of one round."""
    keys = list(bouts)
    shuffled = [keys[i] for i in shuffle.permutation(len(keys))]
    return [(key, bouts[key][i]) for key in shuffled for i in shuffle.permutation(len(bouts[key]))]


def _one_turn(turns: Turns, key: str, name: str, contestant: Contestant) -> None:
    try:
        turns.seconds[key][name][turns.rounds] = contestant()
        turns.order[name].append((turns.rounds, key))
    except ContestantFailed as error:
        turns.failures[name] = str(error)


def compare(
    baseline: Callable[[], object],
    arm: Callable[[], object],
    *,
    rounds: int | None = None,
    until_resolved: float = 0.01,
    seconds: float = 60.0,
    block_seconds: float = 0.02,
    synchronise: Callable[[], object] = lambda: None,
) -> Estimate:
    """Compare any two callables with the statistics of a verdict: speed of `arm` over `baseline`, above 1 is faster.

    Each is called until a block takes `block_seconds`, after untimed calls; `synchronise` (torch.cuda.synchronize, say) is
    called around each block. Without `rounds` it goes on until the interval is within ±`until_resolved` or `seconds` are over.

        estimate = compare(lambda: x.softmax(-1), lambda: fused(x))
        print(estimate.sentence("fused", "softmax"))
    """
    if rounds is not None and rounds < fewest_rounds(CONFIDENCE):
        raise ValueError(f"rounds {rounds}; an interval at {CONFIDENCE:.0%} needs {fewest_rounds(CONFIDENCE)} or more")
    contestants = {
        "baseline": _Repeated(baseline, block_seconds, synchronise),
        "arm": _Repeated(arm, block_seconds, synchronise),
    }
    pair = Pair("arm", "baseline")
    found = take_turns(contestants, [pair], Budget(rounds, until_resolved, seconds)).estimate(pair)
    assert found is not None, "both took part in every round"
    return found


class _Repeated:
    """A callable as a contestant: as many calls as fill a block, counted once at the start."""

    def __init__(self, call: Callable[[], object], block_seconds: float, synchronise: Callable[[], object]):
        self.call, self.synchronise, self.count = call, synchronise, 1
        self._block()  # what a first call has to load or compile
        while (total := self._block() * self.count) < block_seconds:
            self.count = max(self.count + 1, min(self.count * 10, int(self.count * block_seconds / max(total, 1e-9))))

    def _block(self) -> float:
        self.synchronise()
        begin = time.perf_counter()
        for _ in range(self.count):
            self.call()
        self.synchronise()
        return (time.perf_counter() - begin) / self.count

    def __call__(self) -> float:
        self.call()  # untimed: caches as this contestant leaves them
        return self._block()
