"""Judging claims: the evaluator prices every decision again, and what is stated beside it has to
agree.

(1) a decision breaks no constraint            (2) the objective stated is the decision's
(3) the gap stated is (objective - bound) / objective
(4) `optimal` has a bound that proves it (gap <= 1e-6); `optimal` and `feasible` have a decision,
    and `infeasible` and `unknown` have none, nor an objective
(5) no bound lies above a decision that holds, and nothing is infeasible where one holds, whoever
found it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hetplan.instances.answers import Claim
from hetplan.instances.envelope import Instance
from hetplan.solvers.registry import Evaluation, evaluate
from hetplan.solvers.result import OPTIMAL_GAP, relative_gap

# Stated and recomputed objectives are equal up to this relative difference, gaps up to it as a
# difference.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Verdict:
    """A claim as judged; `complaints` are violations and disagreements, one line each.

    evaluation: None where there is no decision to price.
    """

    claim: Claim
    evaluation: Evaluation | None
    complaints: tuple[str, ...]

    @property
    def objective(self) -> float | None:
        """What the decision is worth; None without one, or where it breaks a constraint."""
        return None if self.evaluation is None else self.evaluation.objective

    @property
    def holds(self) -> bool | None:
        """Whether everything stated is right; None where that cannot be told, for want of a
        decision."""
        if self.complaints:
            return False
        return None if self.evaluation is None else True

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "source": self.claim.source,
            "valid": self.holds,
            "objective": self.objective,
            "stated_status": self.claim.status,
            "stated_objective": self.claim.objective,
            "stated_bound": self.claim.bound,
            "stated_gap": self.claim.gap,
            "parts": {} if self.evaluation is None else dict(self.evaluation.parts),
            "complaints": list(self.complaints),
        }


def judge(claims: Sequence[Claim], instance: Instance) -> list[Verdict]:
    """One verdict per claim; claims about one instance are held against each other, too."""
    priced = [
        None if claim.decision is None else evaluate(instance.family, instance.data, claim.decision)
        for claim in claims
    ]
    found = [
        (e.objective, claim)
        for e, claim in zip(priced, claims, strict=True)
        if e and e.objective is not None
    ]
    best = min(found, key=lambda pair: pair[0], default=None)
    verdicts = []
    for claim, evaluation in zip(claims, priced, strict=True):
        complaints = [] if evaluation is None else list(evaluation.violations)
        worth = None if evaluation is None else evaluation.objective
        complaints += figures(claim, worth)
        complaints += status(claim, worth)
        if best is not None:
            complaints += against(claim, *best)
        verdicts.append(Verdict(claim, evaluation, tuple(complaints)))
    return verdicts


def figures(claim: Claim, objective: float | None) -> Iterator[str]:
    """(2) and (3); `objective` is the evaluator's."""
    stated = claim.objective
    if stated is not None and objective is not None and abs(stated - objective) > slack(objective):
        yield f"stated objective {stated!r} is not the decision's ({objective!r})"
    if claim.gap is not None:
        gap = relative_gap(objective if stated is None else stated, claim.bound)
        if gap is None:
            yield f"stated gap {claim.gap!r} without an objective and a bound"
        elif abs(claim.gap - gap) > TOLERANCE:
            yield f"stated gap {claim.gap!r} is not that of objective and bound ({gap!r})"


def status(claim: Claim, objective: float | None) -> Iterator[str]:
    """(4); `objective` is the evaluator's."""
    found = claim.decision is not None
    if claim.status in ("optimal", "feasible") and not found:
        yield f"stated {claim.status} without a decision"
    if claim.status in ("infeasible", "unknown") and found:
        yield f"stated {claim.status} with a decision"
    if claim.objective is not None and not found:
        yield f"stated objective {claim.objective!r} without a decision"
    if claim.status == "optimal" and found:
        gap = relative_gap(objective if claim.objective is None else claim.objective, claim.bound)
        if claim.bound is None:
            yield "stated optimal without a bound that proves it"
        elif gap is not None and gap > OPTIMAL_GAP * (1 + TOLERANCE):
            yield f"stated optimal with a gap of {gap!r}, expected at most {OPTIMAL_GAP!r}"


def against(claim: Claim, objective: float, holder: Claim) -> Iterator[str]:
    """(5): what the best decision that holds refutes."""
    whose = (
        "the decision's objective"
        if holder is claim
        else f"the objective of {holder.source}'s decision"
    )
    if claim.bound is not None and claim.bound > objective + slack(objective):
        yield f"stated bound {claim.bound!r} exceeds {whose} ({objective!r})"
    if claim.status == "infeasible" and holder is not claim:
        yield f"stated infeasible, but {holder.source}'s decision holds"


def slack(objective: float) -> float:
    """How far a figure may lie from a recomputed objective."""
    return TOLERANCE * max(abs(objective), 1e-300)
