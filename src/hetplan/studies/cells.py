"""Checks of the cells of a study's rows.

Rows come from files that may be damaged, or that another program wrote. A row is used only where
every cell has a value that hetplan's own runs write.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, get_args

from hetplan.errors import short_repr
from hetplan.instances.answers import Status
from hetplan.schema import PLAIN
from hetplan.solvers.run import Stop

STATUSES = get_args(Status)
LONGEST_NAME = 200  # characters, as in `schema.Name`
PROVEN = ("optimal", "infeasible")  # the statuses of runs that ended with a proof


def is_text(value: Any) -> bool:
    """Whether a cell holds text."""
    return isinstance(value, str) and value != ""


def is_name(value: Any) -> bool:
    """Whether a cell holds a name as hetplan's files may have it."""
    return is_text(value) and len(value) <= LONGEST_NAME and re.fullmatch(PLAIN, value) is not None


def is_figure(value: Any) -> bool:
    """Whether a cell holds a finite number, or none where it is not known."""
    return value is None or math.isfinite(value)


def is_amount(value: Any) -> bool:
    """Whether a cell holds a finite number of at least 0, or none where it is not known."""
    return value is None or (math.isfinite(value) and value >= 0)


def json_of(text: Any) -> Any:
    """The value of JSON text; None where it is none, or nested beyond what Python reads."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None


def is_object(text: Any) -> bool:
    """Whether a cell holds the JSON text of an object."""
    return isinstance(json_of(text), dict)


def is_decision(text: Any) -> bool:
    """Whether a cell holds the JSON text of a decision, or none."""
    return text is None or is_object(text)


def has_version(text: Any) -> bool:
    """Whether a cell holds the versions with which a row was made."""
    versions = json_of(text)
    return isinstance(versions, dict) and isinstance(versions.get("method", 1), int)


def has_size(text: Any) -> bool:
    """Whether a cell holds a run's details, in which the instance's size is a number or absent."""
    details = json_of(text)
    if not isinstance(details, dict):
        return False
    size = details.get("instance_size")
    return size is None or (isinstance(size, int) and size >= 0)


# Column -> (whether a cell of it can be used, what is expected there).
CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("key", "set", "begun"), (is_text, "a text")),
    **dict.fromkeys(("instance", "problem", "method"), (is_name, "a name")),
    "exact": (lambda value: isinstance(value, bool), "true or false"),
    "seed": (lambda value: isinstance(value, int), "a whole number"),
    "status": (lambda value: value in STATUSES, f"one of {', '.join(STATUSES)}"),
    "stop": (lambda value: value in set(Stop), f"one of {', '.join(Stop)}"),
    **dict.fromkeys(
        ("objective", "bound", "gap", "best_known", "bound_known"),
        (is_figure, "a finite number or null"),
    ),
    **dict.fromkeys(
        ("seconds", "build_seconds", "solve_seconds", "peak_bytes", "time_limit"),
        (is_amount, "a finite number of at least 0, or null"),
    ),
    **dict.fromkeys(("options_json", "machine_json"), (is_object, "a JSON object")),
    "decision_json": (is_decision, "a JSON object or null"),
    "versions_json": (has_version, "a JSON object with the version of the method"),
    "details_json": (has_size, "a JSON object with the size of the instance"),
}


def fault_of(row: Mapping[str, Any]) -> str | None:
    """The fault of a row, in one line; None where the row has no fault."""
    for column, (usable, expected) in CHECKS.items():
        if not usable(row[column]):
            return f"{column} is not usable (got {short_repr(row[column])}, expected {expected})"
    if row["status"] in PROVEN and row["seconds"] is None:
        return f"seconds are missing, and the status is {row['status']}"
    return None
