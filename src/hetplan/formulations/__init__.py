"""The decision problems, one folder each; this module names them without importing their models.

A plugin is a module of the user's own with METHODS = {problem: [Method, ...]}. Modules named by
entry points of the group `hetplan.methods` are plugins, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points

from hetplan.errors import InputError, look_up
from hetplan.interpreter import let_find
from hetplan.solvers.registry import Family, Method, load

FAMILIES: dict[str, str] = {
    "amp": "hetplan.formulations.amp.family:FAMILY",
    "astra": "hetplan.formulations.astra.family:FAMILY",
    "ditto": "hetplan.formulations.ditto.family:FAMILY",
    "hap": "hetplan.formulations.hap.family:FAMILY",
    "joint": "hetplan.formulations.joint.family:FAMILY",
    "poplar": "hetplan.formulations.poplar.family:FAMILY",
}
# Modules that joined for this process alone.
JOINED: list[str] = []


def family(name: str, *, where: str | None = None) -> Family:
    """The family called `name` with the methods of all plugins; raises InputError with the nearest
    names (`where`: who named it)."""
    family: Family = load(look_up("unknown problem", name, FAMILIES, where=where))
    for module in dict.fromkeys([*installed_plugins(), *JOINED]):
        own, taken = plugin(module).get(name, ()), [method.name for method in family.methods]
        if twice := [method.name for method in own if method.name in taken]:
            raise InputError("there is a method of this name", where=module, got=twice[0])
        family = replace(family, methods=(*family.methods, *own))
    return family


def join(modules: Sequence[str] | None) -> Sequence[str] | None:
    """The modules, after their methods have joined; they are installed, or else in the working
    folder. Raises InputError for a module that is no plugin."""
    for module in modules or ():
        let_find(module, "--plugin")
        plugin(module)
        JOINED.append(module)
    return modules


@cache
def installed_plugins() -> list[str]:
    """The modules of all entry points."""
    return [entry.value for entry in entry_points(group="hetplan.methods")]


@cache
def plugin(module: str) -> Mapping[str, Sequence[Method]]:
    """Its methods by problem; raises InputError where it has none."""
    try:
        methods: Mapping[str, Sequence[Method]] = load(f"{module}:METHODS")
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"no plugin: {error}",
            where=module,
            expected="a module with METHODS = {problem: [Method, ...]}",
        ) from None
    for problem in methods:
        look_up("unknown problem", problem, FAMILIES, where=f"{module}: METHODS")
    return methods
