"""The answer to a planned workload: candidates in their order, the winner, and what is proven."""

from dataclasses import dataclass, field
from typing import Any

from hetplan.planner.candidate import Candidate
from hetplan.planner.criteria import Criteria, pareto
from hetplan.planner.explain import Explanation, explain
from hetplan.planner.joint import Joint
from hetplan.profiling.workload import Workload


@dataclass(frozen=True)
class Planning:
    """The answer to a planned workload."""

    workload: Workload = field(repr=False)  # in the winner's precision
    candidates: tuple[Candidate, ...]  # best first
    winner: int | None  # index of the best one that fits and meets the criteria
    notes: tuple[str, ...] = ()  # what was tried in vain
    advice: tuple[str, ...] = ()  # what would make one fit, where nothing fits
    precisions: tuple[str, ...] = ()  # all that were planned
    criteria: Criteria = field(default_factory=Criteria)

    def __str__(self) -> str:
        """A line for each candidate, best first, then notes and what would fit."""
        return "\n".join([*map(str, self.candidates), *self.notes, *self.advice])

    @property
    def best(self) -> Candidate | None:
        """The winner itself."""
        return None if self.winner is None else self.candidates[self.winner]

    @property
    def bound(self) -> float | None:
        """Seconds that no chain of stages replays below, in any of the precisions, nor one with
        further degrees where these were searched (`computing_alone`); None where the sixth problem
        was not posed of each."""
        bounds = [
            c.bound for c in self.candidates if c.strategy == Joint.name and not c.variant.part
        ]
        known = [bound for bound in bounds if bound is not None]
        every = len(known) == max(len(self.precisions), 1)
        return min([*known, *self.computing_alone]) if every else None

    @property
    def computing_alone(self) -> list[float]:
        """The bound of each search over further degrees: seconds that none of its plans replays
        below."""
        return [c.computing_alone for c in self.candidates if c.computing_alone is not None]

    @property
    def explanation(self) -> Explanation | None:
        """Why the winner takes as long as it does; None without one."""
        if self.winner is None:
            return None
        return explain(self.candidates, self.winner, self.workload, self.criteria.cheapest_within)

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        explained = self.explanation
        return {
            "workload": {**workload_document(self.workload), "precisions": list(self.precisions)},
            "candidates": [
                candidate.document(self.workload, with_inputs=number == self.winner)
                for number, candidate in enumerate(self.candidates)
            ],
            "winner": self.winner,
            "bound": self.bound,
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
