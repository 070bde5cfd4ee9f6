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
always the exact T. AMP ignores memory. Here the strategy of least estimate among those that fit is
returned.

The cut is the O(k L^4) dynamic programme over a tolerance m, in {0} and all sums of consecutive t.
t(c, i) is the sum over layers c to i - 1.
Table  dp[i][j][m]: least (gas-1) max(0, max stage - m) + sum t + sum e over the cuts of i layers
       (eq. 6) dp[i][0][m] = (gas-1) max(0, t(0, i) - m) + t(0, i)
       (eq. 7) dp[i][j][m] = min over c of dp[c][j-1][max(t(c, i), m)] + (gas-1) max(0, t(c, i) - m)
                     + t(c, i) + e[j-1, c-1]
                     (eq. 8)
       dp[L][k-1][0] = least (gas-1) max_j t_j + sum t_j + sum e_j. So the programme is exact for
       its data, in which a stage costs the same wherever it runs, pipelines do not differ and
       synchronisation is free.

Source AMP (NeurIPS 2022), §3.3-3.6, as printed. The published code departs from it, and method
`paper-released` with it: its programme compares cuts as printed but stores costs without e[j-1,
c-1], so that later stages do not see it, one micro-batch per pipeline gets equal stages, and a ring
is as fast as its closing edge instead of its slowest pair.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from hetplan.formulations.amp.cuts import parameter_cut, uniform_cut
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.problem import (
    NO_CONFIGURATION,
    AmpProblem,
    Configuration,
    Floats,
    Ints,
    Strategy,
    compile_problem,
    megatron_placement,
    place,
    ring_factor,
    slowest_pair,
)
from hetplan.solvers.run import Outcome, Run, Stop, stop_reason

MAX_TABLE_BYTES = 2 * 2**30
# Megatron's cuts (§4.1), by the method that has them in place of the programme's.
CUTS: Mapping[str, Callable[[AmpProblem, int], Ints]] = {
    "paper-uniform": lambda problem, stages: uniform_cut(problem.layers, stages),
    "paper-parameter": lambda problem, stages: parameter_cut(problem.params, stages),
}


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
        return chain_seconds(self.layer, self.link, self.gas, cut) + float(
            (self.sync * np.add.reduceat(problem.params, cut[:-1])).max()
        )


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


def closing_edge(problem: AmpProblem, groups: Ints) -> Floats:
    """Bandwidth from the last to the first of each group; groups [..., n] -> [...], +inf for groups
    of one."""
    return np.asarray(problem.bandwidth[groups[..., -1], groups[..., 0]])


def average(
    problem: AmpProblem, configuration: Configuration, placement: Ints, *, released: bool = False
) -> Averages:
    """(1), (2) and the synchronisation of eq. 4 for `placement` [pp, dp, tp]."""
    ring = closing_edge if released else slowest_pair
    tp, dp, mbs = configuration.tensor, configuration.data, configuration.micro_batch
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


def rank(data: AmpData, run: Run | None = None, *, released: bool = False) -> Ranking:
    """Algorithm 1, lines 1 to 9: a candidate per configuration, sorted by estimate; few stages
    first. released: as the published code does it."""
    run = run or Run()
    problem = compile_problem(data)
    nodes = [device.node for device in data.devices]
    candidates: list[Candidate] = []
    skipped, finished = 0, True
    for chosen in sorted(problem.configurations(), key=lambda each: each.pipeline):
        placement = megatron_placement(nodes, chosen)
        averages = average(problem, chosen, placement, released=released)
        try:
            answer = paper_cut(
                averages.layer, averages.link, chosen.gas, lambda: run.should_stop,
                forgetful=released,
            )  # fmt: skip
        except TableTooLarge:
            skipped += 1
            continue
        if answer is None or run.should_stop:
            finished = False
            break
        cut, _ = answer
        if released and chosen.gas == 1:
            cut = uniform_cut(problem.layers, chosen.pipeline)
        placed = place(problem, chosen, placement)
        candidates.append(
            Candidate(
                Strategy(chosen, placement, cut),
                averages.estimate(problem, cut),
                placed.seconds(cut),
                placed.fits(cut),
            )
        )
        run.report(note=f"{len(candidates)} configurations estimated")
    return Ranking(sorted(candidates, key=lambda each: each.estimate), skipped, finished)


def solve_by(method: str, data: AmpData, run: Run) -> Outcome[AmpDecision]:
    """Algorithm 1 (`paper`, `paper-released`) with its own estimate in place of the real trials;
    proves no bound. `paper-uniform` and `paper-parameter`: its strategy with Megatron's cut in
    place of the programme's (§4.5)."""
    ranking = rank(data, run, released=method == "paper-released")
    fitting = [candidate for candidate in ranking.candidates if candidate.fits]
    best = fitting[0] if fitting else None
    if best is not None and method in CUTS:
        best = recut(compile_problem(data), best, CUTS[method])
    details: dict[str, object] = {"candidates": len(ranking.candidates), "skipped": ranking.skipped}
    if best is not None:
        details["estimate_seconds"] = best.estimate
        details["rank"] = 1 + [candidate.fits for candidate in ranking.candidates].index(True)
    return Outcome(
        stop=Stop.DONE if ranking.finished else stop_reason(run),
        decision=None if best is None or not best.fits else best.strategy.decision(),
        message=message(ranking, best),
        details=details,
    )


def recut(
    problem: AmpProblem, best: Candidate, cut_of: Callable[[AmpProblem, int], Ints]
) -> Candidate:
    """The candidate with another cut, under its own estimate."""
    chosen = best.strategy.configuration
    cut = cut_of(problem, chosen.pipeline)
    placed = place(problem, chosen, best.strategy.placement)
    return replace(
        best,
        strategy=replace(best.strategy, cut=cut),
        seconds=placed.seconds(cut),
        fits=placed.fits(cut),
    )


def message(ranking: Ranking, best: Candidate | None) -> str:
    """What the reader must know beside the plan; empty where AMP returns exactly this."""
    listed, skipped = ranking.candidates, ranking.skipped
    first = listed[0].strategy.configuration if listed else None
    notes = {
        NO_CONFIGURATION: ranking.finished and not (listed or skipped),
        f"none of AMP's {len(listed)} strategies fits in memory": best is None and bool(listed),
        "AMP's strategy does not fit in memory with this cut": best is not None and not best.fits,
        f"AMP ignores memory: its own choice, {first}, does not fit": best and not listed[0].fits,
        f"{skipped} configurations left out: their O(k L^4) table would exceed 2 GiB": skipped,
    }
    return "; ".join(text for text, holds in notes.items() if holds)


class TableTooLarge(ValueError):
    """The programme's table would be larger than allowed."""


def paper_cut(
    layer_seconds: Floats,
    link_seconds: Floats,
    gas: int,
    stop: Callable[[], bool] = lambda: False,
    most_bytes: int = MAX_TABLE_BYTES,
    *,
    forgetful: bool = False,
) -> tuple[Ints, float] | None:
    """AMP's cut of L layers into k stages and the value that its table holds for it.

    layer_seconds: t [L]. link_seconds: e [k - 1, L], its shape gives k. gas: micro-batches per
    pipeline. stop: asked several times a second. forgetful: costs are stored without links.
    Returns (cut [k + 1], value); None when stopped.
    Raises TableTooLarge when the table would exceed `most_bytes`.
    """
    layers, stages = layer_seconds.size, link_seconds.shape[0] + 1
    if stages == 1:  # eq. 7 with m = 0
        return np.array([0, layers]), gas * float(np.cumsum(layer_seconds)[-1])
    values, rank = interval_ranks(layer_seconds)
    # per (L + 1) M, M tolerances: costs of two stages (8 bytes) and choices of all (2 bytes)
    if (2 * 8 + 2 * stages) * (layers + 1) * values.size > most_bytes:
        raise TableTooLarge(
            f"{layers} layers, {stages} stages: table of the programme exceeds "
            f"{most_bytes / 2**30:g} GiB"
        )
    table = np.full((layers + 1, values.size), np.inf)
    for i in range(1, layers + 1):  # eq. 7
        whole = values[rank[0, i]]
        table[i] = (gas - 1) * np.maximum(0.0, whole - values) + whole
    choice = np.zeros((stages, layers + 1, values.size), dtype=np.uint16)
    for j in range(1, stages):
        link = np.concatenate([[0.0], link_seconds[j - 1]])
        following = np.full_like(table, np.inf)
        for i in range(j + 1, layers + 1):
            if stop():
                return None
            cost = stage_costs(table, values, rank[j:i, i], j, gas) + link[j:i, None]
            c = cost.argmin(axis=0)
            choice[j, i] = j + c
            following[i] = cost[c, np.arange(values.size)] - forgetful * link[j + c]
        table = following
    return trace(choice, rank), float(table[layers, 0])


def stage_costs(table: Floats, values: Floats, rank: Ints, first: int, gas: int) -> Floats:
    """[c, M] eq. 8 without the link, for boundaries c = first, first + 1, ...

    table [L + 1, M]: entries with one stage less. rank [c]: index in values [M] of the seconds of
    layers c to i - 1. The stage pays for its own excess over m; the prefix is then held to the
    larger of the two.
    """
    cost = np.empty((rank.size, values.size))
    for row, (before, r) in enumerate(zip(table[first:], rank.tolist(), strict=False)):
        cost[row, r:] = before[r:] + values[r]
        cost[row, :r] = before[r] + (gas - 1) * (values[r] - values[:r]) + values[r]
    return cost


def trace(choice: Ints, rank: Ints) -> Ints:
    """The cut behind dp[L][k-1][0]: each choice sets the tolerance max(t(c, i), m) of the stage
    before."""
    stages, layers = choice.shape[0], choice.shape[1] - 1
    cut = np.zeros(stages + 1, dtype=np.int64)
    i, m = layers, 0
    for j in range(stages - 1, -1, -1):
        cut[j + 1] = i
        c = int(choice[j, i, m])
        i, m = c, max(int(rank[c, i]), m)
    return cut


def chain_seconds(layer_seconds: Floats, link_seconds: Floats, gas: int, cut: Ints) -> float:
    """What the programme minimises (eq. 5), for any cut: (gas-1) max_j t_j + sum_j t_j + sum_j
    e_j."""
    stages = np.add.reduceat(layer_seconds, cut[:-1])
    links = link_seconds[np.arange(cut.size - 2), cut[1:-1] - 1]
    return float((gas - 1) * stages.max() + stages.sum() + links.sum())


def interval_ranks(seconds: Floats) -> tuple[Floats, Ints]:
    """All tolerances, ascending from 0, and which of them each interval of layers takes.

    seconds [L] -> values [M], rank [L + 1, L + 1] (rank[c, i] for layers c to i - 1, 0 elsewhere).
    Each interval is summed from its own start, so that equal runs of equal layers give one value.
    """
    layers = seconds.size
    sums = np.zeros((layers + 1, layers + 1))
    for c in range(layers):
        sums[c, c + 1 :] = np.cumsum(seconds[c:])
    values, rank = np.unique(sums, return_inverse=True)
    return values, np.ascontiguousarray(rank.reshape(sums.shape), dtype=np.int64)
