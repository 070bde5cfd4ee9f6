"""Answer documents: the module writes them, reads them and judges them.

An answer document is the output of `solve --json`, which `check` reads back:

    {"instance": …, "problem": …, "results": [{"method", "status", "objective", "bound", "gap",
     "seconds", "decision", …} …]}

of one instance, or {"answers": [such documents]} of several. Objectives and bounds are in the
instance's unit (seconds); unknown is null. The results of a document are claims: the evaluator
prices every decision again, and the stated figures have to agree:
(1) a decision breaks no constraint            (2) the objective stated is the decision's
(3) the gap stated is (objective - bound) / objective
(4) `optimal` has a bound that proves it (gap <= 1e-6); `optimal` and `feasible` have a decision,
    and `infeasible` and `unknown` have none, nor an objective
(5) no bound lies above the objective of a valid decision, and no instance with a valid decision is
    infeasible, whichever method found the decision
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from hetplan import __version__
from hetplan.errors import require
from hetplan.instances.library import (
    BEST_FORMAT,
    BestKnown,
    Instance,
    plain,
)
from hetplan.schema import Foreign, Name, parse
from hetplan.solvers.registry import Evaluation, contradictions, evaluate
from hetplan.solvers.run import OPTIMAL_GAP, Result, relative_gap

Status = Literal["optimal", "feasible", "infeasible", "unknown"]
Figure = Annotated[float, Field(allow_inf_nan=False)]
# Stated and recomputed objectives are equal up to this relative difference, gaps up to it as a
# difference. It is as large as OPTIMAL_GAP, since no proof tells closer objectives apart.
TOLERANCE = 1e-6


class Answer(Foreign):
    """The keys of a result in an answer document that `check` reads; it ignores all others."""

    method: Name
    status: Status | None = None
    objective: Figure | None = None
    bound: Figure | None = None
    gap: Figure | None = None
    decision: dict[str, Any] | None = None
    solver: str | None = None


class AnswerFile(Foreign):
    """The keys of an answer document that `check` reads."""

    instance: Name
    problem: Name
    results: list[Answer]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A decision and the figures that a document states of it; None: not stated."""

    source: str  # the method that made the decision, or the place where the decision stands
    decision: Any = None  # a model of the family's decision schema
    status: Status | None = None
    objective: float | None = None
    bound: float | None = None
    gap: float | None = None


@dataclass(frozen=True)
class Verdict:
    """The judgement of a claim, as `judge` returns it."""

    claim: Claim
    evaluation: Evaluation | None  # the evaluator's; None where there is no decision to price
    complaints: tuple[str, ...]  # violations and disagreements, one line each

    @property
    def objective(self) -> float | None:
        """The decision's objective; None without a decision, or where it breaks a constraint."""
        return None if self.evaluation is None else self.evaluation.objective

    @property
    def holds(self) -> bool | None:
        """Whether the claim's statements are right; None where that is unknown, for want of a
        decision."""
        if self.complaints:
            return False
        return None if self.evaluation is None else True

    def document(self) -> dict[str, Any]:
        """The judgement as JSON types."""
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
    """One result of an answer document as JSON types; its decision is null where the method found
    none."""
    return {
        "method": result.method,
        "status": result.status,
        "objective": result.objective,
        "bound": result.bound,
        "gap": result.gap,
        "seconds": result.seconds,
        "decision": None if result.decision is None else plain(result.decision),
        "message": result.message,
        "solver": result.solver,
        "build_seconds": result.build_seconds,
        "solve_seconds": result.solve_seconds,
        "stop": str(result.stop),
        "details": dict(result.details),
    }


def answer_document(
    instance: Instance, results: Sequence[Result[Any]], options: dict[str, object]
) -> dict[str, Any]:
    """The answer document of an instance as JSON types: the results in the order in which the
    methods ran, the contradictions among them, and the options of the runs."""
    return {
        "instance": instance.name,
        "problem": instance.problem,
        "results": [result_document(result) for result in results],
        "contradictions": contradictions(results),
        "options": options,
        "hetplan": __version__,
    }


def read_claims(value: Any, instance: Instance, *, where: str) -> list[Claim]:
    """The claims about an instance in an answer document, a best-known record, or a bare decision.

    Claims about other instances are left out. value: the parsed JSON. where: its source, for
    errors. Raises InputError.
    """
    if isinstance(value, dict) and value.get("format") == BEST_FORMAT:
        best = BestKnown.parsed(value, where=where)
        check_problem(best.problem, instance, where)
        return [claim_of_record(best, instance, where)]
    if not isinstance(value, dict) or not {"answers", "results"} & value.keys():
        return [Claim(source="decision", decision=parse_decision(value, instance, where))]
    documents = answers_by_place(value, where)
    position = 0
    if "answers" in value:
        names = [answers.instance for answers, _ in documents]
        require(
            instance.name in names,
            "no answer for this instance",
            where=where,
            got=", ".join(names),
            expected=instance.name,
        )
        position = names.index(instance.name)
    answers, place = documents[position]
    check_problem(answers.problem, instance, place)
    require(
        bool(answers.results),
        "is empty",
        where=f"{place}: results",
        expected="one result at least",
    )
    return [
        claim_of(answer, instance, place, "results", i, "decision")
        for i, answer in enumerate(answers.results)
    ]


def answers_by_place(value: Any, where: str) -> list[tuple[AnswerFile, str]]:
    """The answers of a document for each of its instances, with their place in it, for errors.

    value: the parsed JSON. where: the document's source. Raises InputError.
    """
    if not isinstance(value, dict) or "answers" not in value:
        return [(parse(AnswerFile, value, where=where), where)]
    documents = value["answers"]
    require(isinstance(documents, list), "not a list", where=f"{where}: answers")
    places = [f"{where}: answers[{i}]" for i in range(len(documents))]
    return [
        (parse(AnswerFile, document, where=place), place)
        for document, place in zip(documents, places, strict=True)
    ]


def claim_of(answer: Answer, instance: Instance, where: str, *place: int | str) -> Claim:
    """The claim of a result. place: the keys that lead to the result's decision, for the InputError
    that a malformed decision raises."""
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
    """The claim of a best-known record. Raises InputError where its decision is malformed."""
    return Claim(
        source=best.found_by,
        decision=parse_decision(best.decision, instance, where, "decision"),
        objective=best.objective,
        bound=best.bound,
    )


def parse_decision(value: Any, instance: Instance, where: str, *place: int | str) -> Any:
    """A decision of the instance's problem from parsed JSON. place: the keys that lead to it in its
    document, for the InputError that a malformed decision raises."""
    return parse(instance.family.load_decision(), value, where=where, prefix=place)


def check_problem(problem: str, instance: Instance, where: str) -> None:
    """Raise InputError where a document answers another problem than the instance's."""
    require(
        problem == instance.problem,
        "answers another problem",
        where=f"{where}: problem",
        got=problem,
        expected=f"{instance.problem}, the problem of {instance.name}",
    )


def judge(claims: Sequence[Claim], instance: Instance) -> list[Verdict]:
    """The verdict on each claim about an instance. The best valid decision of all claims also
    counts against the others."""
    evaluations: list[Evaluation | None] = []
    best: tuple[float, Claim] | None = None  # (objective, its claim) of the best valid decision
    for claim in claims:
        evaluation = None
        if claim.decision is not None:
            evaluation = evaluate(instance.family, instance.data, claim.decision)
            objective = evaluation.objective
            if objective is not None and (best is None or objective < best[0]):
                best = (objective, claim)
        evaluations.append(evaluation)
    verdicts = []
    for claim, evaluation in zip(claims, evaluations, strict=True):
        lines: list[str] = []
        objective = None
        if evaluation is not None:
            lines += evaluation.violations  # (1)
            objective = evaluation.objective
        lines += complaints(claim, objective, best)
        verdicts.append(Verdict(claim, evaluation, tuple(lines)))
    return verdicts


def complaints(
    claim: Claim, objective: float | None, best: tuple[float, Claim] | None
) -> list[str]:
    """A line for each of the conditions (2) to (5) that a claim violates.

    objective: the evaluator's objective of the claim's decision; None without a valid decision.
    best: the least objective of all valid decisions, and its claim; None where there is none.
    """
    # The gap stated is that of the objective stated, which `wrong_objective` compares.
    objective_of_gap = objective if claim.objective is None else claim.objective
    gap = relative_gap(objective_of_gap, claim.bound)
    return [
        *wrong_objective(claim, objective),
        *wrong_gap(claim, gap),
        *wrong_status(claim, gap),
        *refuted_by_the_best(claim, best),
    ]


def wrong_objective(claim: Claim, objective: float | None) -> Iterator[str]:  # (2)
    """A complaint where the stated objective is not that of the decision."""
    stated = claim.objective
    if stated is None or objective is None:
        return
    if abs(stated - objective) > slack(objective):
        yield f"stated objective {stated!r} is not the decision's ({objective!r})"


def wrong_gap(claim: Claim, gap: float | None) -> Iterator[str]:  # (3)
    """A complaint where the stated gap is not `gap`, the gap of objective and bound."""
    if claim.gap is None:
        return
    if gap is None:
        yield f"stated gap {claim.gap!r} without an objective and a bound"
    elif abs(claim.gap - gap) > TOLERANCE:
        yield f"stated gap {claim.gap!r} is not that of objective and bound ({gap!r})"


def wrong_status(claim: Claim, gap: float | None) -> Iterator[str]:  # (4)
    """A complaint for each part of the claim that contradicts its status. gap: the gap of objective
    and bound."""
    status = claim.status
    if claim.decision is None:
        if status in ("optimal", "feasible"):
            yield f"stated {status} without a decision"
        if claim.objective is not None:
            yield f"stated objective {claim.objective!r} without a decision"
        return
    if status in ("infeasible", "unknown"):
        yield f"stated {status} with a decision"
    if status == "optimal" and claim.bound is None:
        yield "stated optimal without a bound that proves it"
    # A solver that stops at a gap of just OPTIMAL_GAP may round it otherwise than `relative_gap`.
    if status == "optimal" and gap is not None and gap > OPTIMAL_GAP * (1 + TOLERANCE):
        yield f"stated optimal with a gap of {gap!r}, expected at most {OPTIMAL_GAP!r}"


def refuted_by_the_best(claim: Claim, best: tuple[float, Claim] | None) -> Iterator[str]:  # (5)
    """A complaint where the stated bound is above the best valid decision, and one where the
    instance is stated to be infeasible although there is a valid decision."""
    if best is None:
        return
    least, holder = best
    whose = "the decision's objective"
    if holder is not claim:
        whose = f"the objective of {holder.source}'s decision"
    if claim.bound is not None and claim.bound > least + slack(least):
        yield f"stated bound {claim.bound!r} exceeds {whose} ({least!r})"
    # `wrong_status` complains of a claim that has a decision itself and says infeasible.
    if claim.status == "infeasible" and holder is not claim:
        yield f"stated infeasible, but {holder.source}'s decision holds"


def slack(objective: float) -> float:
    """The largest difference from a recomputed objective that still counts as rounding."""
    return TOLERANCE * abs(objective)
