"""The decision problems, one folder each; this module names them without importing their models."""

from hetplan.names import unknown_name
from hetplan.solvers.registry import Family, load

FAMILIES: dict[str, str] = {
    "amp": "hetplan.formulations.amp.family:FAMILY",
    "astra": "hetplan.formulations.astra.family:FAMILY",
    "ditto": "hetplan.formulations.ditto.family:FAMILY",
    "hap": "hetplan.formulations.hap.family:FAMILY",
    "joint": "hetplan.formulations.joint.family:FAMILY",
    "poplar": "hetplan.formulations.poplar.family:FAMILY",
}


def family(name: str, *, where: str | None = None) -> Family:
    """The family called `name`; raises InputError with the nearest names (`where`: who named
    it)."""
    if name not in FAMILIES:
        raise unknown_name("unknown problem", name, FAMILIES, where=where)
    found: Family = load(FAMILIES[name])
    return found
