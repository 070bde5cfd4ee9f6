"""One strategy on one workload in one variant: its candidates as it proposes them, replayed;
tightened where the replay needs more memory; and with recomputation where memory costs time.

A family's memory model may be simpler than the replay's (tensor ranks that keep some activations
whole, working memory of recomputation). What it proves holds with the replay's, too. Where its plan
does not fit in the replay, the strategy is asked for one within the replay's memory.

A strategy's closed form prices what its paper prices. The replay counts the rest: network cards
that the ranks of a node share, gradients sent back, tied weights, the optimizer's step,
recomputation's working memory. It is the figure that plans of different strategies compare by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hetplan.errors import UnsupportedError
from hetplan.planner.strategy import Candidate, Method, Strategy, joined, propose
from hetplan.planner.variant import PLAIN, Variant, on_part, recomputed, renumbered, useful_modes
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import Prediction
from hetplan.runtime.replay import Replay, replay
from hetplan.schema import derived
from hetplan.solvers.run import Run
from hetplan.text import seconds_text, share_text

FREE = "recomputation not tried: without memory limits nothing is faster"
WITHIN = "solved within the memory that the replay counts"
UNLIMITED = 1e18  # more bytes than any device has
MOST_PASSES = 1_000_000  # of micro-batches through stages: more take minutes to replay

OnCandidate = Callable[[Candidate], None]


@dataclass(frozen=True)
class Search:
    """A strategy in a variant."""

    strategy: Strategy
    workload: Workload
    run: Run
    variant: Variant = PLAIN
    on_candidate: OnCandidate | None = None  # called with every candidate, replayed
    same: float = 1e-6  # relative: differences of the closed form below are none
    gain: float = 1e-3  # relative: by how much the replay of a rearranged plan must be shorter

    @property
    def name(self) -> str:
        """`amp`, or `amp in bf16` where several precisions are planned."""
        of = f" in {self.variant.precision}" if self.variant.precision else ""
        return f"{self.strategy.name}{of}"

    @cached_property
    def here(self) -> Workload:
        """The workload on the variant's part of the cluster."""
        return on_part(self.workload, self.variant.part)

    def quick(self) -> list[Candidate]:
        """What methods propose that answer at once."""
        return self.solved([m for m in self.strategy.methods if m.quick])

    @property
    def proving(self) -> list[Method]:
        """The methods that prove their answers."""
        return [method for method in self.strategy.methods if method.exact]

    def exact(self, budget: Run | None = None) -> list[Candidate]:
        """What methods propose that prove their answers."""
        return self.solved(self.proving, budget)

    def others(self) -> list[Candidate]:
        """What heuristics and baselines propose that take longer."""
        return self.solved([m for m in self.strategy.methods if not m.quick and not m.exact])

    def recomputing(self, plain: Sequence[Candidate]) -> tuple[list[Candidate], list[str]]:
        """Candidates that recompute and are faster than the plain ones, or fit where none of those
        does; notes on what was tried in vain."""
        if not self.strategy.recomputes or self.run.cancelled:
            return [], []
        modes, budget = useful_modes(self.here), self.budget()
        if modes and self.memory_is_free(plain, share(budget, 1 + len(modes))):
            return [], [FREE]
        candidates: list[Candidate] = []
        notes: list[str] = []
        best = shortest(c for c in plain if c.fits_memory)
        limit = math.inf if best is None else best.predicted_seconds or 0.0
        for left, mode in zip(range(len(modes), 0, -1), modes, strict=True):
            if budget.should_stop:
                return candidates, [*notes, f"no time was left for {mode} recomputation"]
            repeating = replace(self, variant=replace(self.variant, recomputation=mode))
            tried = repeating.exact(share(budget, left))
            fitting = [c for c in tried if c.fits_memory]
            gains = [c for c in fitting if (c.predicted_seconds or 0.0) < limit]
            other = shortest(fitting)
            if gains:
                candidates += gains
            elif best is None and not refused_alike(plain, tried):
                notes.append(f"nothing is found with {mode} recomputation either")
            elif other is not None:
                took = f"{other.name}: {seconds_text(other.predicted_seconds)}"
                notes.append(f"{mode} recomputation gains nothing ({took})")
        return candidates, notes

    def memory_is_free(self, plain: Sequence[Candidate], run: Run) -> bool:
        """Whether the strategy's best plan stays the best without memory limits: then less kept
        gains nothing."""
        best = shortest(c for c in plain if c.method.exact and c.fits_memory)
        if best is None:
            return False
        unlimited = replace(self.here, reserved_bytes=-UNLIMITED)
        free = propose(self.strategy, unlimited, run, self.proving)
        least = shortest(free)
        if least is None or any(c.status not in ("optimal", "infeasible") for c in free):
            return False
        closed = best.closed_form_seconds or best.predicted_seconds or 0.0
        return closed <= (least.predicted_seconds or 0.0) * (1 + self.same)

    def budget(self) -> Run:
        """A run for what comes beyond a first proposal: all of it together has the time limit of
        one method."""
        return Run(
            self.run.options, lambda progress: self.run.report(note=progress.note), self.run.cancel
        )

    def solved(self, methods: Sequence[Method], budget: Run | None = None) -> list[Candidate]:
        """What the methods propose, replayed, those of exact ones within memory.

        budget: for each method, and for what comes beyond; None: each as long as `run` says.
        """
        if not methods:
            return []
        mode, part = self.variant.recomputation, self.variant.part
        with derived(f"profile of {self.workload.model.name} under {mode}"):
            posed = recomputed(self.here, mode)
        candidates = []
        for own in propose(self.strategy, posed, budget or self.run, methods):
            candidate, spare = self.replayed(own), budget or self.budget()
            if own.method.exact:
                candidate = self.within_memory(own, candidate, posed, spare)
            candidates += [candidate, *self.rearranged(candidate, posed, spare)]
        if part is not None:
            numbers = self.workload.cluster.devices_of(part.nodes)
            fitting = [c for c in candidates if c.plan is not None and c.fits_memory]
            candidates = [moved(c, self.workload, numbers) for c in fitting]
        if self.on_candidate is not None:
            for candidate in candidates:
                self.on_candidate(candidate)
        return candidates

    def replayed(self, own: Candidate) -> Candidate:
        """A strategy's candidate as one of the variant, replayed where it is solved; its plan says
        where it is from."""
        own = replace(own, variant=self.variant)
        if own.plan is not None:
            origin = f"{own.strategy}/{own.method.name}{own.plan.origin}"
            plan = self.variant.marked(own.plan.model_copy(update={"origin": origin}))
            own = replace(own, plan=plan)
        return simulated(own, self.here)

    def within_memory(
        self, own: Candidate, first: Candidate, posed: Workload, run: Run
    ) -> Candidate:
        """The first candidate where its replay fits, else what the strategy has within the replay's
        memory, if anything; what is proven of its own problem, with more memory, holds for it."""
        lacks = own.fits_memory and first.replayed is not None and not first.fits_memory
        if not lacks or run.should_stop:
            return first
        model = self.workload.model.name
        with derived(f"{model} on {self.workload.cluster.name} within the replay's memory"):
            within = self.strategy.within_replay(posed, run, first.bound)
        if within is None:
            return first
        if within.plan is None:
            none = "no plan does" if within.status == "infeasible" else ""
            return replace(first, message=joined(first.message, none))
        again = self.replayed(within)
        return replace(
            again,
            solve_seconds=first.solve_seconds + again.solve_seconds,
            message=joined(again.message, WITHIN),
        )

    def rearranged(self, candidate: Candidate, posed: Workload, run: Run) -> list[Candidate]:
        """What of nearly the price of an exact method's plan is shortest when replayed, if it is
        shorter than that plan."""
        if not candidate.method.exact or not candidate.fits_memory or candidate.plan is None:
            return []
        limit = (candidate.predicted_seconds or 0.0) * (1 - self.gain)
        others = []
        for other in self.strategy.rearrangements(posed, candidate):
            if run.should_stop:
                break
            others.append(self.replayed(other))
        best = shortest(c for c in others if c.fits_memory)
        return [best] if best is not None and (best.predicted_seconds or 0.0) < limit else []


def share(budget: Run, parts: int) -> Run:
    """A run with one of so many parts of what is left of a budget; without a limit there is
    none."""
    return budget.part(time_limit=budget.remaining / parts, quiet=False)


def refused_alike(plain: Sequence[Candidate], tried: Sequence[Candidate]) -> bool:
    """Whether recomputation changes nothing in why nothing is solved: it is not memory, then."""
    reasons = {candidate.message for candidate in plain}
    return all(c.solve_seconds == 0 and c.message in reasons for c in tried)


def shortest(candidates: Iterable[Candidate]) -> Candidate | None:
    """The one with the shortest predicted iteration, the first of equals."""
    timed = [c for c in candidates if c.predicted_seconds is not None]
    return min(timed, key=lambda c: c.predicted_seconds or 0.0, default=None)


def simulated(candidate: Candidate, workload: Workload) -> Candidate:
    """The candidate with the replay's seconds and memory; one that cannot be replayed keeps its own
    and says so. Its plan says what is predicted of it."""
    plan = candidate.plan
    if plan is None:
        return candidate
    try:
        passes = sum(r.steps * len(r.stages) * len(r.stages[0].layers) for r in plan.replicas)
        if passes > MOST_PASSES:
            raise UnsupportedError(
                "too many micro-batches to replay",
                where=plan.name,
                got=passes,
                expected=f"{MOST_PASSES} passes",
            )
        own = replay(plan, workload)
    except UnsupportedError as error:
        text = f"not replayed, the iteration is that of the closed form: {error}"
        candidate = replace(candidate, message=joined(candidate.message, text))
    else:
        excess = misfit(candidate, own, workload)
        candidate = replace(
            candidate,
            predicted_seconds=own.seconds,
            closed_form_seconds=candidate.predicted_seconds,
            fits_memory=candidate.fits_memory is True and not excess,
            peak_bytes=own.peak_bytes,
            replayed=own,
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
    return replace(candidate, plan=plan.model_copy(update={"prediction": prediction}))


def misfit(candidate: Candidate, own: Replay, workload: Workload) -> str:
    """Why the replayed plan does not fit where its strategy says that it does; nothing where it
    fits.

    Devices that the strategy itself lets exceed their limit have been tried with that batch, which
    is more than a prediction.
    """
    if candidate.fits_memory is not True or candidate.peak_bytes is None:
        return ""
    sizes = zip(own.peak_bytes, own.limit_bytes, candidate.peak_bytes, strict=True)
    excess = [held - limit if held > limit >= claimed else 0.0 for held, limit, claimed in sizes]
    if not any(excess):
        return ""
    device = excess.index(max(excess))
    return (
        f"does not fit when replayed: device {device} ({workload.cluster.devices[device].type}) "
        f"holds {share_text(own.peak_bytes[device], own.limit_bytes[device])}"
    )


def moved(candidate: Candidate, workload: Workload, numbers: Sequence[int]) -> Candidate:
    """A candidate of another cluster on devices of the workload's, replayed there.

    numbers: as in `renumbered`. What is not replayed at first is not replayed here either, so that
    the memory of its devices is unknown.
    """
    assert candidate.plan is not None
    plan = renumbered(candidate.plan, workload, numbers)
    if candidate.replayed is None:
        return replace(candidate, plan=plan, peak_bytes=None)
    own = replay(plan, workload)
    return replace(
        candidate,
        plan=plan,
        predicted_seconds=own.seconds,
        peak_bytes=own.peak_bytes,
        replayed=own,
    )
