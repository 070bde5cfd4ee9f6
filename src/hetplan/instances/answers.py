"""The answer document: what `solve --json` prints, and what `check` reads back and judges.

    {"instance": …, "problem": …, "results": [{"method", "status", "objective", "bound", "gap",
     "seconds", "decision", …} …]}

Objectives and bounds are in the instance's unit (seconds); unknown is null. What is read back are
claims; the evaluator prices every decision again, and what is stated beside it has to agree:
(1) a decision breaks no constraint            (2) the objective stated is the decision's
(3) the gap stated is (objective - bound) / objective
(4) `optimal` has a bound that proves it (gap <= 1e-6); `optimal` and `feasible` have a decision,
    and `infeasible` and `unknown` have none, nor an objective
(5) no bound lies above a decision that holds, and nothing is infeasible where one holds, whoever
    found it
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from hetplan import __version__
from hetplan.errors import require
from hetplan.instances.library import BEST_FORMAT, BestKnown, Instance, plain
from hetplan.profiling.foreign import Foreign
from hetplan.schema import Name, parse
from hetplan.solvers.registry import Evaluation, evaluate
from hetplan.solvers.run import OPTIMAL_GAP, Result, relative_gap
from hetplan.text import lines_that_hold

Status = Literal["optimal", "feasible", "infeasible", "unknown"]
Figure = Annotated[float, Field(allow_inf_nan=False)]
# Stated and recomputed objectives are equal up to this relative difference, gaps up to it as a
# difference.
TOLERANCE = 1e-6


class Answer(Foreign):
    """The part of one result that `check` looks at; other keys are another program's business."""

    method: Name
    status: Status | None = None
    objective: Figure | None = None
    bound: Figure | None = None
    gap: Figure | None = None
    decision: dict[str, Any] | None = None
    solver: str | None = None


class AnswerFile(Foreign):
    """An answer document as read back."""

    instance: Name
    problem: Name
    results: list[Answer]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What somebody states of a decision, or of there being none; None: nothing is stated."""

    source: str  # the method, or where it stands
    decision: Any = None  # a model of the family's
    status: Status | None = None
    objective: float | None = None
    bound: float | None = None
    gap: float | None = None


@dataclass(frozen=True)
class Verdict:
    """A claim as judged."""

    claim: Claim
    evaluation: Evaluation | None  # None where there is no decision to price
    complaints: tuple[str, ...]  # violations and disagreements, one line each

    @property
    def objective(self) -> float | None:
        """What the decision is worth; None without one, or where it breaks a constraint."""
        return None if self.evaluation is None else self.evaluation.objective

    @property
    def holds(self) -> bool | None:
        """Whether everything stated is right; None where that cannot be told, for want of a
        decision."""
        judged = None if self.evaluation is None else True
        return False if self.complaints else judged

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


def result_document(result: Result[Any]) -> dict[str, Any]:
    """One result as JSON types; the decision is null where none was found."""
    first = ("method", "status", "objective", "bound", "gap", "seconds")
    last = ("message", "solver", "build_seconds", "solve_seconds")
    return {
        **{name: getattr(result, name) for name in first},
        "decision": None if result.decision is None else plain(result.decision),
        **{name: getattr(result, name) for name in last},
        "stop": str(result.stop),
        "details": dict(result.details),
    }


def answer_document(
    instance: Instance, results: Sequence[Result[Any]], options: dict[str, object]
) -> dict[str, Any]:
    """The whole answer: results in the order in which the methods ran, and the options that they
    got."""
    return {
        "instance": instance.name,
        "problem": instance.problem,
        "results": [result_document(result) for result in results],
        "options": options,
        "hetplan": __version__,
    }


def read_claims(value: Any, instance: Instance, *, where: str) -> list[Claim]:
    """What an answer document, a best-known record or a raw decision claims; raises InputError."""
    if isinstance(value, dict) and value.get("format") == BEST_FORMAT:
        best = BestKnown.parsed(value, where=where)
        check_problem(best.problem, instance, where)
        return [claim_of_record(best, instance, where)]
    if not isinstance(value, dict) or "results" not in value:
        return [Claim(source="decision", decision=parse_decision(value, instance, where))]
    answers = parse(AnswerFile, value, where=where)
    check_problem(answers.problem, instance, where)
    require(
        bool(answers.results),
        "is empty",
        where=f"{where}: results",
        expected="one result at least",
    )
    return [
        claim_of(answer, instance, where, "results", i, "decision")
        for i, answer in enumerate(answers.results)
    ]


def claim_of(answer: Answer, instance: Instance, where: str, *place: int | str) -> Claim:
    """What an answer claims; raises InputError where its decision, at `place`, is malformed."""
    decision = answer.decision
    return Claim(
        source=answer.method,
        decision=None if decision is None else parse_decision(decision, instance, where, *place),
        status=answer.status,
        objective=answer.objective,
        bound=answer.bound,
        gap=answer.gap,
    )


def claim_of_record(best: BestKnown, instance: Instance, where: str) -> Claim:
    """What a best-known record claims; raises InputError where its decision is malformed."""
    return Claim(
        source=best.found_by,
        decision=parse_decision(best.decision, instance, where, "decision"),
        objective=best.objective,
        bound=best.bound,
    )


def parse_decision(value: Any, instance: Instance, where: str, *place: int | str) -> Any:
    """A decision of the instance's problem from parsed JSON; raises InputError."""
    return parse(instance.family.load_decision(), value, where=where, prefix=place)


def check_problem(problem: str, instance: Instance, where: str) -> None:
    """Refuse the answer to another problem."""
    require(
        problem == instance.problem,
        "answers another problem",
        where=f"{where}: problem",
        got=problem,
        expected=f"{instance.problem}, the problem of {instance.name}",
    )


def judge(claims: Sequence[Claim], instance: Instance) -> list[Verdict]:
    """One verdict per claim; claims about one instance are held against each other, too."""
    priced = [
        None if claim.decision is None else evaluate(instance.family, instance.data, claim.decision)
        for claim in claims
    ]
    holding = [
        (e.objective, claim)
        for e, claim in zip(priced, claims, strict=True)
        if e and e.objective is not None
    ]
    best = min(holding, key=lambda pair: pair[0], default=None)
    verdicts = []
    for claim, evaluation in zip(claims, priced, strict=True):
        worth = None if evaluation is None else evaluation.objective
        violations = () if evaluation is None else evaluation.violations
        verdicts.append(Verdict(claim, evaluation, (*violations, *complaints(claim, worth, best))))
    return verdicts


def complaints(
    claim: Claim, objective: float | None, best: tuple[float, Claim] | None
) -> list[str]:
    """What (2) to (5) have against a claim. objective: the evaluator's, of the claim's decision;
    best: the least objective of all decisions that hold, and who claims it."""
    stated, status, gap, bound = claim.objective, claim.status, claim.gap, claim.bound
    known, own_gap = (
        claim.decision is not None,
        relative_gap(objective if stated is None else stated, bound),
    )
    least, holder = best or (math.inf, claim)
    whose = "the decision's objective"
    if holder is not claim:
        whose = f"the objective of {holder.source}'s decision"
    against = {
        # (2)
        f"stated objective {stated!r} is not the decision's ({objective!r})": (
            stated is not None
            and objective is not None
            and abs(stated - objective) > slack(objective)
        ),
        # (3)
        f"stated gap {gap!r} without an objective and a bound": (
            gap is not None and own_gap is None
        ),
        f"stated gap {gap!r} is not that of objective and bound ({own_gap!r})": (
            gap is not None and own_gap is not None and abs(gap - own_gap) > TOLERANCE
        ),
        # (4)
        f"stated {status} without a decision": not known and status in ("optimal", "feasible"),
        f"stated objective {stated!r} without a decision": not known and stated is not None,
        f"stated {status} with a decision": known and status in ("infeasible", "unknown"),
        "stated optimal without a bound that proves it": (
            known and status == "optimal" and bound is None
        ),
        f"stated optimal with a gap of {own_gap!r}, expected at most {OPTIMAL_GAP!r}": (
            known
            and status == "optimal"
            and own_gap is not None
            and own_gap > OPTIMAL_GAP * (1 + TOLERANCE)
        ),
        # (5)
        f"stated bound {bound!r} exceeds {whose} ({least!r})": (
            bound is not None and bound > least + slack(least)
        ),
        f"stated infeasible, but {holder.source}'s decision holds": (
            status == "infeasible" and holder is not claim
        ),
    }
    return lines_that_hold(against)


def slack(objective: float) -> float:
    """How far a figure may lie from a recomputed objective."""
    return TOLERANCE * max(abs(objective), 1e-300)
