"""The decision problems, one folder each. This module finds a problem's family by its name, without
importing the models of the other problems.

A plugin is a module that a user writes, with METHODS = {problem: [Method, ...]}. It adds these
methods to the families. Plugins are the modules that entry points of the group `hetplan.methods`
name, and those that `add_plugins` adds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points

from hetplan.errors import InputError, kind_and_text, look_up, place_outside, require
from hetplan.interpreter import make_importable
from hetplan.solvers.registry import Family, Method, load

FAMILIES: dict[str, str] = {
    "amp": "hetplan.formulations.amp.family:FAMILY",
    "astra": "hetplan.formulations.astra.family:FAMILY",
    "ditto": "hetplan.formulations.ditto.family:FAMILY",
    "hap": "hetplan.formulations.hap.family:FAMILY",
    "joint": "hetplan.formulations.joint.family:FAMILY",
    "poplar": "hetplan.formulations.poplar.family:FAMILY",
}
# Names of the plugins that `add_plugins` has added in this process.
JOINED: list[str] = []


def family(name: str, *, where: str | None = None) -> Family:
    """The family of the problem `name`, with the methods that plugins add to it.

    where: the file or option that names the problem, for the error's text. Raises InputError with
    the nearest names where there is no such problem, and where a plugin's method has the name of
    another method.
    """
    found: Family = load(look_up("unknown problem", name, FAMILIES, where=where))
    for module in dict.fromkeys([*installed_plugins(), *JOINED]):  # each plugin once
        methods = plugin(module).get(name, ())
        added = [replace(method, of_plugin=True) for method in methods]
        taken = [method.name for method in found.methods]
        repeated = [method.name for method in added if method.name in taken]
        if repeated:
            raise InputError("there is a method of this name", where=module, got=repeated[0])
        found = replace(found, methods=(*found.methods, *added))
    return found


def add_plugins(modules: Sequence[str] | None) -> Sequence[str] | None:
    """Add plugins for this process and return their names.

    modules: names of modules that are installed or lie in the working folder; None: no plugin.
    Raises InputError for a module that is no plugin.
    """
    for module in modules or ():
        make_importable(module, "--plugin")
        plugin(module)
        JOINED.append(module)
    return modules


@cache
def installed_plugins() -> list[str]:
    """The names of the plugins that entry points of installed distributions name."""
    return [entry.value for entry in entry_points(group="hetplan.methods")]


@cache
def plugin(module: str) -> Mapping[str, Sequence[Method]]:
    """Problem -> the methods that a plugin adds to it, which its METHODS lists. Raises InputError
    where the module cannot be imported, has no METHODS or names an unknown problem."""
    expected = "a module with METHODS = {problem: [Method, ...]}"
    try:
        methods: Mapping[str, Sequence[Method]] = load(f"{module}:METHODS")
    except (ImportError, AttributeError) as error:
        raise InputError(f"no plugin: {error}", where=module, expected=expected) from None
    # A module may raise anything while it is imported, and may call `sys.exit`.
    except (Exception, SystemExit) as error:
        place = place_outside(error) or module
        raise InputError(f"plugin raises {kind_and_text(error)}", where=place) from error
    require(isinstance(methods, Mapping), "METHODS is no table", where=module, expected=expected)
    for problem, listed in methods.items():
        where = f"{module}: METHODS[{problem!r}]"
        is_list = isinstance(listed, list | tuple)
        are_methods = is_list and all(isinstance(method, Method) for method in listed)
        require(are_methods, "is no list of methods", where=where, expected=expected)
        look_up("unknown problem", problem, FAMILIES, where=f"{module}: METHODS")
    return methods
