"""The base of every configuration section, and the number types its fields use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration.

    `key` is the dotted YAML path (`optimizer.learning_rate`), `text` says what was given, what was
    expected and what to do. `source` says where the value was written; the loader fills it in.
    """

    key: str
    text: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" + (f"  [{self.source}]" if self.source else "")


class ConfigError(Exception):
    """A configuration that can't be used; carries every problem found, not only the first."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''} in the configuration:"
        super().__init__("\n  ".join([count, *map(str, problems)]))


class Section(BaseModel):
    """Frozen, typed without coercion, and closed: an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=False)


def _number_from_text(value: Any) -> Any:
    """`"1e-4"` in quotes is meant as a number wherever a float is expected."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


Float = Annotated[float, BeforeValidator(_number_from_text), Field(allow_inf_nan=False)]
PositiveFloat = Annotated[float, BeforeValidator(_number_from_text), Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, BeforeValidator(_number_from_text), Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, BeforeValidator(_number_from_text), Field(ge=0, lt=1, allow_inf_nan=False)]
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
