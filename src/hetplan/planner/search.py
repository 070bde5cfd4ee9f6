"""The search of one strategy for plans of one workload in one variant.

The strategy proposes candidates, and each is replayed. Where a plan does not fit when replayed, the
strategy is asked for one that does, and where it has none, for one with recomputation.

A family may count less memory than the replay does: it may leave out activations that tensor ranks
keep whole, and the working memory of recomputation. The bounds that it proves hold with the
replay's memory, too, but its plan may not fit.

The objective of a strategy's problem counts what its paper counts. The replay counts the rest:
network cards that the ranks of a node share, gradients sent back, tied weights, the optimizer's
step, recomputation's working memory. Plans of different strategies compare by replayed seconds.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
MOST_PASSES = 1_000_000  # of micro-batches through stages: more take minutes to replay

OnCandidate = Callable[[Candidate], None]


@dataclass(frozen=True)
class StrategySearch:
    """The search of one strategy in one variant."""

    strategy: Strategy
    workload: Workload
    run: Run
    variant: Variant = PLAIN
    on_candidate: OnCandidate | None = None  # called with every candidate, replayed
    known: tuple[Candidate, ...] = ()  # what all strategies have proposed so far
    # An exact method ends early when its bound exceeds this many times the best replayed seconds.
    # On our workloads no objective was more than 1.07 times the replayed seconds of its plan.
    cannot_win: float = 1.25

    @property
    def name(self) -> str:
        """`amp`, or `amp in bf16` where several precisions are planned."""
        of = f" in {self.variant.precision}" if self.variant.precision else ""
        return f"{self.strategy.name}{of}"

    @cached_property
    def workload_on_part(self) -> Workload:
        """The workload on the variant's part of the cluster."""
        return on_part(self.workload, self.variant.part)

    @property
    def late(self) -> bool:
        """Whether time is over and there is an answer to give: on parts of the cluster none is
        needed, on all of it some plan that fits."""
        fits = any(candidate.fits_memory for candidate in self.known)
        return self.run.should_stop if self.variant.part else fits and not self.run.remaining

    @property
    def hopeless_bound(self) -> float:
        """Seconds of a bound from which on an exact method cannot win; infinite without a plan that
        fits."""
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
        that part, the fastest first. They are renumbered as they are asked for: few strategies use
        them."""
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
        """Candidates with recomputation that fit; none where an exact candidate of the strategy
        fits without it. Whether recomputation pays where memory suffices is for `joint` to say."""
        if not self.strategy.recomputes or self.run.cancelled:
            return []
        for candidate in self.known:
            origin = candidate.strategy, candidate.variant
            if origin != (self.strategy.name, self.variant):
                continue
            if candidate.method.exact and candidate.fits_memory:
                return []
        modes = useful_modes(self.workload_on_part)
        candidates: list[Candidate] = []
        for left, mode in zip(range(len(modes), 0, -1), modes, strict=True):
            repeating = replace(self, variant=replace(self.variant, recomputation=mode))
            candidates += repeating.exact_candidates(budget.share(left))
        return [candidate for candidate in candidates if candidate.fits_memory]

    def candidates_of(
        self, budget: Run, wanted: Callable[[StrategyMethod], bool]
    ) -> list[Candidate]:
        """The candidates of the methods that are wanted, replayed; those of exact methods within
        the replay's memory. On a part of the cluster only exact methods are asked. budget: for all
        of it together."""
        mode, part = self.variant.recomputation, self.variant.part
        methods = [method for method in self.strategy.methods if wanted(method)]
        if part is not None:
            methods = [method for method in methods if method.exact]
        if not methods or self.late:
            return []
        with derived(f"profile of {self.workload.model.name} under {mode}"):
            posed = with_recomputation(self.workload_on_part, mode)
        candidates = []
        strategy, limit = self.strategy.beginning_with(self.own_plans()), self.hopeless_bound
        for proposed in propose(strategy, posed, budget.share(1.5), methods, limit):
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
        """The proposed candidate, replayed; of an exact method one within the replay's memory.

        limit: the `hopeless_bound`, above which an exact method was ended early.
        """
        candidate = self.mark_and_replay(proposed)
        if (candidate.bound or 0.0) > limit and candidate.status != "optimal":
            text = "cannot win and ended early: its bound is far above the best plan"
            candidate = replace(candidate, message=joined(text, candidate.message))
        if not proposed.method.exact:
            return candidate
        return self.within_memory(proposed, candidate, posed, budget)

    def mark_and_replay(self, candidate: Candidate) -> Candidate:
        """A strategy's candidate, marked as one of the variant and replayed on the variant's part
        of the cluster. Its plan then says which strategy and method it is from."""
        candidate = replace(candidate, variant=self.variant)
        plan = candidate.plan
        if plan is not None:
            origin = f"{candidate.strategy}/{candidate.method.name}{plan.origin}"
            plan = self.variant.marked(plan.model_copy(update={"origin": origin}))
        return replay_candidate(replace(candidate, plan=plan), self.workload_on_part)

    def within_memory(
        self, proposed: Candidate, first: Candidate, posed: Workload, run: Run
    ) -> Candidate:
        """The first candidate where its replay fits, else the strategy's best within the replay's
        memory, where it has one. The first one's bound holds for that, too.

        first: the proposed candidate, replayed.
        """
        only_without_replay = proposed.fits_memory and not first.fits_memory
        if not only_without_replay or first.replay is None or run.should_stop:
            return first
        model = self.workload.model.name
        with derived(f"{model} on {self.workload.cluster.name} within the replay's memory"):
            within = self.strategy.within_replay(posed, run, first.bound)
        if within is None:
            return first
        if within.plan is None:
            none = "no plan does" if within.status == "infeasible" else ""
            return replace(first, message=joined(first.message, none))
        again = self.mark_and_replay(within)
        return replace(
            again,
            solve_seconds=first.solve_seconds + again.solve_seconds,
            message=joined(again.message, WITHIN_NOTE),
        )


def shortest(candidates: Iterable[Candidate]) -> Candidate | None:
    """The candidate with the shortest predicted iteration, the first of equals; None where no
    iteration is predicted."""
    timed = [c for c in candidates if c.predicted_seconds is not None]
    return min(timed, key=lambda c: c.predicted_seconds or 0.0, default=None)


def replay_candidate(candidate: Candidate, workload: Workload) -> Candidate:
    """The candidate with the seconds and the memory of its replay, and the prediction in its plan.

    Where it cannot be replayed, the seconds of its problem's objective stand in, and its message
    says so.
    """
    plan = candidate.plan
    if plan is None:
        return candidate
    try:
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
    )
    more = {"prediction": prediction, "refused": refusal(plan, workload.model)}
    return replace(candidate, plan=plan.model_copy(update=more))


def with_replay(candidate: Candidate, replayed: Replay) -> Candidate:
    """The candidate with the memory of a replay of its plan, and with its seconds unless these were
    measured."""
    candidate = replace(candidate, peak_bytes=replayed.peak_bytes)
    if candidate.measured:
        return candidate
    return replace(candidate, predicted_seconds=replayed.seconds, replay=replayed)


def excess_text(candidate: Candidate, replayed: Replay, workload: Workload) -> str:
    """Which device lacks memory in the replay where the strategy says that its plan fits; empty
    where none does.

    A device that is over its limit by the strategy's own count, too, is not judged: it was measured
    with that batch (Poplar's batch curves), and a measurement stands above a prediction.
    """
    if candidate.fits_memory is not True or candidate.peak_bytes is None:
        return ""
    sizes = zip(replayed.peak_bytes, replayed.limit_bytes, candidate.peak_bytes, strict=True)
    excess = [held - limit if held > limit >= claimed else 0.0 for held, limit, claimed in sizes]
    if not any(excess):
        return ""
    device = excess.index(max(excess))
    return (
        f"does not fit when replayed: device {device} ({workload.cluster.devices[device].type}) "
        f"holds {share_text(replayed.peak_bytes[device], replayed.limit_bytes[device])}"
    )


def on_devices(candidate: Candidate, workload: Workload, numbers: Sequence[int]) -> Candidate:
    """A candidate of another cluster, put on devices of the workload's cluster and replayed there.

    numbers: as in `renumbered`. A candidate without a replay gets none here either, so that the
    memory of its devices is unknown.
    """
    assert candidate.plan is not None
    plan = renumbered(candidate.plan, workload, numbers)
    candidate = replace(candidate, plan=plan)
    if candidate.replay is None:
        return replace(candidate, peak_bytes=None)
    return with_replay(candidate, replay(plan, workload))
