"""What is compared: arms, each a list of overrides on one configuration. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from configs.load import LoadedConfig, load_config
from configs.section import ConfigError, Problem
from configs.transformer import FUSION_FLAGS

# What arms may differ in: the flags, and the keys that modify a flag.
_COMPANIONS = ("memory_efficient_layer_norm", "fused_single_qkv_rope", "cross_entropy_fusion_impl", "strict_fusions",
               "activation_func_fp8_input_store")  # fmt: skip
FUSION_KEYS = (*(f"transformer.{key}" for key in (*FUSION_FLAGS, *_COMPANIONS)), "optimizer.fusion")


@dataclass(frozen=True)
class Arm:
    """A name and its overrides (`section.key=value`)."""

    name: str
    overrides: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ComparisonPlan:
    """Arms over one YAML; the first is what the others are compared with."""

    config_path: str
    overrides: list[str]
    arms: list[Arm]
    rounds: int = 12
    steps_per_block: int = 3
    warmup_steps: int = 3
    out: str = "runs/compare"

    def load(self, arm: Arm, world_size: int | None = None) -> LoadedConfig:
        """The configuration of an arm."""
        return load_config(self.config_path, [*self.overrides, *arm.overrides], world_size)

    def check(self, world_size: int) -> None:
        """Raise ConfigError, naming the arm, for any arm that can't be loaded or can't share a worker group."""
        problems = self._usage_problems()
        shapes = {}
        for arm in self.arms:
            try:
                dump = self.load(arm, world_size).config.model_dump()
            except ConfigError as error:
                problems += [Problem(f"arm {arm.name}: {p.key}", p.text, p.source) for p in error.problems]
                continue
            for key in FUSION_KEYS:
                section, _, name = key.partition(".")
                dump[section].pop(name)
            shapes[arm.name] = json.dumps(dump, sort_keys=True)
        if not problems and len(set(shapes.values())) > 1:
            first = self.arms[0].name
            odd = next(name for name, shape in shapes.items() if shape != shapes[first])
            problems.append(
                Problem(
                    f"arm {odd}",
                    f"differs from {first} in more than fusion flags; arms take turns in one group of processes, so they may "
                    f"differ only in {', '.join(FUSION_KEYS)}",
                )
            )
        if problems:
            raise ConfigError(problems)

    def _usage_problems(self) -> list[Problem]:
        found = []
        if len(self.arms) < 2 or len({arm.name for arm in self.arms}) < len(self.arms):
            found.append(Problem("--arm", f"{[a.name for a in self.arms]}: expected two or more different names"))
        for arm in self.arms:
            if "=" in arm.name:
                found.append(
                    Problem("--arm", f"{arm.name!r} is an override; an arm starts with its name: --arm NAME {arm.name}")
                )
        if self.steps_per_block < 1:
            found.append(Problem("--steps", f"{self.steps_per_block}; expected 1 or more"))
        if self.rounds < 3:
            found.append(Problem("--rounds", f"{self.rounds}; an interval needs 3 or more"))
        return found

    def write(self, path: Path) -> None:
        """As JSON, for the worker processes."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: str) -> ComparisonPlan:
        """What `write` wrote."""
        data = json.loads(Path(path).read_text())
        return ComparisonPlan(**{**data, "arms": [Arm(**arm) for arm in data["arms"]]})
