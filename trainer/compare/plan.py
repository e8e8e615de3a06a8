"""What is compared and how: the arms, their groups of processes, the budget. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from configs.load import LoadedConfig
from configs.run import RunConfig
from configs.section import ConfigError, Problem
from configs.transformer import FUSION_FLAGS
from fusions.machine import probe
from fusions.registry import FusionError
from models.fusion_sites import fusion_plan
from trainer.compare.arms import FUSION_KEYS, Ablation, Arm
from trainer.compare.statistics import CONFIDENCE, corrected, fewest_rounds
from trainer.compare.turns import Budget, Pair

# What may differ between two arms whose losses can still be compared: how a step is computed, not what.
SAME_LOSSES = (*FUSION_KEYS, "training.compile_layers", "training.micro_batch_size", "transformer.attention_backend")
LEAK_BYTES = 16 << 10  # left behind by every step: Python's own objects come and go by less
_SAME_LOSSES_SECTIONS = ("run", "parallel", "checkpoint", "logging")


@dataclass(frozen=True)
class ComparisonPlan:
    """Arms over one YAML, the pairs that get a verdict, and how long to measure."""

    config_path: str
    overrides: list[str]
    arms: list[Arm]
    pairs: list[Pair]
    budget: Budget
    out: str
    steps_per_block: int | None = None  # as few as fill BLOCK_SECONDS when None
    loss_iters: int = 20
    attribution: bool = True
    left_out: dict[str, str] = field(default_factory=dict)  # flag -> why the shorthand made no arm of it
    ablation: Ablation | None = None

    # Short blocks: the shorter, the more of the machine's drift is common to the two of a round.
    BLOCK_SECONDS = 0.05

    def arm(self, name: str) -> Arm:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)

    def load(self, arm: Arm) -> LoadedConfig:
        """The configuration of an arm."""
        return arm.load(self.config_path, self.overrides)

    def check(self) -> dict[str, LoadedConfig]:
        """The configuration of every arm. Raises ConfigError with all that is wrong with any of them."""
        problems, loaded = self._usage_problems(), {}
        for arm in self.arms:
            try:
                loaded[arm.name] = self.load(arm)
            except ConfigError as error:
                problems += [Problem(f"arm {arm.name}: {p.key}", p.text, p.source) for p in error.problems]
        if problems:
            raise ConfigError(problems)
        return loaded

    def _usage_problems(self) -> list[Problem]:
        found, names = [], [arm.name for arm in self.arms]
        if len(self.arms) < 2 or len(set(names)) < len(names):
            found.append(Problem("--arm", f"{names}: expected two or more different names"))
        found += [
            Problem("--arm", f"{name!r} is an override; an arm starts with its name: --arm NAME {name}")
            for name in names
            if "=" in name and "." in name
        ]
        for pair in self.pairs:
            if pair.against not in names or pair.arm == pair.against:
                found.append(
                    Problem(f"arm {pair.arm}", f"against {pair.against!r}; expected another arm: {', '.join(names)}")
                )
        if self.steps_per_block is not None and self.steps_per_block < 1:
            found.append(Problem("--steps", f"{self.steps_per_block}; expected 1 or more"))
        if self.loss_iters < 2:
            found.append(Problem("--loss-iters", f"{self.loss_iters}; expected 2 or more"))
        fewest = fewest_rounds(corrected(CONFIDENCE, len(self.pairs)))
        if self.budget.rounds is not None and self.budget.rounds < fewest:
            found.append(
                Problem(
                    "--rounds",
                    f"{self.budget.rounds}; a {CONFIDENCE:.0%} interval over {len(self.pairs)} comparison(s) needs {fewest} "
                    "or more",
                )
            )
        return found

    def write(self, path: Path) -> None:
        """As JSON, for the worker processes."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: str) -> ComparisonPlan:
        """What `write` wrote."""
        data = json.loads(Path(path).read_text())
        arms = [
            Arm(a["name"], tuple(a["overrides"]), tuple((k, v) for k, v in a["environment"]), a["processes"])
            for a in data["arms"]
        ]
        pairs = [Pair(**pair) for pair in data["pairs"]]
        ablation = None if data["ablation"] is None else Ablation(**data["ablation"])
        made = {"arms": arms, "pairs": pairs, "budget": Budget(**data["budget"]), "ablation": ablation}
        return ComparisonPlan(**{**data, **made})


def processes(arm: Arm, config: RunConfig) -> int:
    """How many processes an arm runs in."""
    return arm.processes or config.parallel.processes


def groups(plan: ComparisonPlan, loaded: dict[str, LoadedConfig]) -> list[list[Arm]]:
    """Arms that can share processes: same device, parallel sizes, threads, number of processes and environment."""
    by_key: dict[str, list[Arm]] = {}
    for arm in plan.arms:
        config = loaded[arm.name].config
        shared = [
            config.run.device,
            config.run.threads,
            config.parallel.model_dump(),
            processes(arm, config),
            arm.environment,
        ]
        by_key.setdefault(json.dumps(shared), []).append(arm)
    return list(by_key.values())


def refusals(plan: ComparisonPlan, loaded: dict[str, LoadedConfig]) -> dict[str, str]:
    """Arms whose fusions can't run here, by name, with every obstacle: they are dead before they start."""
    refused = {}
    for arm in plan.arms:
        config = loaded[arm.name].config
        try:
            fusion_plan(config, probe(config.run.device))
        except FusionError as error:
            refused[arm.name] = str(error)
    return refused


def differences(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The dotted keys whose values differ between two dumped configurations."""
    left, right = dict(_leaves(a)), dict(_leaves(b))
    keys = dict.fromkeys([*left, *right])
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}


def other_losses(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The keys by which two configurations train differently, so that their losses say nothing about a kernel."""
    different = differences(a, b)
    return [key for key in different if key not in SAME_LOSSES and key.partition(".")[0] not in _SAME_LOSSES_SECTIONS]


def fusions_asked(config: dict[str, Any]) -> int:
    """How many fusions a dumped configuration asks for, compiled layers and the optimizer's counted."""
    flags = sum(config["transformer"][flag] is not False for flag in FUSION_FLAGS)
    return flags + config["training"]["compile_layers"] + (config["optimizer"]["fusion"] is not False)


def _leaves(tree: dict[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value
