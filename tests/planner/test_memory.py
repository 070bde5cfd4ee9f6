"""Memory as a choice and as a limit: recomputation is chosen where it pays, problems within the
replay's memory are never looser than the replay (and for AMP exactly as tight), and where nothing
fits, what would is said."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest

from fakes.workloads import one_thread, small, with_memory
from hetplan.formulations import family
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.evaluate import peak_bytes
from hetplan.formulations.poplar.pose import pose as pose_poplar
from hetplan.planner.amp import Amp, DataParallel, problems_within_replay
from hetplan.planner.ditto import Ditto
from hetplan.planner.fits import advice
from hetplan.planner.planning import Planning
from hetplan.planner.proposals import propose
from hetplan.planner.ranking import make_plans
from hetplan.planner.search import WITHIN_NOTE, StrategySearch
from hetplan.planner.strategy import Strategy, make_strategies
from hetplan.planner.variants import Variant, useful_modes, with_recomputation
from hetplan.profiling.rates.times import Recomputation
from hetplan.profiling.workload import Workload
from hetplan.replays.pose import costs_of
from hetplan.replays.replay import replay
from hetplan.solvers.registry import evaluate
from present import present
from stopping import cancelled_after

MODES: tuple[Recomputation, ...] = get_args(Recomputation)
AMP = family("amp")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tensor", [1, 2])
def test_models_see_what_the_replay_prices(mode: Recomputation, tensor: int) -> None:
    workload = small()
    seen, priced = with_recomputation(workload, mode), costs_of(workload, mode)
    for kind in workload.cluster.types:
        for size in (1, 2):
            table = present(seen.profile.table(kind, tensor, size))
            forward, backward = priced.layer_seconds(kind, tensor, size)[:2]
            assert np.allclose(table.forward_seconds, forward, rtol=1e-12)
            assert np.allclose(table.backward_seconds, backward, rtol=1e-12)
    for l, layer in enumerate(seen.profile.layers):
        whole = layer.replicated_saved_bytes
        kept = whole + (layer.saved_bytes - whole) / tensor
        assert kept == pytest.approx(priced.saved_bytes((l, l + 1), tensor), rel=1e-12)


def test_less_is_kept_the_more_is_repeated() -> None:
    workload = small()
    every = [with_recomputation(workload, mode).profile.layers for mode in MODES]
    held = [sum(layer.saved_bytes for layer in layers) for layers in every]
    assert held == sorted(held, reverse=True) and len(set(held)) == len(MODES)
    assert useful_modes(workload) == ("selective", "full")
    assert useful_modes(small(model="llama3-8b", attention="fused")) == (
        "full",
    )  # fused attention has no core


def test_recomputation_is_chosen_where_nothing_else_fits() -> None:
    """Data parallelism of gpt2 with one sample: 2.4 GiB of states and 0.8 GiB of activations."""
    workload = with_memory(4.3)
    (plain,) = propose(DataParallel(), workload, one_thread())
    assert plain.fits_memory is False
    best = present(make_plans(workload, [DataParallel()], one_thread()).best)
    plan = present(best.plan)
    assert plan.recomputation in ("selective", "full") and present(best.replay).fits
    assert plan.origin == best.name == f"dp/enumeration+{plan.recomputation}"
    assert best.status == "optimal" and best.bound == best.objective


def test_where_a_plain_plan_fits_it_is_not_tried() -> None:
    planning = make_plans(small(), make_strategies(["dp", "amp"]), one_thread())
    assert all(c.variant.recomputation == "none" for c in planning.candidates)


def test_where_the_model_lacks_memory_of_the_replay_it_is_posed_within_that() -> None:
    """2.3 GiB: with full recomputation the model's best plan lacks the working memory of the layer
    at work."""
    workload = with_memory(2.3)
    search = StrategySearch(Amp(), workload, one_thread())
    plain = search.exact_candidates(search.run)
    known = dataclasses.replace(search, known=tuple(plain))
    candidates = [*plain, *known.recomputing_candidates(search.run)]
    exact = [c for c in candidates if c.method.exact and c.plan is not None]
    assert exact and all(present(c.replay).fits for c in exact)
    (within,) = (c for c in candidates if WITHIN_NOTE in c.message)
    assert within.name == "amp/auto+full" and within.status == "optimal"
    posed = with_recomputation(workload, "full")
    loose = propose(Amp(), posed, one_thread(), Amp.methods[:1])[0].objective
    assert present(loose) < present(within.objective)
    assert within.bound == pytest.approx(within.objective, rel=1e-6)


def decisions(data: AmpData) -> Iterator[AmpDecision]:
    """Every division of four devices into stages, replicas and ranks in their order, with several
    cuts."""
    layers = len(data.layers)
    for tensor, size in sorted({(entry.tensor, entry.micro_batch) for entry in data.layer_seconds}):
        for pipeline in (1, 2, 4):
            ranks = 4 // tensor // pipeline
            if ranks < 1 or data.global_batch % (ranks * size):
                continue
            groups = [list(range(g * tensor, (g + 1) * tensor)) for g in range(4 // tensor)]
            for shift in (-1, 0, 1):
                ends = [0, *(j * layers // pipeline + shift for j in range(1, pipeline)), layers]
                yield AmpDecision(
                    pipeline=pipeline,
                    data=ranks,
                    tensor=tensor,
                    micro_batch=size,
                    placement=[groups[j * ranks : (j + 1) * ranks] for j in range(pipeline)],
                    stages=list(pairwise(ends)),
                )


@pytest.mark.parametrize("mode", MODES)
def test_amps_problems_count_what_the_replay_counts(mode: Recomputation) -> None:
    """Of every decision the bytes beside the working memory are the replay's; a lone stage is
    charged twice for tied weights, which is more."""
    workload = with_memory(16)
    capacity, compared = workload.device_bytes()["T4"], 0
    for problem in problems_within_replay(with_recomputation(workload, mode)):
        beside = capacity - present(problem.data.memory).device_bytes["T4"]
        for decision in decisions(problem.data):
            plan = Variant(mode).marked(problem.to_plan(decision))
            own, held = peak_bytes(problem.data, decision), replay(plan, workload).peak_bytes
            for mine, real in zip(present(own), held, strict=True):
                assert mine + beside >= real * (1 - 1e-9)
                if decision.pipeline > 1 and mode == "none":
                    assert mine == pytest.approx(real, rel=1e-9)
                compared += 1
    assert compared > 50


@pytest.mark.parametrize(
    ("strategy", "mode", "gib"),
    [
        (Amp(), "none", 3.4),
        (Amp(), "full", 2.6),
        (Amp(), "selective", 3.0),
        *((Ditto(), mode, 3.2) for mode in MODES),
    ],
)
def test_the_best_that_the_replay_has_room_for(
    strategy: Strategy, mode: Recomputation, gib: float
) -> None:
    """Its bound is one of every decision of AMP's; Ditto's of its own."""
    workload = with_memory(gib)
    posed = with_recomputation(workload, mode)
    best = present(strategy.within_replay(posed, one_thread(), None))
    bound = present(best.bound)
    assert replay(Variant(mode).marked(present(best.plan)), workload).fits
    assert bound <= present(best.objective) * (1 + 1e-9)
    assert best.status == "optimal" or strategy.name == "ditto"
    for problem in problems_within_replay(posed) if strategy.name == "amp" else ():
        for decision in decisions(problem.data):
            objective = evaluate(AMP, problem.data, decision).objective
            assert objective is None or bound <= objective * (1 + 1e-9)


def test_no_room_at_all_is_a_proof_of_amps_and_a_stop_is_none() -> None:
    none = Amp().within_replay(with_memory(1.51), one_thread(), None)
    assert (none.status, none.plan) == ("infeasible", None)
    assert Ditto().within_replay(with_memory(1.51), one_thread(), None) is None
    stopped = Amp().within_replay(with_memory(16), cancelled_after(0), None)
    assert (stopped.status, stopped.plan) == ("unknown", None)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_poplars_curves_end_where_the_replays_memory_does(mode: Recomputation, stage: int) -> None:
    workload = with_memory(5.0)
    (poplar,) = make_strategies(["poplar"], {"poplar": {"zero": stage}})
    posed = pose_poplar(with_recomputation(workload, mode), stage)
    search = StrategySearch(poplar, workload, one_thread(), Variant(mode))
    (candidate,) = search.exact_candidates(search.run)
    held = present(candidate.replay)
    assert held.fits
    for replica in present(candidate.plan).replicas:
        device = replica.stages[0].devices[0][0]
        expected = posed.device_bytes(device, max(b.samples for b in replica.micro_batches))
        assert held.peak_bytes[device] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_data_parallelism_keeps_to_what_the_replay_holds(mode: Recomputation) -> None:
    workload = with_memory(16)
    (candidate,) = propose(DataParallel(), with_recomputation(workload, mode), one_thread())
    held = replay(Variant(mode).marked(present(candidate.plan)), workload).peak_bytes
    assert candidate.peak_bytes == pytest.approx(held, rel=1e-9)


@cache
def lacking() -> tuple[Workload, Planning]:
    """A workload for which there is too little memory, and what is planned for it."""
    workload = with_memory(2.0, "gpt2-medium")
    return workload, make_plans(workload, make_strategies(["amp", "dp"]), one_thread())


@pytest.mark.parametrize(("share", "enough"), [(1.05, True), (0.95, False)])
def test_what_would_fit_is_enough_and_less_is_not(share: float, enough: bool) -> None:
    """Where nothing fits, the planning ends with the layout that lacks least and what is largest in
    it. It fits with a twentieth more than the memory said, and does not with a twentieth less."""
    workload, planning = lacking()
    first, *others = planning.document()["advice"]
    assert planning.winner is None and others[0].startswith("12 more V100-SXM2-16GB (6 nodes")
    amounts = re.findall(r"(\S+) GiB more on each ([^ :]+)", first)
    gib = {kind: float(size) for size, kind in amounts}
    specs = workload.cluster.specs
    more = {
        kind: specs[kind].model_copy(update={"memory_gib": 2.0 + share * gib[kind]})
        for kind in specs
    }
    roomier = replace(workload, cluster=replace(workload.cluster, specs=more))
    layout, largest = first.split(": ", 1)[1].split(" (largest: ")
    assert largest.startswith("optimizer ")
    assert (advice(roomier)[0].removeprefix("as ") == layout) is enough


def test_a_layout_that_no_strategy_proposes_is_advised() -> None:
    assert make_plans(small(), make_strategies(["dp"]), one_thread()).advice == ()
    (line,) = advice(with_memory(16))
    assert line == "as tensor 1, pipeline 1, data 4, no recomputation, micro-batch 2"
