"""What the shell offers for an argument or an option.

A shell asks at every press of a key, so nothing heavy is read. Completers take what is typed so far
(and the context, where what stands before matters) and return whole words. Where none begins so,
the shell falls back on file names.
"""

from collections.abc import Callable, Iterable
from importlib import import_module

import typer

from hetplan.formulations import FAMILIES, family
from hetplan.instances.library import SETS, find, library

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
devices = offering("hetplan.profiling.cluster:catalogue", ending=":", many=True)
precisions = offering("hetplan.profiling.operators:PRECISIONS", many=True)
strategies = offering("hetplan.planner:STRATEGIES", many=True)
frameworks = offering("hetplan.runtime.export:EXPORTERS")
trainers = offering("hetplan.profiling.frameworks:FRAMEWORKS")
stacks = offering("hetplan.profiling.operators:STACKS")
clusters = offering("hetplan.profiling.cluster:example_clusters")
parameters = offering("hetplan.formulations.astra.search.space:PARAMETERS", ending="=")


def instance_names() -> list[str]:
    """Names of the packaged instances."""
    return [entry.name for entry in library()]


def instances(incomplete: str) -> list[str]:
    """Packaged instances."""
    return beginning(instance_names(), incomplete)


def sets(incomplete: str) -> list[str]:
    """Sets, problems and packaged instances."""
    return beginning([*SETS, *FAMILIES, *instance_names()], incomplete)


def methods(ctx: typer.Context, incomplete: str) -> list[str]:
    """Methods of the named packaged instance's problem; of every problem for other instances."""
    # An option that still lacks its value keeps the arguments before it from being assigned.
    loose = [word for word in ctx.args if not word.startswith("-")]
    entry = find(str(next(iter([*(ctx.params.get("instances") or ()), *loose]), "")))
    known = list(FAMILIES) if entry is None else [entry.problem]
    names = dict.fromkeys(method.name for name in known for method in family(name).methods)
    return listed([*names, "all"], incomplete)
