"""`hetplan.plan`: the planner as one Python function, which takes and returns typed objects."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

from hetplan.errors import require
from hetplan.planner.criteria import Criteria
from hetplan.planner.lengths.drawn import PROGRAMS, plan_lengths
from hetplan.planner.lengths.samples import lengths_for, open_lengths, stated_lengths
from hetplan.planner.planning import Planning
from hetplan.planner.ranking import make_plans
from hetplan.planner.search import OnCandidate
from hetplan.planner.strategy import Settings, make_strategies
from hetplan.planner.workloads import make_workloads, traced
from hetplan.plans.plan import PassSchedule
from hetplan.profiling.frameworks import Framework
from hetplan.profiling.hardware.cluster import Cluster, open_cluster
from hetplan.profiling.models.model import Model
from hetplan.profiling.models.operators import Stack
from hetplan.profiling.profiles.profile import Profile
from hetplan.profiling.workload import Workload
from hetplan.solvers.run import Options, Run

TIME_LIMIT = 600.0  # seconds


class Training(TypedDict, total=False):
    """The arguments of `plan` that say how the model is trained."""

    # The framework that trains the model, and whose memory is counted. Default: hetplan.
    framework: str | Framework
    stack: str | Stack  # the software that computes the operators
    memory_margin: float  # share of each device's memory left to its allocator; default: 0.05


def plan(
    model: Any,
    cluster: str | os.PathLike[str] | Cluster,
    *,
    global_batch: int,
    sequence: int | None = None,
    lengths: str | os.PathLike[str] | Sequence[int] | None = None,
    precision: str | Sequence[str] = "fp16",
    profile: str | os.PathLike[str] | Profile | None = None,
    strategies: str | Sequence[str] | None = None,
    settings: Settings | None = None,
    money_limit: float | None = None,
    seconds_limit: float | None = None,
    zero: Sequence[int] = (),
    schedules: Sequence[PassSchedule] = (),
    cheapest_within: float | None = None,
    parts: bool = False,
    time_limit: float | None = TIME_LIMIT,
    threads: int | None = None,
    on_candidate: OnCandidate | None = None,
    **training: Unpack[Training],
) -> Planning:
    """Plan the training of a model on a cluster, as `hetplan plan` does. Raises InputError.

    model: a built-in name, a config.json, a Model (which has its own sequence and precision), or a
        torch module with a method `batch(step, first, last)` -> (inputs, targets), which is traced.
    cluster: a file, the name of an example, or a Cluster.
    global_batch: samples per iteration.
    sequence: tokens per sample; None: the model's default.
    lengths: a file or a list of the samples' tokens, or a name of published lengths, for samples of
        unequal length, which `sequence` then cuts. The answer is that of the plan, for the mean or
        for a quantile, which takes least on drawn lengths; its notes say what both take. The model
        is a name or a config.json.
    precision: one name, several, or "auto" for all that every device supports.
    profile: a measured profile; None: a predicted one.
    strategies: names, or one text with commas between them; None: all.
    settings: strategy -> name -> value, for the settings that single strategies have.
    money_limit, seconds_limit, schedules, cheapest_within: see the fields of `Criteria` with these
        names.
    zero: see `Criteria.zero_levels`. parts: see `Criteria.on_parts`.
    time_limit: seconds for the whole planning; None: no limit.
    threads: the number of threads of a solver; None: the default of `Options`.
    on_candidate: a function that is called with every candidate as it is found.
    framework, stack, memory_margin: see `Training`.

    Returns the candidates, best first; `planning.best` is the winner, or None if nothing fits. A
    candidate's `predicted_seconds` are replayed, its `bound` is proven for its `objective`, and its
    `plan` is the content of a plan file.
    """
    if lengths is not None:
        require(
            isinstance(model, (str, os.PathLike)) and profile is None,
            "lengths are for a model by its name or file, and predicted profiles",
            got=type(model).__name__ if profile is None else "profile",
        )
    if not isinstance(model, (str, os.PathLike, Model)):
        model = traced(model, precision)
    on_cluster = cluster if isinstance(cluster, Cluster) else open_cluster(cluster)
    options = Options(time_limit=time_limit)
    if threads is not None:
        options = replace(options, threads=threads)
    run = Run(options)
    chosen = make_strategies(strategies, settings)
    criteria = Criteria(
        money_limit=money_limit,
        cheapest_within=cheapest_within,
        on_parts=parts,
        seconds_limit=seconds_limit,
        zero_levels=tuple(zero),
        schedules=tuple(schedules),
    )

    def workloads_at(tokens: int | None) -> tuple[list[Workload], list[str]]:
        """The workloads at a sequence length, one for each precision, and notes."""
        return make_workloads(
            model,
            on_cluster,
            global_batch,
            sequence=tokens,
            precision=precision,
            profile=profile,
            **training,
        )

    def planning_at(tokens: int | None, part: Run) -> Planning:
        """The planning of samples of one length."""
        workloads, notes = workloads_at(tokens)
        return make_plans(
            workloads, chosen, part, criteria=criteria, on_candidate=on_candidate, notes=notes
        )

    if lengths is None:
        return planning_at(sequence, run)
    if strategies is None:
        chosen = [strategy for strategy in chosen if strategy.name != PROGRAMS]
    require(
        all(strategy.name != PROGRAMS for strategy in chosen),
        "its programs are made for samples of one length",
        where="strategies",
        got=PROGRAMS,
        expected="another strategy with lengths",
    )
    if isinstance(lengths, (str, os.PathLike)):
        samples = open_lengths(os.fspath(lengths))
    else:
        samples = stated_lengths(lengths)
    usable = lengths_for(os.fspath(model), samples, sequence)
    answer = plan_lengths(usable, lambda tokens: workloads_at(tokens)[0], planning_at, run)
    planning = answer.planning
    return replace(planning, notes=(*planning.notes, *answer.notes))
