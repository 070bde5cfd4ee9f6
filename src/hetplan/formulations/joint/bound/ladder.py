"""The ladder of bounds: what each kind of inequality proves, from weak claims to strong ones.

R, b   replicas of the fastest known plan with equal replicas, and samples of its micro-batches
n[q]   devices of type q
(1) alone: the devices of all types have to do the work of all samples. The work of a layer is the
    least device-seconds per sample, in micro-batches of any size (alone.py).
(2) micro-batches: (1) for plans with R equal replicas and micro-batches of b samples. The work of a
    layer is then the least over at most b samples, and only floor(n[q] / R) R devices of a type
    are in use.
(3) passes: the inequalities of single stages (equal.py) for R and b. They count the filling and
    draining of pipelines, but neither messages nor joins.
(4) links: (3) with messages and joins, and the programme over nodes (nodes.py).
(5) equal: (4) for every R and b.
(6) all: the bound of all plans (driver.py).

Plans of (2) to (4) are plans of (5), and these are plans of (6). So a bound of a larger class holds
for a smaller one, too.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hetplan.formulations.joint.bound.alone import computing_alone
from hetplan.formulations.joint.bound.driver import Bisection
from hetplan.formulations.joint.bound.equal import Shape, equal_bound, equal_parts
from hetplan.formulations.joint.bound.nodes import NodeModel
from hetplan.formulations.joint.bound.replicas import STANDARD, Parameters
from hetplan.formulations.joint.bound.tables import Relaxation
from hetplan.plans.alike import largest_micro_batch
from hetplan.plans.ladder import Rung, RungName
from hetplan.plans.plan import Plan
from hetplan.solvers.run import Run


class KnownPlan(NamedTuple):
    """The fastest plan of a class that is known, with its replayed seconds."""

    plan: Plan
    seconds: float


def equal_rungs(
    of: Relaxation, known: KnownPlan | None, run: Run, tries: Parameters = STANDARD
) -> list[Rung]:
    """(2) to (5), in this order. (2) to (4) are missing where no plan with equal replicas is known,
    (5) where the instance has none. The bounds are raised until the run should stop, and to the
    known plan's seconds at most."""
    rungs, best = [], None
    if known is not None:
        best = known.seconds
        shape = Shape(len(known.plan.replicas), largest_micro_batch(known.plan))
        rungs = shape_rungs(of, shape, best, run, tries)
    bound = equal_bound(of, run, math.inf if best is None else best, tries)
    if bound is not None:
        rungs.append(Rung(rung="equal", bound=bound, best=best))
    return rungs


def shape_rungs(
    of: Relaxation, shape: Shape, best: float, run: Run, tries: Parameters
) -> list[Rung]:
    """(2) to (4), each at least the one before. best: seconds of a plan of the shape."""
    alone = shape_alone(of, shape, run)
    passes = shape_bound(of.without_links(), shape, alone, best, run, tries)
    links = max(passes, shape_bound(of, shape, passes, best, run, tries))
    bounds: dict[RungName, float] = {
        "micro-batches": min(alone, best) * (1 - tries.rounding),
        "passes": passes,
        "links": links,
    }
    return [
        Rung(rung=rung, bound=bound, best=best, **shape._asdict()) for rung, bound in bounds.items()
    ]


def shape_alone(of: Relaxation, shape: Shape, run: Run) -> float:
    """(2), in seconds."""
    counts = [count // shape.replicas * shape.replicas for count in of.counts]
    types = [q for q, count in enumerate(counts) if count]
    work = np.array([of.least_work(q, shape.micro_batch) for q in types])
    in_use = [counts[q] for q in types]
    return computing_alone(of.data.global_batch * work, in_use, run.options)


def shape_bound(
    of: Relaxation, shape: Shape, floor: float, best: float, run: Run, tries: Parameters
) -> float:
    """(3) or (4): seconds that no plan of the shape replays below. floor: such seconds that are
    known already. best: seconds of a plan of the shape."""
    one_chunk_and_several = (False, True)  # cases: whether stages have several chunks
    parts = equal_parts(of, run, floor, tries, one_chunk_and_several, shape)
    bisection = Bisection(list(parts), best, run, tries)
    return bisection.bound_after_raising(NodeModel(of, floor, run))


def ladder(
    alone: float,
    of_classes: Sequence[Rung],
    every: float,
    best: float | None,
    best_equal: float | None,
) -> list[Rung]:
    """(1) to (6). The bounds (4) and (5), the best ones of their classes, are raised to that of a
    larger class. (2) and (3) are not, so that they show what fewer inequalities prove.

    alone: (1). of_classes: (2) to (5). every: (6). best: seconds of the fastest known plan.
    best_equal: the same of plans with equal replicas.
    """
    classes, larger = [], every
    for rung in reversed(of_classes):
        if rung.rung == "equal":
            rung = rung.model_copy(update={"best": best_equal})
        if rung.rung in ("equal", "links"):
            larger = max(larger, rung.bound)
            rung = rung.model_copy(update={"bound": larger})
        classes.append(rung)
    first = Rung(rung="alone", bound=alone, best=best)
    last = Rung(rung="all", bound=every, best=best)
    return [first, *reversed(classes), last]
