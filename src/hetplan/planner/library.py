"""`hetplan.plan`: the planner as one function, with typed objects in and out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hetplan.planner.candidates import Tell
from hetplan.planner.precisions import make_workloads
from hetplan.planner.ranking import Planning, make_plans
from hetplan.planner.settings import Settings
from hetplan.profiling.cluster import Cluster, example_cluster, load_cluster
from hetplan.profiling.models import Model
from hetplan.profiling.profile import Profile
from hetplan.solvers.options import Options
from hetplan.solvers.run import Run

TIME_LIMIT = 60.0


def plan(
    model: str | os.PathLike[str] | Model,
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
    time_limit: float | None = TIME_LIMIT,
    threads: int | None = None,
    found_one: Tell | None = None,
) -> Planning:
    """Plan the training of a model on a cluster, as `hetplan plan` does.

    model: a built-in name, a config.json, or a Model (which brings its own sequence and precision).
    cluster: a file, the name of an example, or a Cluster. global_batch: samples per iteration.
    precision: one, several, or "auto" for all that every device has (`planner.precisions`).
    profile: measured; None: predicted. time_limit: seconds for each method. money_limit,
    cheapest_within, parts (which both imply), settings, found_one: see `make_plans`.
    Returns the candidates, best first: `planning.best` is the winner or None; a candidate's
    `predicted_seconds` are replayed, `bound` is proven for its `objective`, `plan` is what a plan
    file holds. Raises InputError.
    """
    choice = make_workloads(
        model,
        opened(cluster),
        global_batch,
        sequence=sequence,
        precision=precision,
        profile=profile,
    )
    options = (
        Options(time_limit=time_limit)
        if threads is None
        else Options(time_limit=time_limit, threads=threads)
    )
    return make_plans(
        choice.workloads,
        strategies,
        Run(options),
        money_limit=money_limit,
        settings=settings,
        found_one=found_one,
        parts=parts or money_limit is not None or cheapest_within is not None,
        cheapest_within=cheapest_within,
        notes=choice.notes,
    )


def opened(cluster: str | os.PathLike[str] | Cluster) -> Cluster:
    """A cluster file, or an example by name; raises InputError."""
    if isinstance(cluster, Cluster):
        return cluster
    text = os.fspath(cluster)
    if (
        isinstance(cluster, str)
        and not os.path.exists(text)
        and not Path(text).suffix
        and os.sep not in text
    ):
        return example_cluster(text)
    return load_cluster(cluster)
