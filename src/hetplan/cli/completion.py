"""What the shell offers for an argument or an option.

A shell asks at every press of a key, so nothing heavy is read. Completers take what is typed so far
(and the context, where what stands before matters) and return whole words. Where none begins so,
the shell falls back on file names.
"""

from collections.abc import Callable, Iterable, Mapping

import typer

from hetplan.formulations import FAMILIES, family
from hetplan.instances.library import SETS, find, library
from hetplan.solvers.registry import load

# What is offered -> where its names stand ("module:attribute", an iterable or a function that
# returns one), what follows each name, and whether the option takes a list of them.
OFFERED: Mapping[str, tuple[str, str, bool]] = {
    "problems": ("hetplan.formulations:FAMILIES", "", False),
    "papers": ("hetplan.studies.papers:PAPERS", "", False),
    "models": ("hetplan.profiling.zoo:BUILT_IN", "", False),
    "devices": ("hetplan.profiling.cluster:catalogue", ":", True),
    "precisions": ("hetplan.profiling.operators:PRECISIONS", "", True),
    "strategies": ("hetplan.planner:STRATEGIES", "", True),
    "frameworks": ("hetplan.runtime.export:EXPORTERS", "", False),
    "trainers": ("hetplan.profiling.frameworks:FRAMEWORKS", "", False),
    "stacks": ("hetplan.profiling.operators:STACKS", "", False),
    "clusters": ("hetplan.profiling.cluster:example_clusters", "", False),
    "parameters": ("hetplan.formulations.astra.search.space:PARAMETERS", "=", False),
    "instances": ("hetplan.cli.completion:instance_names", "", False),
    "sets": ("hetplan.cli.completion:set_names", "", False),
}


def beginning(names: Iterable[str], incomplete: str, *, many: bool) -> list[str]:
    """The names that begin as typed; of a comma-separated list its last part, without the names
    that the list has already."""
    before, comma, last = incomplete.rpartition(",") if many else ("", "", incomplete)
    taken = before.split(",")
    return [f"{before}{comma}{n}" for n in names if n.startswith(last) and n not in taken]


def offer(what: str) -> Callable[[str], list[str]]:
    """A completer of the names that OFFERED lists under `what`."""

    def complete(incomplete: str) -> list[str]:
        target, ending, many = OFFERED[what]
        names = load(target)
        whole = (f"{name}{ending}" for name in (names() if callable(names) else names))
        return beginning(whole, incomplete, many=many)

    return complete


def instance_names() -> list[str]:
    """Names of the packaged instances."""
    return [entry.name for entry in library()]


def set_names() -> list[str]:
    """Sets, problems and packaged instances."""
    return [*SETS, *FAMILIES, *instance_names()]


def methods(ctx: typer.Context, incomplete: str) -> list[str]:
    """Methods of the named packaged instance's problem; of every problem for other instances."""
    # An option that still lacks its value keeps the arguments before it from being assigned.
    loose = [word for word in ctx.args if not word.startswith("-")]
    entry = find(str(next(iter([*(ctx.params.get("instances") or ()), *loose]), "")))
    known = list(FAMILIES) if entry is None else [entry.problem]
    names = dict.fromkeys(method.name for name in known for method in family(name).methods)
    return beginning([*names, "all"], incomplete, many=True)
