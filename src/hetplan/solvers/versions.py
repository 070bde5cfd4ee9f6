"""Which solvers this installation has, and in which version: for `hetplan doctor` and for study
rows.

Packages are looked up by their metadata, so that asking loads none of them; only `pyomo_solvers`
loads Pyomo.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True)
class Package:
    """A package behind one or more methods; version None: not installed."""

    name: str
    methods: str
    version: str | None


_PACKAGES = (
    ("ortools", "cp-sat"),
    ("highspy", "milp"),
    ("pyomo", "pyomo"),
    ("numba", "exact"),
    ("numpy", "all"),
)


def packages() -> list[Package]:
    """The packages that solve, installed or not, in a fixed order."""
    return [Package(name, methods, _version(name)) for name, methods in _PACKAGES]


def versions() -> dict[str, str | None]:
    """Package -> version, hetplan's own included."""
    return {
        "hetplan": _version("hetplan"),
        **{package.name: package.version for package in packages()},
    }


def conflicts() -> list[str]:
    """Combinations that are known not to work, one line each."""
    found = _version("highspy"), _version("ortools")
    if None not in found and _numbers(found[0]) >= (1, 15) and _numbers(found[1]) >= (9, 12):
        return [
            f"highspy {found[0]} and ortools {found[1]} cannot be imported in one process "
            "(both ship a library called libhighs); install highspy below 1.15"
        ]
    return []


def pyomo_solvers() -> dict[str, str | None]:
    """Pyomo interface name -> version of the solver found behind it (None: it does not tell)."""
    import pyomo.environ as pyo

    from hetplan.solvers.pyomo_driver import available_solvers

    def told(name: str) -> str | None:
        numbers = pyo.SolverFactory(name).version()
        return ".".join(str(n) for n in numbers) if numbers else None

    return {name: told(name) for name in available_solvers()}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str | None) -> tuple[int, ...]:
    """The leading numbers of a version, for comparison."""
    numbers = []
    for part in (text or "").split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
