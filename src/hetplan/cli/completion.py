"""What the shell offers for an argument or an option; asked at every press of a key, so nothing
heavy is read.

Completers take what is typed so far (and the context, where what stands before matters) and return
whole words.
Where none begins so, the shell falls back on file names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import typer

# Of an instance file only this much is read to learn its problem, which stands near the beginning.
GLANCE_BYTES = 4096
_PROBLEM = re.compile(rb'"problem"\s*:\s*"([a-z]+)"')


def beginning(names: Iterable[str], incomplete: str) -> list[str]:
    """The names that begin as typed."""
    return [name for name in names if name.startswith(incomplete)]


def listed(names: Iterable[str], incomplete: str) -> list[str]:
    """The same for the last part of a comma-separated list; a name that the list has is not offered
    again."""
    before, comma, last = incomplete.rpartition(",")
    taken = before.split(",")
    return [f"{before}{comma}{name}" for name in beginning(names, last) if name not in taken]


def instance_names() -> list[str]:
    """Names of the packaged instances."""
    from hetplan.instances.shelf import shelved

    return [name for _, name, _, _ in shelved()]


def instances(incomplete: str) -> list[str]:
    """Packaged instances."""
    return beginning(instance_names(), incomplete)


def sets(incomplete: str) -> list[str]:
    """Sets, problems and packaged instances."""
    from hetplan.formulations import FAMILIES
    from hetplan.instances.sets import SETS

    return beginning([*SETS, *FAMILIES, *instance_names()], incomplete)


def problems(incomplete: str) -> list[str]:
    """The families."""
    from hetplan.formulations import FAMILIES

    return beginning(FAMILIES, incomplete)


def methods(ctx: typer.Context, incomplete: str) -> list[str]:
    """Methods of the named instance's problem; of every problem while that is not known."""
    from hetplan.formulations import FAMILIES, family

    # An option that still lacks its value keeps the arguments before it from being assigned.
    loose = [word for word in ctx.args if not word.startswith("-")]
    problem = problem_of(ctx.params.get("instance") or next(iter(loose), None))
    found = [family(problem)] if problem in FAMILIES else [family(name) for name in FAMILIES]
    names = dict.fromkeys(method.name for one in found for method in one.methods)
    return listed([*names, "all"], incomplete)


def problem_of(instance: object) -> str:
    """The problem of a packaged instance or an instance file; empty where it does not show at a
    glance."""
    from hetplan.instances.shelf import shelved

    if not isinstance(instance, str) or instance == "-":
        return ""
    try:
        if Path(instance).is_file():
            with open(instance, "rb") as stream:
                found = _PROBLEM.search(stream.read(GLANCE_BYTES))
            return found[1].decode() if found else ""
    except (OSError, ValueError):  # not readable: solving it will say why
        return ""
    for problem, name, _, _ in shelved():
        if instance in (name, f"{problem}/{name}"):
            return problem
    return ""


def models(incomplete: str) -> list[str]:
    """Built-in models."""
    from hetplan.profiling.zoo import BUILT_IN

    return beginning(BUILT_IN, incomplete)


def clusters(incomplete: str) -> list[str]:
    """Clusters that come with hetplan."""
    from hetplan.profiling.cluster import example_clusters

    return beginning(example_clusters(), incomplete)


def devices(incomplete: str) -> list[str]:
    """Catalogued devices, up to the colon before their number, in a list such as `A800:8,H100:`."""
    from hetplan.profiling.catalogue import catalogue

    return listed((f"{name}:" for name in catalogue()), incomplete)


def precisions(incomplete: str) -> list[str]:
    """Training precisions."""
    from hetplan.profiling.precision import PRECISIONS

    return beginning(PRECISIONS, incomplete)


def plan_precisions(incomplete: str) -> list[str]:
    """Training precisions, several with commas between them, or all that fit."""
    from hetplan.planner.library import AUTO
    from hetplan.profiling.precision import PRECISIONS

    return listed((*PRECISIONS, AUTO), incomplete)


def strategies(incomplete: str) -> list[str]:
    """The planner's strategies."""
    from hetplan.planner.strategy import STRATEGIES

    return listed(STRATEGIES, incomplete)


def modes(incomplete: str) -> list[str]:
    """Modes of the strategy search."""
    from hetplan.cli.pools import MODES

    return beginning(MODES, incomplete)


def parameters(incomplete: str) -> list[str]:
    """Parameters of the search space."""
    from hetplan.cli.pools import PARAMETERS

    return beginning((f"{name.replace('_', '-')}=" for name in PARAMETERS), incomplete)


def frameworks(incomplete: str) -> list[str]:
    """What plans can be exported to."""
    from hetplan.runtime.export import EXPORTERS

    return beginning(EXPORTERS, incomplete)
