"""AMP's own procedure, Algorithm 1: enumerate degrees and micro-batches, one placement and one cut
for each.

Legend  pp, dp, tp degrees of pipeline, data and tensor parallelism; mbs samples per micro-batch;
        gas micro-batches per pipeline; L layers; k = pp stages; t_j seconds of stage j, e_j seconds
        of the transfer behind it, S_j seconds of its gradients' all-reduce.

Each (pp, dp, tp, mbs) gets devices in Megatron's order (§3.6) and the cut of §3.5. The model of
§3.4 gives its cost from averages over devices, groups and pipelines, as the authors' code computes
it:
(1) t[l]     = mean over all devices of seconds[type][tp][mbs][l]
               + mean over tensor groups of the all-reduce's seconds
(2) e[j, l]  = activation_bytes[l] mbs x mean over pipelines of 1 / (slowest link behind stage j)
(3) estimate = (gas-1) max_j t_j + sum_j t_j + sum_j e_j + max_j S_j
The averages hide which stage runs on which type of device, and differences between pipelines. The
dynamic programme for the cut does not count S. The strategy that the method returns need therefore
not be the best of the candidates; its objective is always the exact T. AMP ignores memory. This
method returns the strategy with the least estimate among the candidates that fit in memory.

The cut is found by the O(k L^4) dynamic programme over a tolerance m: the first m seconds of the
slowest stage are not counted in (gas-1) max_j t_j. t(c, i) is the sum of t over layers c to i - 1;
m is 0 or any t(c, i).
(eq. 6)  dp[i][j][m]: least (gas-1) max(0, max stage - m) + sum t + sum e over the cuts of the first
         i layers into j + 1 stages
(eq. 7)  dp[i][0][m] = (gas-1) max(0, t(0, i) - m) + t(0, i)
(eq. 8)  dp[i][j][m] = min over c of dp[c][j-1][max(t(c, i), m)]
                       + (gas-1) max(0, t(c, i) - m) + t(c, i) + e[j-1, c-1]
dp[L][k-1][0] is the least (gas-1) max_j t_j + sum t_j + sum e_j. So the programme is exact for its
data, in which a stage costs the same wherever it runs, pipelines do not differ and synchronisation
is free.

Source AMP (NeurIPS 2022), §3.3-3.6, as printed. The published code departs from the paper, and the
method `paper-released` follows the code: its programme compares cuts as printed but stores costs
without e[j-1, c-1], so that later stages do not see these seconds; pipelines with one micro-batch
get stages with equally many layers; and a ring is as fast as its closing edge instead of its
slowest pair.
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

# Seconds of a slow core that each step of the dynamic programme, one i of one stage j, takes from
# the run's budget of work.
STEP_SECONDS = 2e-4

MAX_TABLE_BYTES = 2 * 2**30  # the most bytes of the programme's table, for one configuration
# Method -> Megatron's cut (§4.1), which the method uses in place of the programme's cut.
CUTS: Mapping[str, Callable[[AmpProblem, int], Ints]] = {
    "paper-uniform": lambda problem, stages: uniform_cut(problem.layers, stages),
    "paper-parameter": lambda problem, stages: parameter_cut(problem.params, stages),
}


@dataclass(frozen=True)
class Averages:
    """AMP's averages of the costs of a placement; `average` makes it."""

    layer: Floats  # [L] seconds of a layer (1)
    link: Floats  # [pp - 1, L] seconds of the transfer behind stage j that ends with layer l (2)
    sync: Floats  # [pp] seconds of a stage's gradient all-reduce per byte of its parameters
    gas: int  # micro-batches per pipeline

    def estimate(self, problem: AmpProblem, cut: Ints) -> float:
        """AMP's estimate (3) of a cut [pp + 1], seconds per iteration."""
        stage_bytes = np.add.reduceat(problem.params, cut[:-1])
        sync_seconds = float((self.sync * stage_bytes).max())
        return chain_seconds(self.layer, self.link, self.gas, cut) + sync_seconds


@dataclass(frozen=True)
class Candidate:
    """A strategy with AMP's estimate and the exact objective."""

    strategy: Strategy
    estimate: float  # (3), seconds per iteration
    seconds: float  # the exact T
    fits: bool  # whether it fits in memory


@dataclass(frozen=True)
class RankedCandidates:
    """The result of Algorithm 1."""

    candidates: list[Candidate]  # one per configuration, by ascending estimate
    skipped: int  # configurations whose table would exceed `MAX_TABLE_BYTES`
    finished: bool  # whether all configurations were tried before the run stopped


def closing_edge(problem: AmpProblem, groups: Ints) -> Floats:
    """[...] bandwidth, in bytes/s, from the last to the first device of each group; +inf for groups
    of one device. groups: [..., n] devices."""
    return np.asarray(problem.bandwidth[groups[..., -1], groups[..., 0]])


def average(
    problem: AmpProblem, configuration: Configuration, placement: Ints, *, released: bool = False
) -> Averages:
    """The averages (1) and (2), and the synchronisation of eq. 4.

    placement: [pp, dp, tp] devices. released: whether a ring is as fast as its closing edge, as in
    the published code.
    """
    ring = closing_edge if released else slowest_pair  # bandwidth of a ring
    tp, dp, mbs = configuration.tensor, configuration.data, configuration.micro_batch
    devices_of_type = np.bincount(problem.device_type, minlength=len(problem.types))
    type_shares = devices_of_type / problem.devices
    # seconds of a tensor all-reduce per byte of one sample, mean over groups
    reduce_seconds = (ring_factor(tp) * mbs / ring(problem, placement)).mean()
    # [pp - 1] seconds per byte of one sample's activation, mean over pipelines
    here, after = placement[:-1], placement[1:]
    links = mbs * (1 / problem.bandwidth[here, after].min(axis=2)).mean(axis=1)
    data_groups = placement.transpose(0, 2, 1)  # [pp, tp, dp]
    return Averages(
        layer=type_shares @ problem.seconds[tp, mbs] + reduce_seconds * problem.tensor,
        link=links[:, None] * problem.activation,
        sync=ring_factor(dp) / tp / ring(problem, data_groups).min(axis=1),
        gas=configuration.gas,
    )


def ranked_candidates(
    data: AmpData, run: Run | None = None, *, released: bool = False
) -> RankedCandidates:
    """The candidates of Algorithm 1, lines 1 to 9: one per configuration, sorted by estimate. Of
    equal estimates the one with fewer stages comes first. released: whether to follow the published
    code where it departs from the paper."""
    run = run or Run()
    problem = compile_problem(data)
    nodes = [device.node for device in data.devices]
    candidates: list[Candidate] = []
    skipped, finished = 0, True

    def counted_stop() -> bool:
        """Whether the run should stop, after one more step of the dynamic programme."""
        run.count(STEP_SECONDS)
        return run.should_stop

    by_stages = sorted(problem.configurations(), key=lambda configuration: configuration.pipeline)
    for chosen in by_stages:
        placement = megatron_placement(nodes, chosen)
        averages = average(problem, chosen, placement, released=released)
        try:
            answer = paper_cut(
                averages.layer, averages.link, chosen.gas, counted_stop,
                without_links=released,
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
                strategy=Strategy(chosen, placement, cut),
                estimate=averages.estimate(problem, cut),
                seconds=placed.seconds(cut),
                fits=placed.fits(cut),
            )
        )
        run.report(note=f"{len(candidates)} configurations estimated")
    candidates.sort(key=lambda candidate: candidate.estimate)
    return RankedCandidates(candidates, skipped, finished)


def solve_by(method: str, data: AmpData, run: Run) -> Outcome[AmpDecision]:
    """The strategy of Algorithm 1. Proves no bound.

    method: `paper`, `paper-released` (as the published code does it), or `paper-uniform` and
    `paper-parameter`, which give the strategy of `paper` one of Megatron's cuts (§4.5). AMP's
    estimate chooses the strategy in place of the real trials of the paper.
    """
    ranking = ranked_candidates(data, run, released=method == "paper-released")
    fitting = [candidate for candidate in ranking.candidates if candidate.fits]
    best = fitting[0] if fitting else None
    details: dict[str, object] = {"candidates": len(ranking.candidates), "skipped": ranking.skipped}
    if best is not None:
        details["estimate_seconds"] = best.estimate
        fits = [candidate.fits for candidate in ranking.candidates]
        details["rank"] = 1 + fits.index(True)
    if best is not None and method in CUTS:
        best = recut(compile_problem(data), best, CUTS[method])
    decision = None
    if best is not None and best.fits:
        decision = best.strategy.decision()
    return Outcome(
        stop=Stop.DONE if ranking.finished else stop_reason(run),
        decision=decision,
        message=message(ranking, best),
        details=details,
    )


def recut(
    problem: AmpProblem, best: Candidate, cut_of: Callable[[AmpProblem, int], Ints]
) -> Candidate:
    """The candidate with another cut, and with the estimate of its first cut."""
    chosen = best.strategy.configuration
    cut = cut_of(problem, chosen.pipeline)
    placed = place(problem, chosen, best.strategy.placement)
    return replace(
        best,
        strategy=replace(best.strategy, cut=cut),
        seconds=placed.seconds(cut),
        fits=placed.fits(cut),
    )


def message(ranking: RankedCandidates, best: Candidate | None) -> str:
    """A text that says where the result differs from AMP's own; empty where it does not differ."""
    candidates, skipped = ranking.candidates, ranking.skipped
    notes = []
    if ranking.finished and not candidates and not skipped:
        notes.append(NO_CONFIGURATION)
    if candidates and best is None:
        notes.append(f"none of AMP's {len(candidates)} strategies fits in memory")
    if best is not None and not best.fits:
        notes.append("AMP's strategy does not fit in memory with this cut")
    if best is not None and not candidates[0].fits:
        first = candidates[0].strategy.configuration
        notes.append(f"AMP ignores memory: its own choice, {first}, does not fit")
    if skipped:
        notes.append(f"{skipped} configurations left out: their O(k L^4) table would exceed 2 GiB")
    return "; ".join(notes)


class TableTooLarge(ValueError):
    """The programme's table would be larger than allowed."""


def paper_cut(
    layer_seconds: Floats,
    link_seconds: Floats,
    gas: int,
    stop: Callable[[], bool] = lambda: False,
    most_bytes: int = MAX_TABLE_BYTES,
    *,
    without_links: bool = False,
) -> tuple[Ints, float] | None:
    """(cut [k + 1], its value in the programme's table in seconds): AMP's cut of L layers into k
    stages; None when stopped.

    layer_seconds: [L] t. link_seconds: [k - 1, L] e. gas: micro-batches per pipeline. stop: whether
    to give up, asked several times a second. most_bytes: the most that the table may take.
    without_links: whether the table stores costs without links, as in the published code.
    Raises TableTooLarge when the table would exceed `most_bytes`.
    """
    layers = layer_seconds.size
    stages = link_seconds.shape[0] + 1
    if stages == 1:  # eq. 7 with m = 0; summed layer by layer, as in `interval_ranks`
        return np.array([0, layers]), gas * float(np.cumsum(layer_seconds)[-1])
    values, rank = interval_ranks(layer_seconds)
    cells = (layers + 1) * values.size  # pairs (i, m)
    # Costs are held for the present and for the previous j alone, choices for all j.
    cost_bytes, choice_bytes = 2 * 8 * cells, stages * 2 * cells
    if cost_bytes + choice_bytes > most_bytes:
        raise TableTooLarge(
            f"{layers} layers, {stages} stages: table of the programme exceeds "
            f"{most_bytes / 2**30:g} GiB"
        )
    table = np.full((layers + 1, values.size), np.inf)
    for i in range(1, layers + 1):  # eq. 7
        stage_seconds = values[rank[0, i]]
        table[i] = (gas - 1) * np.maximum(0.0, stage_seconds - values) + stage_seconds
    # 0 for j = 0: the first stage begins at layer 0. Numbers of layers fit in 16 bits, since an
    # instance has at most 4096 layers.
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
            following[i] = cost[c, np.arange(values.size)]
            if without_links:
                following[i] -= link[j + c]
        table = following
    return trace(choice, rank), float(table[layers, 0])


def stage_costs(table: Floats, values: Floats, rank: Ints, first: int, gas: int) -> Floats:
    """Costs [C, M] of the last stage and the stages before it by eq. 8, without the link, for the
    boundaries c = first, first + 1, … in front of the last stage.

    table: [L + 1, M] costs with one stage less. values: [M] seconds, the tolerances, ascending.
    rank: [C] the number in `values` of the last stage's seconds t(c, i). first: the least c.

    Under a tolerance of t(c, i) or more the last stage costs t(c, i). Under a smaller tolerance m
    it also costs (gas-1) (t(c, i) - m), and t(c, i) is the tolerance of the stages before it.
    """
    cost = np.empty((rank.size, values.size))
    for row, r in enumerate(rank.tolist()):
        before = table[first + row]
        cost[row, r:] = before[r:] + values[r]
        cost[row, :r] = before[r] + (gas - 1) * (values[r] - values[:r]) + values[r]
    return cost


def trace(choice: Ints, rank: Ints) -> Ints:
    """The cut [k + 1] whose cost is dp[L][k-1][0], from the choices of the last stage back to
    those of the first. Each stage sets the tolerance max(t(c, i), m) of the stages before it.

    choice: [k, L + 1, M] entry [j, i, m] is the first layer c of stage j where stages 0 to j hold
    the first i layers under tolerance m. rank: see `interval_ranks`.
    """
    stages, layers = choice.shape[0], choice.shape[1] - 1
    cut = np.zeros(stages + 1, dtype=np.int64)
    i, m = layers, 0
    for j in range(stages - 1, -1, -1):
        cut[j + 1] = i
        c = int(choice[j, i, m])
        i, m = c, max(int(rank[c, i]), m)
    return cut


def chain_seconds(layer_seconds: Floats, link_seconds: Floats, gas: int, cut: Ints) -> float:
    """The programme's objective (eq. 5) of any cut, in seconds:
    (gas-1) max_j t_j + sum_j t_j + sum_j e_j.

    layer_seconds: [L] t. link_seconds: [k - 1, L] e. cut: [k + 1].
    """
    stages = np.add.reduceat(layer_seconds, cut[:-1])
    links = link_seconds[np.arange(cut.size - 2), cut[1:-1] - 1]
    return float((gas - 1) * stages.max() + stages.sum() + links.sum())


def interval_ranks(seconds: Floats) -> tuple[Floats, Ints]:
    """(values, rank): all tolerances, and the number of each interval's seconds among them.

    values: [M] seconds, ascending from 0. rank: [L + 1, L + 1] with values[rank[c, i]] = t(c, i)
    where c < i, else 0. seconds: [L] t. Each interval is summed from its first layer on, so that
    intervals of equal layers have exactly equal sums.
    """
    layers = seconds.size
    sums = np.zeros((layers + 1, layers + 1))
    for c in range(layers):
        sums[c, c + 1 :] = np.cumsum(seconds[c:])
    values, rank = np.unique(sums, return_inverse=True)
    return values, np.ascontiguousarray(rank.reshape(sums.shape), dtype=np.int64)
