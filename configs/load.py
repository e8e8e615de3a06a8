"""Strict YAML -> RunConfig. Every value knows where it came from, and all problems are reported together.

PyYAML follows YAML 1.1, where `1e-4` is text, `on` is true, `010` is 8 and a second key of the same name wins
without a word. The loader below reads scalars as YAML 1.2 does and refuses what it can't place.
"""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import BaseModel, ValidationError

from configs.run import RunConfig, json_schema
from configs.section import ConfigError, Problem


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2: only true/false are booleans, 1e-4 is a number, 010 is text."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", "-+0123456789"),
    (
        "float",
        r"^[-+]?(?:(?:[0-9][0-9_]*)?\.[0-9]+|[0-9][0-9_]*\.?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.nan$",
        "-+0123456789.",
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = node.value.replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


# What PyYAML raises for bad input: besides its own errors, whatever a tag's constructor meets (!!int abc, &x [*x]).
_YAML_FAULTS = (yaml.YAMLError, ValueError, KeyError, AttributeError, RecursionError)


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and the source of each of its values (`default`, `file:line`, `command line`)."""

    config: RunConfig
    sources: dict[str, str]

    def resolved_yaml(self) -> str:
        """The whole configuration as YAML, each value with a comment that says where it came from."""
        lines: list[str] = []
        _write_yaml(self.config.model_dump(), (), self.sources, lines)
        return "\n".join(lines) + "\n"


def load_config(path: str | Path, overrides: list[str] | None = None, world_size: int | None = None) -> LoadedConfig:
    """Read `path`, apply `section.key=value` overrides, check everything.

    Raises ConfigError with all the problems: unknown and duplicate keys, wrong types, and conflicts between fields.
    """
    problems: list[Problem] = []
    sources: dict[str, str] = {}
    tree = read_yaml(Path(path), sources, problems)
    for override in overrides or []:
        _apply_override(tree, override, sources, problems)
    config = _validate(tree, sources, problems)
    if config is not None and not problems:
        if world_size is not None and config.parallel.data_parallel_size is None:
            config = config.for_processes(world_size)
            sources["parallel.data_parallel_size"] = "number of processes"
        problems += [Problem(p.key, p.text, sources.get(p.key, "default")) for p in config.problems(world_size=world_size)]
    if problems or config is None:
        raise ConfigError(problems)
    return LoadedConfig(config, {key: sources.get(key, "default") for key in _leaves(config.model_dump())})


def write_schema(path: str | Path) -> None:
    """Write the JSON schema that makes editors complete and check the YAML files."""
    Path(path).write_text(json.dumps(json_schema(), indent=1) + "\n")


def read_yaml(path: Path, sources: dict[str, str], problems: list[Problem]) -> dict[str, Any]:
    """A YAML file as plain values; `sources` gets the line of each key, `problems` every key that is there twice.

    Raises ConfigError for what is no YAML mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), f"can't be read: {error}")]) from None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None or not isinstance(node, yaml.MappingNode):
            raise ConfigError([Problem(str(path), "is not a mapping of sections (run:, model:, transformer:, …)")])
        return _plain(loader, node, (), path, sources, problems)
    except _YAML_FAULTS as error:
        raise ConfigError([Problem(str(path), f"is not valid YAML: {type(error).__name__}: {error}")]) from None


def _plain(
    loader: _Loader, node: yaml.Node, at: tuple[str, ...], path: Path, sources: dict[str, str], problems: list[Problem]
) -> Any:
    """The node as plain Python values; notes the line of each key, and each key that is there twice."""
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node, deep=True))
            here, line = ".".join((*at, key)), key_node.start_mark.line + 1
            if key in result:
                problems.append(
                    Problem(here, f"is there twice (before: {sources[here]}); remove one", f"{path.name}:{line}")
                )
            sources[here] = f"{path.name}:{line}"
            result[key] = _plain(loader, value_node, (*at, key), path, sources, problems)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, item, (*at, str(i)), path, sources, problems) for i, item in enumerate(node.value)]
    return _scalar(loader, node, ".".join(at), f"{path.name}:{node.start_mark.line + 1}", problems)


def _scalar(loader: _Loader, node: yaml.Node, key: str, source: str, problems: list[Problem]) -> Any:
    unquoted_none = isinstance(node, yaml.ScalarNode) and node.style is None and node.value.lower() == "none"
    if unquoted_none and "none" not in typing.get_args(_annotation(key.split("."))):
        problems.append(
            Problem(key, f"{node.value} is plain text in YAML; write null (or quote it to mean the text)", source)
        )
    return loader.construct_object(node, deep=True)


def _apply_override(tree: dict[str, Any], override: str, sources: dict[str, str], problems: list[Problem]) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        problems.append(Problem(override, "is not of the form section.key=value", "command line"))
        return
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        value = None if node is None else _scalar(loader, node, key, "command line", problems)
    except _YAML_FAULTS as error:
        problems.append(Problem(key, f"value {text!r} is not valid YAML: {error}", "command line"))
        return
    branch = tree
    for part in parts[:-1]:
        branch[part] = {} if branch.get(part) is None else branch[part]
        branch = branch[part]
        if not isinstance(branch, dict):
            problems.append(Problem(key, f"{part!r} is a value, not a section", "command line"))
            return
    branch[parts[-1]] = value
    sources[".".join(parts)] = f"command line {override!r}"


def _validate(tree: dict[str, Any], sources: dict[str, str], problems: list[Problem]) -> RunConfig | None:
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        seen: set[tuple[str, str]] = set()
        for item in error.errors(include_url=False):
            problem = _explain(item, sources)
            if (problem.key, problem.text) not in seen:
                seen.add((problem.key, problem.text))
                problems.append(problem)
        return None


def _explain(item: Any, sources: dict[str, str]) -> Problem:
    """One pydantic error in the words of a YAML file."""
    path = [str(part) for part in item["loc"]]
    # A union appends the name of the member it tried (`bool`, `literal[...]`); that part is not a key.
    while len(path) > 1 and ".".join(path) not in sources and item["type"] not in ("missing", "extra_forbidden"):
        path.pop()
    key = ".".join(path)
    if item["type"] == "missing":
        return Problem(key, "is missing and has no default; add it")
    source = sources.get(key, "")
    if item["type"] == "extra_forbidden":
        return Problem(key, f"is not a known key{_nearest(path)}", source)
    annotation = _annotation(path)
    expected = _describe(annotation) if annotation is not None else item["msg"]
    constraint = "" if "type" in item["type"] or "literal" in item["type"] else f" ({item['msg']})"
    return Problem(
        key, f"got {item['input']!r}, expected {expected}{constraint}{_yaml_hint(item['input'], expected)}", source
    )


def _nearest(path: list[str]) -> str:
    """The valid key that is most like this one: first in the same section, then anywhere."""
    where = f"section {'.'.join(path[:-1])!r}" if path[:-1] else "the file"
    near = difflib.get_close_matches(path[-1], _keys_of(path[:-1]), n=1, cutoff=0.6)
    if not near:
        names = {name: key for key in _all_keys(RunConfig) for name in [key.rpartition(".")[2]]}
        near = [names[name] for name in difflib.get_close_matches(path[-1], names, n=1, cutoff=0.5)]
    return f" of {where}" + (f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(_keys_of(path[:-1]))}")


def _all_keys(model: Any, at: tuple[str, ...] = ()) -> list[str]:
    keys: list[str] = []
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        keys += _all_keys(inner, (*at, name)) if inner else [".".join((*at, name))]
    return keys


def _yaml_hint(value: Any, expected: str) -> str:
    if (
        "true | false" in expected
        and isinstance(value, str)
        and value.lower() in ("on", "off", "yes", "no", "true", "false")
    ):
        return "; write true or false, without quotes"
    if isinstance(value, str) and value.lower() == "none":
        return "; write none" if "none" in expected.split(" | ") else "; write null"
    return ""


def _keys_of(path: list[str]) -> list[str]:
    model: Any = RunConfig
    for part in path:
        model = _model_in(model.model_fields[part].annotation) if model and part in model.model_fields else None
    return list(model.model_fields) if model else []


def _annotation(path: list[str]) -> Any:
    model: Any = RunConfig
    for depth, part in enumerate(path):
        if model is None or part not in model.model_fields:
            return None
        field = model.model_fields[part]
        if depth == len(path) - 1:
            return field.annotation
        model = _model_in(field.annotation)
    return None


def _model_in(annotation: Any) -> Any:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _describe(annotation: Any) -> str:
    """`bool | Literal["compile"]` -> "true, false or compile"."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(part) for part in typing.get_args(annotation))
    if origin is typing.Literal:
        return " | ".join(str(word) for word in typing.get_args(annotation))
    if origin is typing.Annotated:
        return _describe(typing.get_args(annotation)[0])
    if origin is list:
        return f"a list of {_describe(typing.get_args(annotation)[0])}"
    if _model_in(annotation):
        return f"a mapping with the keys {', '.join(annotation.model_fields)}"
    names = {bool: "true | false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    return names.get(annotation, str(annotation))


def _leaves(tree: dict[str, Any], at: tuple[str, ...] = ()) -> list[str]:
    keys: list[str] = []
    for key, value in tree.items():
        keys += _leaves(value, (*at, key)) if isinstance(value, dict) else [".".join((*at, key))]
    return keys


def _write_yaml(tree: dict[str, Any], at: tuple[str, ...], sources: dict[str, str], lines: list[str]) -> None:
    indent = "  " * len(at)
    for key, value in tree.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{key}:")
            _write_yaml(value, (*at, key), sources, lines)
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}  # {sources.get('.'.join((*at, key)), 'default')}")
