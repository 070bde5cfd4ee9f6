"""The answer document: what `solve --json` prints, and what `check` reads back.

    {"instance": …, "problem": …, "results": [{"method", "status", "objective", "bound", "gap", "seconds",
     "decision", …} …]}

Objectives and bounds are in the instance's unit (seconds); unknown is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from hetplan import __version__
from hetplan.errors import InputError
from hetplan.instances.envelope import Instance, plain
from hetplan.instances.library import BEST_FORMAT, parse_best_known
from hetplan.schema import Name, NonNegative, parse
from hetplan.solvers.registry import Evaluation, evaluate
from hetplan.solvers.result import Result

# Stated and recomputed objectives are equal up to this relative difference.
TOLERANCE = 1e-6


class Answer(BaseModel):
    """The part of one result that `check` looks at; other keys are another program's business."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    method: Name
    objective: NonNegative | None = None
    bound: NonNegative | None = None
    decision: dict[str, Any] | None = None


class AnswerFile(BaseModel):
    """An answer document as read back."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    instance: Name
    problem: Name
    results: list[Answer]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A decision that somebody states, with what they say of it. source: method, or where it stands."""

    source: str
    decision: Any
    objective: float | None = None
    bound: float | None = None


@dataclass(frozen=True)
class Verdict:
    """A claim as judged by the evaluator; `complaints` are violations and disagreements, one line each."""

    claim: Claim
    evaluation: Evaluation
    complaints: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "source": self.claim.source,
            "valid": not self.complaints,
            "objective": self.evaluation.objective,
            "stated_objective": self.claim.objective,
            "stated_bound": self.claim.bound,
            "parts": dict(self.evaluation.parts),
            "complaints": list(self.complaints),
        }


def result_document(result: Result[Any]) -> dict[str, Any]:
    """One result as JSON types; the decision is null where none was found."""
    return {
        "method": result.method,
        "status": result.status,
        "objective": result.objective,
        "bound": result.bound,
        "gap": result.gap,
        "seconds": result.seconds,
        "decision": None if result.decision is None else plain(result.decision),
        "message": result.message,
        "stop": str(result.stop),
        "solver": result.solver,
        "build_seconds": result.build_seconds,
        "solve_seconds": result.solve_seconds,
        "details": dict(result.details),
    }


def answer_document(
    instance: Instance, results: Sequence[Result[Any]], options: dict[str, object]
) -> dict[str, Any]:
    """The whole answer: results in the order in which the methods ran, and the options that they got."""
    return {
        "instance": instance.name,
        "problem": instance.problem,
        "results": [result_document(result) for result in results],
        "options": options,
        "hetplan": __version__,
    }


def read_claims(value: Any, instance: Instance, *, where: str) -> list[Claim]:
    """The decisions in an answer document, a best-known record or a raw decision; raises InputError."""
    if isinstance(value, dict) and value.get("format") == BEST_FORMAT:
        best = parse_best_known(value, where=where)
        check_problem(best.problem, instance, where)
        decision = parse_decision(best.decision, instance, where, "decision")
        return [Claim(source=best.found_by, decision=decision, objective=best.objective, bound=best.bound)]
    if isinstance(value, dict) and "results" in value:
        answers = parse(AnswerFile, value, where=where)
        check_problem(answers.problem, instance, where)
        found = [
            Claim(
                source=answer.method,
                decision=parse_decision(answer.decision, instance, where, "results", i, "decision"),
                objective=answer.objective,
                bound=answer.bound,
            )
            for i, answer in enumerate(answers.results)
            if answer.decision is not None
        ]
        if not found:
            raise InputError("holds no decision", where=f"{where}: results", expected="one at least")
        return found
    return [Claim(source="decision", decision=parse_decision(value, instance, where))]


def parse_decision(value: Any, instance: Instance, where: str, *place: int | str) -> Any:
    """A decision of the instance's problem from parsed JSON; raises InputError."""
    return parse(instance.family.load_decision(), value, where=where, prefix=place)


def check_problem(problem: str, instance: Instance, where: str) -> None:
    """Refuse the answer to another problem."""
    if problem != instance.problem:
        expected = f"{instance.problem}, the problem of {instance.name}"
        raise InputError("answers another problem", where=f"{where}: problem", got=problem, expected=expected)


def judge(claim: Claim, instance: Instance) -> Verdict:
    """The evaluator's word on a claim: violations, another objective than stated, a bound above it."""
    evaluation = evaluate(instance.family, instance.data, claim.decision)
    complaints = list(evaluation.violations)
    objective = evaluation.objective
    if objective is not None:
        slack = TOLERANCE * max(objective, 1e-300)
        if claim.objective is not None and abs(claim.objective - objective) > slack:
            complaints.append(f"stated objective {claim.objective!r} is not the decision's ({objective!r})")
        if claim.bound is not None and claim.bound > objective + slack:
            complaints.append(
                f"stated bound {claim.bound!r} exceeds the decision's objective ({objective!r})"
            )
    return Verdict(claim, evaluation, tuple(complaints))
