"""`hetplan.plan`: the planner as one function, with typed objects in and out."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

from hetplan.planner.criteria import Criteria
from hetplan.planner.planning import Planning
from hetplan.planner.ranking import make_plans
from hetplan.planner.search import OnCandidate
from hetplan.planner.strategy import Settings, make_strategies
from hetplan.planner.workloads import make_workloads, traced
from hetplan.profiling.frameworks import Framework
from hetplan.profiling.hardware.cluster import Cluster, open_cluster
from hetplan.profiling.models.model import Model
from hetplan.profiling.models.operators import Stack
from hetplan.profiling.profiles.profile import Profile
from hetplan.solvers.run import Options, Run

TIME_LIMIT = 60.0


class Training(TypedDict, total=False):
    """framework: what trains, whose memory counts (hetplan itself). stack: the software that
    computes. memory_margin: share of each device's memory that stays free for its allocator (0.05).
    """

    framework: str | Framework
    stack: str | Stack
    memory_margin: float


def plan(
    model: Any,
    cluster: str | os.PathLike[str] | Cluster,
    *,
    global_batch: int,
    sequence: int | None = None,
    precision: str | Sequence[str] = "fp16",
    profile: str | os.PathLike[str] | Profile | None = None,
    strategies: str | Sequence[str] | None = None,
    settings: Settings | None = None,
    money_limit: float | None = None,
    cheapest_within: float | None = None,
    parts: bool = False,
    time_limit: float | None = TIME_LIMIT,
    threads: int | None = None,
    on_candidate: OnCandidate | None = None,
    **training: Unpack[Training],
) -> Planning:
    """Plan the training of a model on a cluster, as `hetplan plan` does.

    model: a built-in name, a config.json, a Model (which brings its own sequence and precision), or
    a torch module with a method `batch(step, first, last)` -> (inputs, targets), which is traced.
    cluster: a file, the name of an example, or a Cluster. global_batch: samples per iteration.
    precision: one, several, or "auto" for all that every device has. profile: measured; None:
    predicted. strategies: names, or one text with commas between them; None: all.
    settings: strategy -> name -> value, what a strategy has to set of its own.
    time_limit: seconds for all of it. money_limit, cheapest_within, parts: see `Criteria`.
    on_candidate: called with every candidate as it is found. framework, stack, memory_margin:
    see `Training`.
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
        **training,
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
