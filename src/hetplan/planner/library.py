"""`hetplan.plan`: the planner as one function, with typed objects in and out; and precision as a
choice.

What a precision changes are times and bytes of every layer, so that each makes a workload of its
own; their plans are ranked together. Whether training converges in a precision is the user's to
say: only what is named is tried.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hetplan.errors import InputError, unknown_name
from hetplan.planner.ranking import Criteria, Planning, make_plans
from hetplan.planner.search import OnCandidate
from hetplan.planner.strategy import Settings, make_strategies
from hetplan.profiling.cluster import Cluster, open_cluster
from hetplan.profiling.frameworks import HETPLAN, Framework
from hetplan.profiling.models import Model
from hetplan.profiling.operators import DEFAULT_STACK, PRECISIONS, Precision, Stack
from hetplan.profiling.profile import Profile
from hetplan.profiling.workload import Workload, make_workload
from hetplan.solvers.run import Options, Run

TIME_LIMIT = 60.0
AUTO = "auto"
# What `auto` stands for; of equals the first wins, and bf16 needs no loss scaling.
PREFERRED: tuple[Precision, ...] = ("bf16", "fp16", "fp32")


def plan(
    model: Any,
    cluster: str | os.PathLike[str] | Cluster,
    *,
    global_batch: int,
    sequence: int | None = None,
    precision: str | Sequence[str] = "fp16",
    profile: str | os.PathLike[str] | Profile | None = None,
    strategies: Sequence[str] | None = None,
    settings: Settings | None = None,
    money_limit: float | None = None,
    cheapest_within: float | None = None,
    parts: bool = False,
    framework: str | Framework = HETPLAN,
    stack: str | Stack = DEFAULT_STACK,
    time_limit: float | None = TIME_LIMIT,
    threads: int | None = None,
    on_candidate: OnCandidate | None = None,
) -> Planning:
    """Plan the training of a model on a cluster, as `hetplan plan` does.

    model: a built-in name, a config.json, a Model (which brings its own sequence and precision), or
    a torch module with a method `batch(step, first, last)` -> (inputs, targets), which is traced.
    cluster: a file, the name of an example, or a Cluster. global_batch: samples per iteration.
    precision: one, several, or "auto" for all that every device has. profile: measured; None:
    predicted. settings: strategy -> name -> value, what a strategy has to set of its own.
    framework: what trains, whose memory counts. stack: the software that computes. time_limit:
    seconds for all of it. money_limit, cheapest_within, parts: see `Criteria`.
    on_candidate: called with every candidate as it is found.
    Returns the candidates, best first: `planning.best` is the winner or None; a candidate's
    `predicted_seconds` are replayed, `bound` is proven for its `objective`, `plan` is what a plan
    file holds. Raises InputError.
    """
    if not isinstance(model, (str, os.PathLike, Model)):
        model = traced(model, precision)
    workloads, notes = make_workloads(
        model,
        cluster if isinstance(cluster, Cluster) else open_cluster(cluster),
        global_batch,
        sequence=sequence,
        precision=precision,
        profile=profile,
        framework=framework,
        stack=stack,
    )
    options = Options(time_limit=time_limit)
    options = options if threads is None else replace(options, threads=threads)
    return make_plans(
        workloads,
        make_strategies(strategies, settings),
        Run(options),
        criteria=Criteria(money_limit, cheapest_within, parts),
        on_candidate=on_candidate,
        notes=notes,
    )


def traced(module: Any, precision: str | Sequence[str]) -> Model:
    """A torch module as a model to plan, under its class's name; needs torch."""
    from hetplan.runtime.tracing.layers import trace
    from hetplan.runtime.tracing.program import plannable

    name = type(module).__name__
    return plannable(module, trace(module, name=name, precision=only(precision)))


def only(names: str | Sequence[str]) -> Precision:
    """The one precision of a module, which is traced in it; raises InputError."""
    first, *others = precisions_of(names)
    if others:
        got = ", ".join((first, *others))
        raise InputError("a module is planned in one precision", got=got, expected="one of them")
    return first


def precisions_of(names: str | Sequence[str]) -> tuple[Precision, ...]:
    """`auto`, one precision, several separated by commas, or a sequence of them; raises
    InputError."""
    if names == AUTO:
        return PREFERRED
    texts = [text.strip() for text in (names.split(",") if isinstance(names, str) else names)]
    known: dict[str, Precision] = {name: name for name in PRECISIONS}
    for text in texts:
        if text not in known:
            raise unknown_name("unknown precision", text, (*PRECISIONS, AUTO))
    if not texts:
        raise InputError(
            "no precision named", expected=f"some of {', '.join(PRECISIONS)}, or {AUTO}"
        )
    return tuple(known[text] for text in dict.fromkeys(texts))


def make_workloads(
    model: str | os.PathLike[str] | Model,
    cluster: Cluster,
    global_batch: int,
    *,
    sequence: int | None = None,
    precision: str | Sequence[str] = "fp16",
    profile: str | os.PathLike[str] | Profile | None = None,
    framework: str | Framework = HETPLAN,
    stack: str | Stack = DEFAULT_STACK,
) -> tuple[list[Workload], list[str]]:
    """One workload per precision worth planning, the preferred first; why others are left out.

    With one precision, or with a Model, which brings its own, it is `make_workload`. Of several,
    those that a device has no peak for are left out, as is one whose times and bytes are those of
    another on every device. Raises InputError where none is left, or for a profile, which is of one
    precision.
    """
    precisions = precisions_of(precision)
    if isinstance(model, Model) or len(precisions) == 1:
        only = make_workload(
            model,
            cluster,
            global_batch,
            sequence=sequence,
            precision=precisions[0],
            profile=profile,
            framework=framework,
            stack=stack,
        )
        return [only], []
    if profile is not None:
        raise InputError(
            "a profile is of one precision",
            where=profile.model if isinstance(profile, Profile) else os.fspath(profile),
            got=", ".join(precisions),
            expected="one --precision",
        )
    workloads: list[Workload] = []
    notes: list[str] = []
    for name in precisions:
        kinds = [k for k in cluster.types if name not in cluster.specs[k].peak_tflops]
        if kinds:
            notes.append(f"{name} is left out: no units for it in {', '.join(kinds)}")
            continue
        made = make_workload(
            model,
            cluster,
            global_batch,
            sequence=sequence,
            precision=name,
            framework=framework,
            stack=stack,
        )
        twin = next((other for other in workloads if same_problem(made, other)), None)
        if twin is None:
            workloads.append(made)
        else:
            same = f"times and bytes are those of {twin.precision}"
            notes.append(f"{name} is not planned apart: {same}")
    if not workloads:
        raise InputError(
            "no precision that every device has",
            where=f"cluster {cluster.name}",
            got=", ".join(precisions),
            expected="; ".join(notes),
        )
    return workloads, notes


def same_problem(one: Workload, other: Workload) -> bool:
    """Whether two workloads of one model and cluster are the same problem under two names: equal
    profiles and equal bytes of states make equal plans."""
    return (
        one.state_bytes_per_param_byte == other.state_bytes_per_param_byte
        and one.profile.layers == other.profile.layers
        and one.profile.tables == other.profile.tables
    )
