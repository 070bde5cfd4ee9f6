"""The answer of the planner: the candidates in the order of the ranking, the winner, and the proven
bound."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hetplan.planner.candidate import Candidate
from hetplan.planner.criteria import Criteria, pareto
from hetplan.planner.explain import Explanation, explain
from hetplan.planner.joint import SCHEDULES, Joint
from hetplan.planner.proofs import documents, joined_ladders, with_any_order, with_degrees
from hetplan.plans.ladder import Rung
from hetplan.plans.passes import WHOLE_SCHEDULES
from hetplan.plans.plan import PASS_SCHEDULES
from hetplan.profiling.workload import Workload
from hetplan.text import number_text


@dataclass(frozen=True)
class Planning:
    """The answer of the planner for a workload. `ranking.make_plans` makes it."""

    workload: Workload = field(repr=False)  # in the winner's precision
    candidates: tuple[Candidate, ...]  # in the order of the ranking, best first
    winner: int | None  # index of the best candidate that fits and meets the criteria
    notes: tuple[str, ...] = ()  # precisions, plans and parts that were left out, and why
    advice: tuple[str, ...] = ()  # where no candidate fits: changes with which one would
    precisions: tuple[str, ...] = ()  # all that were planned
    criteria: Criteria = field(default_factory=Criteria)

    def __str__(self) -> str:
        """A line for each candidate, best first, then the notes and the advice."""
        return "\n".join([*map(str, self.candidates), *self.notes, *self.advice])

    @property
    def best(self) -> Candidate | None:
        """The winning candidate."""
        return None if self.winner is None else self.candidates[self.winner]

    @property
    def bound(self) -> float | None:
        """Lower bound on the replayed seconds of every plan of stages in all planned precisions,
        under every schedule that plans may have; None unless the strategy `joint` has one for each
        precision. Plans with further degrees are included if these were searched."""
        if self.criteria.splits_backward:
            return self.bound_of(self.of_any_order)
        return self.bound_whole

    @property
    def bound_whole(self) -> float | None:
        """The same of plans with whole backward passes under GPipe, 1F1B or interleaved 1F1B."""
        any_order = self.bound_of(self.of_any_order)
        whole = self.bound_of([c for c in self.of_joint if c.method != SCHEDULES])
        known = [bound for bound in (any_order, whole) if bound is not None]
        return max(known, default=None)

    @property
    def of_joint(self) -> list[Candidate]:
        """The candidates of the strategy `joint` on the whole cluster."""
        on_whole_cluster = [c for c in self.candidates if c.variant.part is None]
        return [c for c in on_whole_cluster if c.strategy == Joint.name]

    @property
    def of_any_order(self) -> list[Candidate]:
        """The candidates of `of_joint` whose bounds hold for all orders of passes."""
        return [c for c in self.of_joint if c.method == SCHEDULES]

    def bound_of(self, candidates: Sequence[Candidate]) -> float | None:
        """The bound of plans in all precisions by candidates that have at most one for each."""
        bounds = [c.bound for c in candidates if c.bound is not None]
        # Each bound holds only for plans in its precision.
        if len(bounds) != self.problems:
            return None
        # Plans with further degrees can be faster than these bounds, but not than those by
        # computing alone.
        return min([*bounds, *self.computing_alone])

    @property
    def ladder(self) -> tuple[Rung, ...]:
        """Lower bounds of classes of plans in all planned precisions, each with the fastest plan of
        its class; empty unless the strategy `joint` has them for each precision."""
        ladders = [candidate.ladder for candidate in self.of_joint if candidate.ladder]
        if len(ladders) != self.problems:
            return ()
        ladder = joined_ladders(ladders)
        if self.computing_alone:
            fastest = self.least_seconds(WHOLE_SCHEDULES)
            ladder = with_degrees(ladder, self.computing_alone, fastest)
        if self.criteria.splits_backward and self.bound is not None:
            ladder = with_any_order(ladder, self.bound, self.least_seconds(PASS_SCHEDULES))
        return ladder

    def least_seconds(self, schedules: Collection[str]) -> float | None:
        """Seconds of the fastest plan of stages under one of the schedules that fits in memory;
        None where there is none."""
        seconds = [
            candidate.predicted_seconds
            for candidate in self.candidates
            if candidate.plan is not None
            and candidate.plan.program is None
            and candidate.plan.schedule in schedules
            and candidate.fits_memory
            and candidate.predicted_seconds is not None
        ]
        return min(seconds, default=None)

    @property
    def problems(self) -> int:
        """The number of problems whose plans were searched, one for each precision."""
        return max(len(self.precisions), 1)

    @property
    def computing_alone(self) -> list[float]:
        """Lower bounds on the seconds of plans with further degrees, one for each search of such
        plans."""
        return [c.computing_alone for c in self.candidates if c.computing_alone is not None]

    @property
    def explanation(self) -> Explanation | None:
        """Why the winner takes as long as it does; None without a winner."""
        if self.winner is None:
            return None
        explained = explain(
            self.candidates, self.winner, self.workload, self.criteria.cheapest_within
        )
        limit = self.criteria.seconds_limit
        if limit is None or explained.why_chosen:
            return explained
        within = f"whose iteration takes at most {number_text(limit, 4)} s"
        return replace(explained, why_chosen=f"the cheapest of the plans {within}")

    def document(self) -> dict[str, Any]:
        """The answer as JSON types."""
        explained = self.explanation
        return {
            "workload": {**workload_document(self.workload), "precisions": list(self.precisions)},
            "candidates": [
                candidate.document(self.workload, with_inputs=number == self.winner)
                for number, candidate in enumerate(self.candidates)
            ],
            "winner": self.winner,
            "bound": self.bound,
            "bound_whole": self.bound_whole,
            "ladder": documents(self.ladder),
            "zero_levels": list(self.criteria.zero_levels) or None,
            "pareto": pareto(self.candidates, self.workload),
            "notes": list(self.notes),
            "advice": list(self.advice),
            "explanation": None if explained is None else explained.document(),
        }


def workload_document(workload: Workload) -> dict[str, Any]:
    """The workload that was planned, as JSON types."""
    return {
        "model": workload.model.name,
        "parameters": workload.model.params,
        "layers": len(workload.profile.layers),
        "cluster": workload.cluster.name,
        "devices": workload.cluster.counts(),
        "global_batch": workload.global_batch,
        "sequence": workload.sequence,
        "precision": workload.precision,
        "tokens_per_iteration": workload.tokens_per_iteration,
        "state_bytes": workload.state_bytes,
        "usable_bytes": workload.device_bytes(),
        "price_per_hour": workload.cluster.price_per_hour(),
        "profile": workload.profile.provenance.model_dump(mode="json"),
    }
