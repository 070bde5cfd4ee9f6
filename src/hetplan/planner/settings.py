"""What a strategy lets its user set, beyond what all strategies share: `STRATEGY.NAME = value`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from hetplan.errors import InputError
from hetplan.schema import parse

# Strategy -> name -> value, as JSON types.
Settings = Mapping[str, Mapping[str, object]]

M = TypeVar("M", bound=BaseModel)


def parse_settings(model: type[M], given: Mapping[str, object], strategy: str) -> M:
    """A strategy's settings, defaults where nothing is given; raises InputError that lists what
    there is."""
    known = ", ".join(f"{strategy}.{name}" for name in model.model_fields)
    for name in given:
        if name not in model.model_fields:
            raise InputError(
                "no such setting", got=f"{strategy}.{name}", expected=f"one of {known}"
            )
    return parse(model, dict(given), where=f"setting {strategy}")


def check_settings(settings: Settings, chosen: Mapping[str, type[Any] | None]) -> None:
    """Refuse settings of strategies that are not tried or have none. chosen: strategy -> its
    model."""
    for name in settings:
        if name not in chosen:
            raise InputError(
                "setting of a strategy that is not tried",
                got=name,
                expected=f"one of {', '.join(chosen)}",
            )
        model = chosen[name]
        if model is None:
            having = (
                ", ".join(other for other, its in chosen.items() if its is not None)
                or "none of these"
            )
            raise InputError(
                "strategy without settings", got=name, expected=f"one with settings: {having}"
            )
        parse_settings(model, settings[name], name)
