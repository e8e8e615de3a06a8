"""The arms of a comparison: written out, from a YAML file, or by a shorthand over the fusion flags. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.load import LoadedConfig, load_config, read_yaml
from configs.run import RunConfig
from configs.section import ConfigError, Problem
from configs.transformer import FUSION_FLAGS
from fusions.machine import Machine
from fusions.registry import REFERENCE
from models.fusion_sites import OPTIMIZER_FLAG, fusion_plan
from trainer.compare.turns import Pair

# Keys that say which kernels run, not what is computed: flags, and what modifies a flag.
_COMPANIONS = ("memory_efficient_layer_norm", "fused_single_qkv_rope", "cross_entropy_fusion_impl", "strict_fusions",
               "activation_func_fp8_input_store")  # fmt: skip
FUSION_KEYS = (*(f"transformer.{key}" for key in (*FUSION_FLAGS, *_COMPANIONS)), OPTIMIZER_FLAG)
_FLAG_KEYS = {**{flag: f"transformer.{flag}" for flag in FUSION_FLAGS}, OPTIMIZER_FLAG: OPTIMIZER_FLAG}


@dataclass(frozen=True)
class Arm:
    """A name, its overrides (`section.key=value`), and what its processes are started with."""

    name: str
    overrides: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    processes: int | None = None  # as many as the configuration needs when None

    def load(self, config_path: str, common: list[str], last: list[str] | None = None) -> LoadedConfig:
        """The configuration of this arm: overrides of all arms, its own, and `last`; for as many processes as it gets."""
        overrides = [*common, *self.overrides, *(last or [])]
        alone = load_config(config_path, overrides).config
        return load_config(config_path, overrides, self.processes or alone.parallel.processes)


@dataclass(frozen=True)
class Ablation:
    """Which arms show the effect of each flag: by itself over `none`, and taken out of `all`."""

    none: str = "none"
    all: str = "all"
    single: dict[str, str] = field(default_factory=dict)  # flag -> arm
    without: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Arms:
    """The arms, which of them are compared, and what the shorthand left out and why."""

    arms: list[Arm]
    pairs: list[Pair]
    left_out: dict[str, str] = field(default_factory=dict)
    ablation: Ablation | None = None


def against_first(arms: list[Arm]) -> Arms:
    """Every arm against the first."""
    return Arms(arms, [Pair(arm.name, arms[0].name) for arm in arms[1:]])


def fused_vs_unfused(config: RunConfig) -> Arms:
    """The configuration's own flags against no fusion, and against no fusion with every layer compiled as a whole.

    A configuration without any flag set gets all of them. `optimizer.fusion` stays as configured in all three.
    """
    flags = [flag for flag in FUSION_FLAGS if flag != OPTIMIZER_FLAG]
    asked = [flag for flag in flags if getattr(config.transformer, flag) is not False] or flags
    off = tuple(f"transformer.{flag}=false" for flag in flags)
    on = tuple(f"transformer.{flag}={_on(config, flag)}" for flag in asked)
    arms = [
        Arm("unfused", (*off, "training.compile_layers=false")),
        Arm("fused", (*off, *on)),
        Arm("unfused, compiled layers", (*off, "training.compile_layers=true")),
    ]
    return Arms(arms, [Pair(arms[1].name, arms[0].name), Pair(arms[1].name, arms[2].name)])


def backends(flag: str, names: list[str]) -> Arms:
    """One arm for each backend of a flag; the reference, or else the first, is what the others are compared with."""
    key = _FLAG_KEYS.get(flag)
    if key is None:
        raise ConfigError([Problem("--backends", f"{flag} is not a fusion flag; flags: {', '.join(_FLAG_KEYS)}")])
    names = sorted(names, key=lambda name: name not in (REFERENCE, "false"))
    return against_first([Arm(name, (f"{key}={'false' if name == REFERENCE else name}",)) for name in names])


def ablation(config: RunConfig, machine: Machine, only: list[str], one_at_a_time: bool, leave_one_out: bool) -> Arms:
    """Each flag by itself over none, each taken out of all, and all over none.

    A flag that can't change what runs here, by itself or beside the others, is left out, with the reason; `only` narrows.
    """
    unknown = [flag for flag in only if flag not in _FLAG_KEYS]
    if unknown:
        raise ConfigError([Problem("--flags", f"{', '.join(unknown)}: not a fusion flag; flags: {', '.join(_FLAG_KEYS)}")])
    flags, left_out = _useful_flags(config, machine, only or list(_FLAG_KEYS))
    if not flags:
        reasons = "; ".join(f"{flag}: {why}" for flag, why in left_out.items())
        raise ConfigError([Problem("--ablate", f"no fusion flag can change what runs here: {reasons}")])

    def arm(name: str, on: list[str]) -> Arm:
        values = {flag: _on(config, flag) if flag in on else "false" for flag in flags}
        return Arm(name, tuple(f"{_FLAG_KEYS[flag]}={value}" for flag, value in values.items()))

    parts = Ablation()
    arms, pairs = [arm(parts.none, []), arm(parts.all, flags)], [Pair(parts.all, parts.none)]
    for flag in flags if one_at_a_time else []:
        parts.single[flag] = flag
        arms.append(arm(flag, [flag]))
        pairs.append(Pair(flag, parts.none))
    for flag in flags if leave_one_out and len(flags) > 1 else []:
        parts.without[flag] = f"without {flag}"
        arms.append(arm(parts.without[flag], [f for f in flags if f != flag]))
        pairs.append(Pair(parts.without[flag], parts.all))
    if not one_at_a_time:
        arms, pairs = arms[1:], pairs[1:]
    return Arms(arms, pairs, left_out, parts if one_at_a_time else None)


def _useful_flags(config: RunConfig, machine: Machine, flags: list[str]) -> tuple[list[str], dict[str, str]]:
    """The flags that change what runs when set alone, and why the others don't."""
    useful, left_out = [], {}
    for flag in flags:
        changed = _with_flags(config, {f: _value(config, f) if f == flag else False for f in _FLAG_KEYS})
        decisions = [d for d in fusion_plan(changed, machine).decisions if d.flag == flag]
        undecided = any(d.asked == "auto" and not d.note.startswith("no effect") for d in decisions)
        if undecided or any(d.runs != REFERENCE for d in decisions):
            useful.append(flag)
        else:
            left_out[flag] = "; ".join(dict.fromkeys(d.why for d in decisions)) or "the model has no place for it"
    return useful, left_out


def _value(config: RunConfig, flag: str) -> bool | str:
    """The configured value of a flag, true where it is off."""
    value = config.optimizer.fusion if flag == OPTIMIZER_FLAG else getattr(config.transformer, flag)
    return True if value is False else value


def _on(config: RunConfig, flag: str) -> str:
    value = _value(config, flag)
    return "true" if value is True else str(value)


def _with_flags(config: RunConfig, values: dict[str, bool | str]) -> RunConfig:
    flags = {flag: value for flag, value in values.items() if flag != OPTIMIZER_FLAG}
    transformer = config.transformer.model_copy(update={**flags, "strict_fusions": False})
    optimizer = config.optimizer.model_copy(update={"fusion": values[OPTIMIZER_FLAG]})
    return config.model_copy(update={"transformer": transformer, "optimizer": optimizer})


@dataclass(frozen=True)
class ArmsFile:
    """A comparison kept in a file: the configuration it is about, what all arms have in common, and the arms."""

    config: str | None
    overrides: list[str]
    arms: Arms
    options: dict[str, Any]  # rounds, until_resolved, time_limit, steps

    OPTIONS = ("rounds", "until_resolved", "time_limit", "steps", "loss_iters")


def read_arms(path: str) -> ArmsFile:
    """Read an arms file. Raises ConfigError with every problem.

        config: configs/gpt/quickstart.yaml      # may be left out: then the command names it
        overrides: [training.micro_batch_size=8] # for all arms
        until_resolved: 1%                       # or rounds: 20; and time_limit (s), steps
        arms:
          one process: [parallel.tensor_parallel_size=1, parallel.sequence_parallel=false]
          two processes: {overrides: [], environment: {OMP_PROC_BIND: "true"}, against: one process}

    An arm is compared with the first one, or with `against`.
    """
    problems: list[Problem] = []
    data = read_yaml(Path(path), {}, problems)
    problems += [Problem(f"{path}: {key}", why) for key, why in _file_problems(data)]
    if problems:
        raise ConfigError(problems)
    arms, pairs = [], []
    for name, given in data["arms"].items():
        fields: dict[str, Any] = {"overrides": given} if isinstance(given, list) else given or {}
        wrong = _arm_problems(fields)
        if wrong:
            problems.append(Problem(f"{path}: arms.{name}", wrong))
            continue
        environment = tuple((str(k), str(v)) for k, v in fields.get("environment", {}).items())
        arms.append(Arm(str(name), tuple(fields.get("overrides", [])), environment, fields.get("processes")))
        if "against" in fields or len(arms) > 1:
            pairs.append(Pair(str(name), str(fields.get("against", arms[0].name))))
    if problems:
        raise ConfigError(problems)
    options = {key: data[key] for key in ArmsFile.OPTIONS if key in data}
    return ArmsFile(data.get("config"), list(data.get("overrides") or []), Arms(arms, pairs), options)


def _file_problems(data: dict[str, Any]) -> list[tuple[str, str]]:
    known = ("config", "overrides", "arms", *ArmsFile.OPTIONS)
    found = [(key, f"is not a known key; known: {', '.join(known)}") for key in data if key not in known]
    if not isinstance(data.get("arms"), dict):
        found.append(("arms", "expected a mapping of {name: [overrides]}"))
    if not isinstance(data.get("config"), str | None):
        found.append(("config", f"got {data['config']!r}, expected the path of a YAML file"))
    overrides = data.get("overrides", [])
    if not _is_overrides(overrides):
        found.append(("overrides", f"got {overrides!r}, expected a list of section.key=value"))
    for key in ("rounds", "time_limit", "steps", "loss_iters"):
        if key in data and (type(data[key]) is not int or data[key] < 1):
            found.append((key, f"got {data[key]!r}, expected a whole number above 0"))
    if "rounds" in data and "until_resolved" in data:
        found.append(("until_resolved", "has no meaning beside rounds; remove one"))
    return found


def _arm_problems(fields: Any) -> str:
    known = {"overrides": list, "environment": dict, "processes": int, "against": str}
    if not isinstance(fields, dict):
        return f"got {fields!r}; expected a list of overrides, or a mapping with {', '.join(known)}"
    for key, value in fields.items():
        if key == "processes" and value is not None and (type(value) is not int or value < 1):
            return f"processes: got {value!r}, expected a whole number above 0"
        if key not in known:
            return f"{key} is not a known key; known: {', '.join(known)}"
        if not isinstance(value, known[key]) or (key == "overrides" and not _is_overrides(value)):
            expected = "a list of section.key=value" if key == "overrides" else f"a {known[key].__name__}"
            return f"{key}: got {value!r}, expected {expected}"
    return ""


def _is_overrides(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)
