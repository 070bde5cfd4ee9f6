"""AMP's own procedure, Algorithm 1: enumerate degrees and micro-batches, one placement and one cut
for each.

For each (pp, dp, tp, mbs): devices in Megatron's order (§3.6), the cut of §3.5, and the cost model
of §3.4 on averages, as the authors' code computes it:
(1) t[l]    = mean over all devices of seconds[type][tp][mbs][l] + mean over tensor groups of the
all-reduce
(2) e[j, l] = activation_bytes[l] mbs x mean over pipelines of 1 / (slowest link behind stage j)
(3) estimate = (gas-1) max_j t_j + sum_j t_j + sum_j e_j + max_d S_d
The average hides which stage runs on which type of device, and pipelines that differ; the programme
does not see S. So the strategy returned need not be the best of those listed; its objective is
always the exact T.
AMP ignores memory. Here the strategy of least estimate among those that fit is returned.
Source AMP (NeurIPS 2022), §3.3-3.6. `released=True` follows the published code where it departs
from the paper: the programme drops links (paper_cut.py), one micro-batch per pipeline gets equal
stages, and a ring is as fast as its closing edge instead of its slowest pair.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.amp.cuts import uniform_cut
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.paper_cut import TableTooLarge, chain_seconds, paper_cut
from hetplan.formulations.amp.placement import megatron_placement
from hetplan.formulations.amp.problem import (
    AmpProblem,
    Configuration,
    Floats,
    Ints,
    compile_problem,
)
from hetplan.formulations.amp.strategy import Strategy, place, ring_factor, slowest_pair
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

# AMP runs this many of its best-ranked strategies for real and keeps the fastest (§4.3).
TRIALS = 10


@dataclass(frozen=True)
class Averages:
    """AMP's view of a placement: layer [L] (1), link [pp - 1, L] (2) seconds, sync [pp] seconds per
    byte."""

    layer: Floats
    link: Floats
    sync: Floats
    gas: int

    def estimate(self, problem: AmpProblem, cut: Ints) -> float:
        """(3), seconds per iteration."""
        sync = (self.sync * np.add.reduceat(problem.params, cut[:-1])).max()
        return chain_seconds(self.layer, self.link, self.gas, cut) + float(sync)


@dataclass(frozen=True)
class Candidate:
    """A strategy, AMP's estimate of it, its exact T, and whether it fits in memory."""

    strategy: Strategy
    estimate: float
    seconds: float
    fits: bool


@dataclass(frozen=True)
class Ranking:
    """Algorithm 1's record, least estimate first.

    skipped: configurations whose table of the programme would exceed 2 GiB. finished: not stopped
    early.
    """

    candidates: list[Candidate]
    skipped: int
    finished: bool

    def top(self, count: int = TRIALS) -> list[Candidate]:
        """The strategies that AMP would run: the `count` of least estimate, memory unseen."""
        return self.candidates[:count]


def average(
    problem: AmpProblem, configuration: Configuration, placement: Ints, *, released: bool = False
) -> Averages:
    """(1), (2) and the synchronisation of eq. 4 for `placement` [pp, dp, tp]."""
    tp, dp, mbs = configuration.tensor, configuration.data, configuration.micro_batch
    ring = closing_edge if released else slowest_pair
    share = np.bincount(problem.device_type, minlength=len(problem.types)) / problem.devices
    reduce_seconds = (ring_factor(tp) * mbs / ring(problem, placement)).mean()  # per byte
    here, after = placement[:-1], placement[1:]
    links = mbs * (1 / problem.bandwidth[here, after].min(axis=2)).mean(axis=1)
    return Averages(
        layer=share @ problem.seconds[tp, mbs] + reduce_seconds * problem.tensor,
        link=links[:, None] * problem.activation,
        sync=ring_factor(dp) / tp / ring(problem, placement.transpose(0, 2, 1)).min(axis=1),
        gas=configuration.gas,
    )


def closing_edge(problem: AmpProblem, groups: Ints) -> Floats:
    """Bandwidth between a ring's last and first device: what the released code takes for its
    slowest link."""
    return np.asarray(problem.bandwidth[groups[..., -1], groups[..., 0]])


def rank(data: AmpData, run: Run | None = None, *, released: bool = False) -> Ranking:
    """Algorithm 1, lines 1 to 9: a candidate per configuration, sorted by estimate; few stages
    first."""
    run = run or Run()
    problem = compile_problem(data)
    nodes = [device.node for device in data.devices]
    found: list[Candidate] = []
    skipped = 0
    for chosen in sorted(problem.configurations(), key=lambda each: each.pipeline):
        if run.should_stop:
            break
        placement = megatron_placement(nodes, chosen)
        averages = average(problem, chosen, placement, released=released)
        try:
            cut = cut_of(averages, run, released=released)
        except TableTooLarge:
            skipped += 1
            continue
        if cut is None:
            break
        placed = place(problem, chosen, placement)
        strategy = Strategy(chosen, placement, cut)
        estimate = averages.estimate(problem, cut)
        found.append(Candidate(strategy, estimate, placed.seconds(cut), placed.fits(cut)))
        run.report(note=f"{len(found)} configurations estimated")
    else:
        return Ranking(sorted(found, key=lambda each: each.estimate), skipped, True)
    return Ranking(sorted(found, key=lambda each: each.estimate), skipped, False)


def cut_of(averages: Averages, run: Run, *, released: bool) -> Ints | None:
    """The programme's cut (equal stages where the released code does so); None when stopped."""
    if released and averages.gas == 1:
        return uniform_cut(averages.layer.size, averages.link.shape[0] + 1)
    answer = paper_cut(
        averages.layer, averages.link, averages.gas, released=released, stop=lambda: run.should_stop
    )
    return None if answer is None else answer[0]


def solve(data: AmpData, run: Run, *, released: bool = False) -> Outcome[AmpDecision]:
    """Algorithm 1 with its own estimate in place of the real trials; proves no bound."""
    begun = time.perf_counter()
    ranking = rank(data, run, released=released)
    fitting = [candidate for candidate in ranking.candidates if candidate.fits]
    stop = Stop.DONE if ranking.finished else Stop.INTERRUPTED if run.cancelled else Stop.LIMIT
    best = fitting[0] if fitting else None
    details: dict[str, object] = {"candidates": len(ranking.candidates), "skipped": ranking.skipped}
    if best is not None:
        details["estimate_seconds"] = best.estimate
        details["rank"] = 1 + [candidate.fits for candidate in ranking.candidates].index(True)
        trials = [candidate.seconds for candidate in ranking.top() if candidate.fits]
        details["best_of_trials_seconds"] = min(trials, default=None)
    return Outcome(
        stop=stop,
        decision=None if best is None else best.strategy.decision(),
        solve_seconds=time.perf_counter() - begun,
        message=message(ranking, best),
        details=details,
    )


def solve_released(data: AmpData, run: Run) -> Outcome[AmpDecision]:
    """As the published code does it, where that departs from the paper."""
    return solve(data, run, released=True)


def message(ranking: Ranking, best: Candidate | None) -> str:
    """What the reader must know beside the plan; empty where AMP returns exactly this."""
    told = []
    if not ranking.candidates and not ranking.skipped and ranking.finished:
        told.append(
            "no degrees and micro-batch with a whole number of micro-batches, tables and enough layers"
        )
    elif best is None and ranking.candidates:
        told.append(f"none of AMP's {len(ranking.candidates)} strategies fits in memory")
    elif best is not None and not ranking.candidates[0].fits:
        first = ranking.candidates[0].strategy.configuration
        told.append(f"AMP ignores memory: its own choice, {first}, does not fit")
    if ranking.skipped:
        told.append(
            f"{ranking.skipped} configurations left out: their O(k L^4) table would exceed 2 GiB"
        )
    return "; ".join(told)
