"""What the shell offers for an argument or an option.

A shell asks at every press of a key, so nothing heavy is read. Completers take what is typed so far
(and the context, where what stands before matters) and return whole words. Where none begins so,
the shell falls back on file names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

import typer

from hetplan.formulations import FAMILIES, family
from hetplan.instances.shelf import SETS, shelved

# Of an instance file only this much is read to learn its problem, which stands near the beginning.
GLANCE_BYTES = 4096
_PROBLEM = re.compile(rb'"problem"\s*:\s*"([a-z]+)"')

Completer = Callable[[str], list[str]]


def beginning(names: Iterable[str], incomplete: str) -> list[str]:
    """The names that begin as typed."""
    return [name for name in names if name.startswith(incomplete)]


def listed(names: Iterable[str], incomplete: str) -> list[str]:
    """The same for the last part of a comma-separated list; a name that the list has is not offered
    again."""
    before, comma, last = incomplete.rpartition(",")
    taken = before.split(",")
    return [f"{before}{comma}{name}" for name in beginning(names, last) if name not in taken]


def offering(target: str, *, ending: str = "", many: bool = False) -> Completer:
    """A completer of the names in `target`, "module:attribute": an iterable, or a function that
    returns one. ending: what follows each name; many: the option takes a list."""

    def complete(incomplete: str) -> list[str]:
        module, _, attribute = target.partition(":")
        names = getattr(import_module(module), attribute)
        whole = [f"{name}{ending}" for name in (names() if callable(names) else names)]
        return listed(whole, incomplete) if many else beginning(whole, incomplete)

    return complete


problems = offering("hetplan.formulations:FAMILIES")
models = offering("hetplan.profiling.zoo:BUILT_IN")
devices = offering("hetplan.profiling.catalogue:catalogue", ending=":", many=True)
precisions = offering("hetplan.profiling.operators:PRECISIONS", many=True)
strategies = offering("hetplan.planner:STRATEGIES", many=True)
frameworks = offering("hetplan.runtime.export:EXPORTERS")


def clusters(incomplete: str) -> list[str]:
    """Clusters that come with hetplan, read off their folder: what reads such files is heavy."""
    folder = Path(__file__).parents[1] / "profiling" / "clusters"
    return beginning(sorted(path.stem for path in folder.glob("*.yaml")), incomplete)


def parameters(incomplete: str) -> list[str]:
    """Parameters of the strategy search's space."""
    from hetplan.formulations.astra.search.space import PARAMETERS

    return beginning((f"{name.replace('_', '-')}=" for name in PARAMETERS), incomplete)


def instance_names() -> list[str]:
    """Names of the packaged instances."""
    return [name for _, name, _, _ in shelved()]


def instances(incomplete: str) -> list[str]:
    """Packaged instances."""
    return beginning(instance_names(), incomplete)


def sets(incomplete: str) -> list[str]:
    """Sets, problems and packaged instances."""
    return beginning([*SETS, *FAMILIES, *instance_names()], incomplete)


def methods(ctx: typer.Context, incomplete: str) -> list[str]:
    """Methods of the named instance's problem; of every problem while that is not known."""
    # An option that still lacks its value keeps the arguments before it from being assigned.
    loose = [word for word in ctx.args if not word.startswith("-")]
    problem = problem_of(ctx.params.get("instance") or next(iter(loose), None))
    known = [problem] if problem in FAMILIES else list(FAMILIES)
    names = dict.fromkeys(method.name for name in known for method in family(name).methods)
    return listed([*names, "all"], incomplete)


def problem_of(instance: object) -> str:
    """The problem of a packaged instance or an instance file; empty where it does not show at a
    glance."""
    if not isinstance(instance, str) or instance == "-":
        return ""
    try:
        if Path(instance).is_file():
            with open(instance, "rb") as stream:
                match = _PROBLEM.search(stream.read(GLANCE_BYTES))
            return match[1].decode() if match else ""
    except (OSError, ValueError):  # not readable: solving it will say why
        return ""
    for problem, name, _, _ in shelved():
        if instance in (name, f"{problem}/{name}"):
            return problem
    return ""
