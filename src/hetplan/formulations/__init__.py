"""The decision problems, one folder each; this module names them without importing their models."""

from __future__ import annotations

from hetplan.errors import InputError
from hetplan.solvers.registry import Family, load

FAMILIES: dict[str, str] = {
    "amp": "hetplan.formulations.amp.family:FAMILY",
    "astra": "hetplan.formulations.astra.family:FAMILY",
    "ditto": "hetplan.formulations.ditto.family:FAMILY",
    "poplar": "hetplan.formulations.poplar.family:FAMILY",
}


def family(name: str) -> Family:
    """The family called `name`; raises InputError listing the known ones."""
    if name not in FAMILIES:
        raise InputError("unknown problem", got=name, expected=f"one of {', '.join(FAMILIES)}")
    found: Family = load(FAMILIES[name])
    return found
