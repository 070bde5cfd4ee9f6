"""The answer document: what `solve --json` prints, and what `check` reads back.

    {"instance": …, "problem": …, "results": [{"method", "status", "objective", "bound", "gap",
     "seconds", "decision", …} …]}

Objectives and bounds are in the instance's unit (seconds); unknown is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hetplan import __version__
from hetplan.errors import InputError
from hetplan.instances.envelope import Instance, plain
from hetplan.instances.library import BEST_FORMAT, parse_best_known
from hetplan.schema import Name, parse
from hetplan.solvers.result import Result

Status = Literal["optimal", "feasible", "infeasible", "unknown"]
Figure = Annotated[float, Field(allow_inf_nan=False)]


class Answer(BaseModel):
    """The part of one result that `check` looks at; other keys are another program's business."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    method: Name
    status: Status | None = None
    objective: Figure | None = None
    bound: Figure | None = None
    gap: Figure | None = None
    decision: dict[str, Any] | None = None
    solver: str | None = None


class AnswerFile(BaseModel):
    """An answer document as read back."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    instance: Name
    problem: Name
    results: list[Answer]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What somebody states of a decision, or of there being none; None: nothing is stated.

    source: method, or where it stands. decision: a model of the family's, None where no decision is
    given.
    """

    source: str
    decision: Any = None
    status: Status | None = None
    objective: float | None = None
    bound: float | None = None
    gap: float | None = None


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
        best = parse_best_known(value, where=where)
        check_problem(best.problem, instance, where)
        decision = parse_decision(best.decision, instance, where, "decision")
        return [
            Claim(
                source=best.found_by, decision=decision, objective=best.objective, bound=best.bound
            )
        ]
    if isinstance(value, dict) and "results" in value:
        answers = parse(AnswerFile, value, where=where)
        check_problem(answers.problem, instance, where)
        if not answers.results:
            raise InputError("is empty", where=f"{where}: results", expected="one result at least")
        return [claim_of(answer, i, instance, where) for i, answer in enumerate(answers.results)]
    return [Claim(source="decision", decision=parse_decision(value, instance, where))]


def claim_of(answer: Answer, index: int, instance: Instance, where: str) -> Claim:
    """The result number `index` of an answer document; raises InputError where its decision is
    malformed."""
    decision = answer.decision
    if decision is not None:
        decision = parse_decision(decision, instance, where, "results", index, "decision")
    return Claim(
        source=answer.method,
        decision=decision,
        status=answer.status,
        objective=answer.objective,
        bound=answer.bound,
        gap=answer.gap,
    )


def parse_decision(value: Any, instance: Instance, where: str, *place: int | str) -> Any:
    """A decision of the instance's problem from parsed JSON; raises InputError."""
    return parse(instance.family.load_decision(), value, where=where, prefix=place)


def check_problem(problem: str, instance: Instance, where: str) -> None:
    """Refuse the answer to another problem."""
    if problem != instance.problem:
        expected = f"{instance.problem}, the problem of {instance.name}"
        raise InputError(
            "answers another problem", where=f"{where}: problem", got=problem, expected=expected
        )
