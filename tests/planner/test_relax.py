"""When nothing fits: what would, and that less would not."""

from __future__ import annotations

import pytest

from fakes.workloads import small
from hetplan.formulations import family
from hetplan.formulations.amp.pose import pose
from hetplan.planner.ranking import make_plans
from hetplan.planner.recomputation import recomputed
from hetplan.planner.relax import Relaxation, relaxations, with_memory
from hetplan.planner.strategies import STRATEGIES
from hetplan.profiling.models import load_model
from hetplan.profiling.predict import predict
from hetplan.profiling.workload import Workload, make_workload
from hetplan.solvers.options import Options
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run


def tiny(gib: float = 2.0, model: str = "gpt2-medium") -> Workload:
    """A model on devices that cannot hold it."""
    return small(
        model=model, devices={name: {"memory_gib": gib} for name in ("T4", "V100-SXM2-16GB")}
    )


NAMES = ("amp", "astra", "poplar")


def a_run() -> Run:
    """One thread."""
    return Run(Options(time_limit=30, threads=1))


@pytest.fixture(scope="module")
def found() -> list[Relaxation]:
    """Of gpt2-medium on four devices of 2 GiB."""
    return relaxations(tiny(), a_run(), [STRATEGIES[name] for name in NAMES])


@pytest.mark.parametrize("which", [0, -1])
def test_it_is_enough_and_less_is_not(which: int, found: list[Relaxation]) -> None:
    """A plan of the whole planner fits as replayed, and none with a twentieth less."""
    (extra,) = set(found[which].extra_bytes.values())
    for share, expected in ((1.0, True), (0.95, False)):
        bigger = with_memory(tiny(), tuple(found[which].extra_bytes), share * extra)
        planning = make_plans(bigger, NAMES, a_run())
        assert (planning.winner is not None) is expected


def test_the_smallest_comes_first(found: list[Relaxation]) -> None:
    counts = tiny().cluster.counts()
    totals = [sum(counts[name] * extra for name, extra in r.extra_bytes.items()) for r in found]
    assert totals == sorted(totals)
    assert any(len(r.extra_bytes) == 2 for r in found)


def test_it_is_told_where_nothing_fits() -> None:
    planning = make_plans(tiny(), ["amp", "dp"], a_run())
    assert planning.winner is None and planning.relaxations
    (told,) = (r for r in planning.document()["relaxations"][:1])
    assert told["extra_bytes"] and "more on each of 2" in told["what"]
    alone = make_plans(tiny(), ["dp"], a_run()).relaxations
    assert alone and all("more on each of 2" in r.what and "by dp/" in r.what for r in alone)


def test_it_is_not_asked_where_something_fits() -> None:
    assert make_plans(small(), ["amp"], a_run()).relaxations == ()


def test_smaller_micro_batches_are_told() -> None:
    """A profile of micro-batches of 8 only, on devices that hold one sample but not eight."""
    kinds = ("T4", "V100-SXM2-16GB")
    for gib in (2.2, 2.4, 2.6, 2.8, 3.0):
        on = small(devices={name: {"memory_gib": gib} for name in kinds}).cluster
        profile = predict(load_model("gpt2"), on, micro_batches=[8], date="2026-01-01")
        workload = make_workload("gpt2", on, 8, profile=profile)
        best = solve(family("amp"), pose(recomputed(workload, "full")), "auto", a_run())
        told = relaxations(workload, a_run())
        if best.decision is None and told and "micro-batches of one sample" in told[0].what:
            return
    pytest.fail("no size of memory showed the case")
