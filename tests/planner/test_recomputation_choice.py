"""Recomputation as a choice: the workload that models see is the one that the replay prices, and it
is chosen where memory makes it pay."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from fakes.workloads import small
from hetplan.planner.candidates import WITHIN, Search
from hetplan.planner.ranking import make_plans
from hetplan.planner.recomputation import recomputed, useful_modes
from hetplan.planner.strategies import STRATEGIES
from hetplan.profiling.recomputation import Recomputation
from hetplan.profiling.workload import Workload
from hetplan.runtime.costs import Costs
from hetplan.solvers.options import Options
from hetplan.solvers.run import Run


def a_run() -> Run:
    """One thread."""
    return Run(Options(time_limit=30, threads=1))


def with_memory(gib: float, model: str = "gpt2") -> Workload:
    """A small model on devices of that much memory."""
    kinds = ("V100-SXM2-16GB", "T4")
    return small(model=model, devices={name: {"memory_gib": gib} for name in kinds})


@pytest.mark.parametrize("mode", get_args(Recomputation))
@pytest.mark.parametrize("tensor", [1, 2])
def test_models_see_what_the_replay_prices(mode: Recomputation, tensor: int) -> None:
    workload = small()
    seen, priced = recomputed(workload, mode), Costs(workload, mode)
    for kind in workload.cluster.types:
        for size in (1, 2):
            table = seen.profile.table(kind, tensor, size)
            assert table is not None
            forward, backward = priced.layer_seconds(kind, tensor, size)
            assert np.allclose(table.forward_seconds, forward, rtol=1e-12)
            assert np.allclose(table.backward_seconds, backward, rtol=1e-12)
    for l, layer in enumerate(seen.profile.layers):
        whole = layer.replicated_saved_bytes
        kept = whole + (layer.saved_bytes - whole) / tensor
        assert kept == pytest.approx(priced.saved_bytes((l, l + 1), tensor), rel=1e-12)


def test_less_is_kept_the_more_is_repeated() -> None:
    workload = small()
    assert useful_modes(workload) == ("selective", "full")
    held = [
        sum(layer.saved_bytes for layer in recomputed(workload, mode).profile.layers)
        for mode in get_args(Recomputation)
    ]
    assert held == sorted(held, reverse=True) and len(set(held)) == 3


def test_fused_attention_has_no_core_to_repeat() -> None:
    assert useful_modes(small(model="llama3-8b")) == ("full",)


def test_it_is_chosen_where_nothing_else_fits() -> None:
    """Data parallelism of gpt2 with one sample: 2.4 GiB of states and 0.8 GiB of activations."""
    workload = with_memory(4.3)
    (plain,) = STRATEGIES["dp"].propose(workload, a_run())
    assert plain.fits_memory is False
    planning = make_plans(workload, ["dp"], a_run())
    best = planning.best
    assert best is not None and best.plan is not None
    assert best.plan.recomputation in ("selective", "full")
    assert best.method == f"enumeration+{best.plan.recomputation}"
    assert best.replayed is not None and best.replayed.fits
    assert best.status == "optimal" and best.bound == best.objective


def test_where_memory_is_free_it_is_not_tried() -> None:
    planning = make_plans(small(), ["dp", "amp"], a_run())
    assert planning.notes == (
        "dp, amp: recomputation not tried: without memory limits nothing is faster",
    )
    assert all(c.plan is None or c.plan.recomputation == "none" for c in planning.candidates)


def test_where_it_gains_nothing_that_is_told() -> None:
    search = Search(STRATEGIES["amp"], with_memory(5.0), a_run())
    found, notes = search.candidates()
    plain = min(
        c.predicted_seconds or 9.9 for c in found if c.plan and c.plan.recomputation == "none"
    )
    chosen = [c for c in found if c.plan is not None and c.plan.recomputation != "none"]
    assert all((c.predicted_seconds or 9.9) < plain for c in chosen)
    assert len(notes) + len({c.plan.recomputation for c in chosen if c.plan}) >= 1


def test_where_the_model_lacks_memory_of_the_replay_it_is_posed_within_that() -> None:
    """2.6 GiB: with full recomputation the model's best plan lacks the working memory of the layer
    at work."""
    workload = with_memory(2.6)
    found, _ = Search(STRATEGIES["amp"], workload, a_run()).candidates()
    (within,) = (c for c in found if WITHIN in c.message)
    assert within.method == "auto+full" and within.status == "optimal"
    assert within.replayed is not None and within.replayed.fits
    (loose,) = STRATEGIES["amp"].propose(recomputed(workload, "full"), a_run(), methods=("auto",))
    assert loose.objective is not None and within.objective is not None
    assert loose.objective < within.objective and within.bound == pytest.approx(
        within.objective, rel=1e-6
    )
    for candidate in found:
        if candidate.method.startswith("auto"):
            assert candidate.replayed is not None and candidate.replayed.fits


def test_strategies_without_such_a_problem_are_given_less() -> None:
    """The same by rounds of less memory: nothing better, and a bound that is further away."""
    strategy = replace(STRATEGIES["amp"], within_replay=None)
    found, _ = Search(strategy, with_memory(2.6), a_run()).candidates()
    (tightened,) = (c for c in found if "tightened by" in c.message)
    assert tightened.method == "auto+full" and tightened.status == "feasible"
    assert tightened.replayed is not None and tightened.replayed.fits
    assert tightened.bound is not None and tightened.objective is not None
    assert tightened.bound < tightened.objective
