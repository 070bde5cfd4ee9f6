"""The search of one strategy for plans of one workload in one variant.

The strategy proposes candidates, and each is replayed. If a plan does not fit when replayed, the
strategy is asked for one that does (`Strategy.within_replay`). If it has none, it is asked for
plans with recomputation.

A strategy's problem may count less memory than the replay: it may leave out activations that every
tensor rank keeps whole, and the working memory of recomputation. Its bound then holds for the plans
within the replay's memory, too, but its own plan may not fit.

The objective of a strategy's problem counts what its paper counts. The replay counts the rest:
network cards that the ranks of a node share, gradients sent back, tied weights, the optimizer's
step, recomputation's working memory. Plans of different strategies compare by replayed seconds.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hetplan.errors import UnsupportedError, require
from hetplan.planner.candidate import Candidate, StrategyMethod, joined
from hetplan.planner.proposals import fault_of, propose
from hetplan.planner.strategy import Strategy
from hetplan.planner.variants import (
    PLAIN,
    Variant,
    on_part,
    places_of,
    renumbered,
    useful_modes,
    with_recomputation,
)
from hetplan.plans.plan import Plan, Prediction
from hetplan.profiling.workload import Workload
from hetplan.replays.chains import Replay
from hetplan.replays.replay import replay
from hetplan.runtime.execution.choice import refusal
from hetplan.schema import derived
from hetplan.solvers.run import Run
from hetplan.text import share_text

WITHIN_NOTE = "solved within the memory that the replay counts"
# Most passes of a micro-batch through a stage that are replayed: more take minutes.
MOST_PASSES = 1_000_000

OnCandidate = Callable[[Candidate], None]


@dataclass(frozen=True)
class StrategySearch:
    """The search of one strategy in one variant. `phases.search_all` calls its methods."""

    strategy: Strategy
    workload: Workload  # on the whole cluster, without recomputation
    run: Run
    variant: Variant = PLAIN
    on_candidate: OnCandidate | None = None  # called with every candidate after its replay
    known: tuple[Candidate, ...] = ()  # the candidates of all strategies so far
    # An exact method ends early when its bound exceeds this many times the best replayed seconds.
    # On hetplan's workloads no objective was more than 1.07 times the replayed seconds of its plan,
    # so that the plans above the bound are slower than the best one when replayed, too. 1.25 leaves
    # room for other workloads.
    cannot_win: float = 1.25

    @property
    def name(self) -> str:
        """The strategy, and its precision where several are planned: `amp in bf16`."""
        precision = f" in {self.variant.precision}" if self.variant.precision else ""
        return f"{self.strategy.name}{precision}"

    @cached_property
    def workload_on_part(self) -> Workload:
        """The workload on the variant's part of the cluster."""
        return on_part(self.workload, self.variant.part)

    @property
    def late(self) -> bool:
        """Whether the search must end: the time is over and, on the whole cluster, some known plan
        fits. On a part of the cluster no plan is needed."""
        if self.variant.part:
            return self.run.should_stop
        fits = any(candidate.fits_memory for candidate in self.known)
        return fits and self.run.out_of_time

    @property
    def hopeless_bound(self) -> float:
        """The seconds above which the bound of an exact method says that it cannot win; infinite
        if no known plan fits."""
        best = shortest(candidate for candidate in self.known if candidate.fits_memory)
        if best is None:
            return math.inf
        return self.cannot_win * (best.predicted_seconds or 0.0)

    def quick_candidates(self, budget: Run) -> list[Candidate]:
        """Candidates of the methods that answer at once."""
        return self.candidates_of(budget, lambda method: method.quick)

    def other_candidates(self, budget: Run) -> list[Candidate]:
        """Candidates of the methods that neither answer at once nor prove their answers."""
        return self.candidates_of(budget, lambda method: not (method.quick or method.exact))

    def exact_candidates(self, budget: Run) -> list[Candidate]:
        """Candidates of the methods that prove their answers."""
        return self.candidates_of(budget, lambda method: method.exact)

    def own_plans(self) -> Iterator[Plan]:
        """The known plans of the same precision and the same part of the cluster, renumbered for
        that part, the fastest first. A generator, because few strategies use the plans."""
        precision, part = self.variant.precision, self.variant.part
        same = [
            candidate
            for candidate in self.known
            if (candidate.variant.precision, candidate.variant.part) == (precision, part)
        ]
        same.sort(key=lambda candidate: candidate.predicted_seconds or math.inf)
        plans = [candidate.plan for candidate in same if candidate.plan is not None]
        if part is None:
            yield from plans
            return
        cluster = self.workload.cluster
        places = places_of(cluster.devices_of(part.nodes), len(cluster.devices))
        yield from (renumbered(plan, self.workload_on_part, places) for plan in plans)

    def recomputing_candidates(self, budget: Run) -> list[Candidate]:
        """Candidates with recomputation that fit; none if an exact candidate of the strategy fits
        without it. Only `joint` considers recomputation where memory suffices without."""
        if not self.strategy.recomputes or self.run.cancelled:
            return []
        for candidate in self.known:
            same_strategy = candidate.strategy == self.strategy.name
            same_search = same_strategy and candidate.variant == self.variant
            if same_search and candidate.method.exact and candidate.fits_memory:
                return []
        modes = useful_modes(self.workload_on_part)
        candidates: list[Candidate] = []
        for number, mode in enumerate(modes):
            recomputing = replace(self, variant=replace(self.variant, recomputation=mode))
            candidates += recomputing.exact_candidates(budget.share(len(modes) - number))
        return [candidate for candidate in candidates if candidate.fits_memory]

    def candidates_of(
        self, budget: Run, wanted: Callable[[StrategyMethod], bool]
    ) -> list[Candidate]:
        """The candidates of the wanted methods, after their replay. Plans of exact methods are
        within the replay's memory where the strategy finds such a plan. On a part of the cluster
        only exact methods are asked, and only plans that fit are returned.

        budget: its time is for all methods together. wanted: whether a method is asked.
        """
        mode, part = self.variant.recomputation, self.variant.part
        methods = [method for method in self.strategy.methods if wanted(method)]
        if part is not None:
            methods = [method for method in methods if method.exact]
        if not methods or self.late:
            return []
        with derived(f"profile of {self.workload.model.name} under {mode}"):
            posed = with_recomputation(self.workload_on_part, mode)
        candidates = []
        strategy = self.strategy.beginning_with(self.own_plans())
        limit = self.hopeless_bound
        # two thirds of the time for the methods; the rest for replays and for `within_memory`
        methods_run = budget.share(1.5)
        for proposed in propose(strategy, posed, methods_run, methods, limit):
            try:
                candidate = self.replayed(proposed, posed, budget, limit)
            except Exception as error:  # noqa: BLE001 - a fault costs this candidate alone
                candidate = fault_of(self.strategy.name, proposed.method, error)
            candidates.append(replace(candidate, variant=self.variant))
        if part is not None:
            fitting = [c for c in candidates if c.plan is not None and c.fits_memory]
            devices = self.workload.cluster.devices_of(part.nodes)
            candidates = [on_devices(c, self.workload, devices) for c in fitting]
        if self.on_candidate is not None:
            for candidate in candidates:
                self.on_candidate(candidate)
        return candidates

    def replayed(
        self, proposed: Candidate, posed: Workload, budget: Run, limit: float
    ) -> Candidate:
        """The proposed candidate after its replay. For one of an exact method that does not fit
        when replayed, the strategy's candidate within the replay's memory, if it has one.

        posed: the workload that the strategy solved. limit: the `hopeless_bound`, above which an
        exact method was ended early.
        """
        candidate = self.mark_and_replay(proposed)
        if (candidate.bound or 0.0) > limit and candidate.status != "optimal":
            text = "cannot win and ended early: its bound is far above the best plan"
            candidate = replace(candidate, message=joined(text, candidate.message))
        if not proposed.method.exact:
            return candidate
        return self.within_memory(proposed, candidate, posed, budget)

    def mark_and_replay(self, candidate: Candidate) -> Candidate:
        """A strategy's candidate with the variant, the origin in its plan, and its replay on the
        variant's part of the cluster."""
        candidate = replace(candidate, variant=self.variant)
        plan = candidate.plan
        if plan is not None:
            origin = f"{candidate.strategy}/{candidate.method.name}{plan.origin}"
            plan = self.variant.marked(plan.model_copy(update={"origin": origin}))
        return replay_candidate(replace(candidate, plan=plan), self.workload_on_part)

    def within_memory(
        self, proposed: Candidate, first: Candidate, posed: Workload, run: Run
    ) -> Candidate:
        """The candidate `first` if its replay fits; else the strategy's best within the replay's
        memory, if it has one. The bound of `first` holds for that candidate, too.

        first: the candidate `proposed` after its replay.
        """
        fits_only_unreplayed = proposed.fits_memory and not first.fits_memory
        if not fits_only_unreplayed or first.replay is None or run.should_stop:
            return first
        model = self.workload.model.name
        with derived(f"{model} on {self.workload.cluster.name} within the replay's memory"):
            within = self.strategy.within_replay(posed, run, first.bound)
        if within is None:
            return first
        if within.plan is None:
            proof = "no plan does" if within.status == "infeasible" else ""
            return replace(first, message=joined(first.message, proof))
        again = self.mark_and_replay(within)
        return replace(
            again,
            solve_seconds=first.solve_seconds + again.solve_seconds,
            message=joined(again.message, WITHIN_NOTE),
        )


def shortest(candidates: Iterable[Candidate]) -> Candidate | None:
    """The candidate with the least predicted seconds, the first of equals; None where no candidate
    has predicted seconds."""
    timed = [c for c in candidates if c.predicted_seconds is not None]
    return min(timed, key=lambda c: c.predicted_seconds or 0.0, default=None)


def replay_candidate(candidate: Candidate, workload: Workload) -> Candidate:
    """The candidate with the seconds and the memory of its replay, and with these figures and the
    refusal of `hetplan run`, if there is one, in its plan.

    If it cannot be replayed, the seconds of its problem's objective take the place of the replayed
    ones, and its message says so.
    """
    plan = candidate.plan
    if plan is None:
        return candidate
    try:
        # micro-batches x stages x chunks of a stage, which are equally many in all stages
        passes = sum(r.steps * len(r.stages) * len(r.stages[0].layers) for r in plan.replicas)
        require(
            passes <= MOST_PASSES,
            "too many micro-batches to replay",
            where=plan.name,
            got=passes,
            expected=f"{MOST_PASSES} passes",
            kind=UnsupportedError,
        )
        replayed = replay(plan, workload)
    except UnsupportedError as error:
        text = f"not replayed, the iteration is the objective: {error}"
        candidate = replace(
            candidate,
            predicted_seconds=candidate.closed_form_seconds or candidate.predicted_seconds,
            closed_form_seconds=None,
            message=joined(candidate.message, text),
        )
    else:
        excess = excess_text(candidate, replayed, workload)
        candidate = replace(
            with_replay(candidate, replayed),
            fits_memory=candidate.fits_memory is True and not excess,
            message=joined(candidate.message, excess),
        )
    prediction = Prediction(
        strategy=candidate.strategy,
        method=candidate.label,
        predicted_seconds=candidate.predicted_seconds,
        closed_form_seconds=candidate.closed_form_seconds,
        objective=candidate.objective,
        bound=candidate.bound,
        ladder=list(candidate.ladder) or None,
    )
    more = {"prediction": prediction, "refused": refusal(plan, workload.model)}
    return replace(candidate, plan=plan.model_copy(update=more))


def with_replay(candidate: Candidate, replayed: Replay) -> Candidate:
    """The candidate with the memory of a replay of its plan, and with the replayed seconds unless
    its seconds were measured."""
    candidate = replace(candidate, peak_bytes=replayed.peak_bytes)
    if candidate.measured:
        return candidate
    return replace(candidate, predicted_seconds=replayed.seconds, replay=replayed)


def excess_text(candidate: Candidate, replayed: Replay, workload: Workload) -> str:
    """A note on the device that lacks most memory in the replay, and on what is largest on it,
    though the strategy says that its plan fits; empty if no device lacks memory.

    A device that exceeds its limit by the strategy's own peak, too, is left out: the strategy says
    that the plan fits because the device was measured with that batch (Poplar's batch curves), and
    a measurement is surer than a prediction.
    """
    if candidate.fits_memory is not True or candidate.peak_bytes is None:
        return ""
    sizes = zip(replayed.peak_bytes, replayed.limit_bytes, candidate.peak_bytes, strict=True)
    excess = []  # [device] bytes
    for replayed_peak, limit, own_peak in sizes:
        lacks_memory = replayed_peak > limit and own_peak <= limit
        excess.append(replayed_peak - limit if lacks_memory else 0.0)
    if not any(excess):
        return ""
    device = excess.index(max(excess))
    text = (
        f"does not fit when replayed: device {device} ({workload.cluster.devices[device].type}) "
        f"holds {share_text(replayed.peak_bytes[device], replayed.limit_bytes[device])}"
    )
    if not replayed.held:  # an SPMD program's bytes are not counted by component
        return text
    return f"{text}, {replayed.held[device].largest_text}"


def on_devices(candidate: Candidate, workload: Workload, numbers: Sequence[int]) -> Candidate:
    """A candidate of another cluster, put on devices of the workload's cluster and replayed there.

    numbers: see `renumbered`. A candidate that has no replay is not replayed here either, so that
    its memory on the devices is unknown. The plan loses the bounds in its prediction, which
    were proven for the other cluster.
    """
    assert candidate.plan is not None
    plan = renumbered(candidate.plan, workload, numbers)
    changes: dict[str, float | None] = {"bound": None, "ladder": None}
    if candidate.replay is None:
        candidate = replace(candidate, peak_bytes=None)
    else:
        candidate = with_replay(candidate, replay(plan, workload))
        changes["predicted_seconds"] = candidate.predicted_seconds
    return replace(candidate, ladder=(), plan=with_figures(plan, changes))


def with_figures(plan: Plan, changes: Mapping[str, float | None]) -> Plan:
    """The plan with other figures in its prediction; a plan without a prediction stays as it is.
    changes: name of a field of `Prediction` -> figure."""
    if plan.prediction is None:
        return plan
    prediction = plan.prediction.model_copy(update=dict(changes))
    return plan.model_copy(update={"prediction": prediction})
