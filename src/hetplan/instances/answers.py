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

Best-known records, bettered by what answers bring: only upwards in quality, and never on
anybody's word alone.

An objective is taken where the independent evaluator prices the decision below the record's. A
bound cannot be priced again: it is taken from exact methods only, where the finding is certainly
about this very instance (its key says so, or its own decision is worth here what it states), where
it lies above the record's and no decision known refutes it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from hetplan import __version__
from hetplan.errors import InputError, require
from hetplan.files import to_json, write_text
from hetplan.instances.library import (
    BEST_FORMAT,
    BestKnown,
    Entry,
    Instance,
    entries_in,
    library,
    plain,
)
from hetplan.schema import Foreign, Name, parse
from hetplan.solvers.registry import Evaluation, contradictions, evaluate
from hetplan.solvers.run import OPTIMAL_GAP, Result, relative_gap
from hetplan.text import grouped

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
    """A decision and the figures that somebody states of it; None: a figure is not stated."""

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
        """The decision's objective; None without a decision, or where it breaks a constraint."""
        return None if self.evaluation is None else self.evaluation.objective

    @property
    def holds(self) -> bool | None:
        """Whether everything stated is right; None where that cannot be told, for want of a
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
        "solver": result.solver,
        "build_seconds": result.build_seconds,
        "solve_seconds": result.solve_seconds,
        "stop": str(result.stop),
        "details": dict(result.details),
    }


def answer_document(
    instance: Instance, results: Sequence[Result[Any]], options: dict[str, object]
) -> dict[str, Any]:
    """The whole answer: results in the order in which the methods ran, what contradicts itself in
    them, and the options that they got."""
    return {
        "instance": instance.name,
        "problem": instance.problem,
        "results": [result_document(result) for result in results],
        "contradictions": contradictions(results),
        "options": options,
        "hetplan": __version__,
    }


def read_claims(value: Any, instance: Instance, *, where: str) -> list[Claim]:
    """The claims of an answer document, a best-known record or a raw decision; raises
    InputError."""
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
    """The claim of an answer; raises InputError where its decision, at `place`, is malformed."""
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
    """The claim of a best-known record; raises InputError where its decision is malformed."""
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
    evaluations: list[Evaluation | None] = []
    best: tuple[float, Claim] | None = None
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
        if evaluation is None:
            against = complaints(claim, None, best)
        else:
            against = [*evaluation.violations, *complaints(claim, evaluation.objective, best)]
        verdicts.append(Verdict(claim, evaluation, tuple(against)))
    return verdicts


def complaints(
    claim: Claim, objective: float | None, best: tuple[float, Claim] | None
) -> list[str]:
    """Every line that (2) to (5) have against a claim. objective: the evaluator's, of the claim's
    decision; best: the least objective of all decisions that hold, and who claims it."""
    gap = relative_gap(objective if claim.objective is None else claim.objective, claim.bound)
    return [
        *wrong_objective(claim, objective),
        *wrong_gap(claim, gap),
        *wrong_status(claim, gap),
        *refuted_by_the_best(claim, best),
    ]


def wrong_objective(claim: Claim, objective: float | None) -> Iterator[str]:  # (2)
    """A complaint where the stated objective is not the decision's."""
    stated = claim.objective
    if stated is None or objective is None:
        return
    if abs(stated - objective) > slack(objective):
        yield f"stated objective {stated!r} is not the decision's ({objective!r})"


def wrong_gap(claim: Claim, gap: float | None) -> Iterator[str]:  # (3)
    """A complaint where the stated gap is not `gap`, that of objective and bound."""
    if claim.gap is None:
        return
    if gap is None:
        yield f"stated gap {claim.gap!r} without an objective and a bound"
    elif abs(claim.gap - gap) > TOLERANCE:
        yield f"stated gap {claim.gap!r} is not that of objective and bound ({gap!r})"


def wrong_status(claim: Claim, gap: float | None) -> Iterator[str]:  # (4)
    """A complaint for each part of the claim that does not go with its status. gap: that of
    objective and bound."""
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
    if status == "optimal" and gap is not None and gap > OPTIMAL_GAP * (1 + TOLERANCE):
        yield f"stated optimal with a gap of {gap!r}, expected at most {OPTIMAL_GAP!r}"


def refuted_by_the_best(claim: Claim, best: tuple[float, Claim] | None) -> Iterator[str]:  # (5)
    """A complaint where the best decision that holds lies below the stated bound, and where it is
    one of an instance that is stated to be infeasible."""
    if best is None:
        return
    least, holder = best
    whose = "the decision's objective"
    if holder is not claim:
        whose = f"the objective of {holder.source}'s decision"
    if claim.bound is not None and claim.bound > least + slack(least):
        yield f"stated bound {claim.bound!r} exceeds {whose} ({least!r})"
    if claim.status == "infeasible" and holder is not claim:
        yield f"stated infeasible, but {holder.source}'s decision holds"


def slack(objective: float) -> float:
    """The distance that a figure may have from a recomputed objective."""
    return TOLERANCE * max(abs(objective), 1e-300)


# Less than this, relatively, is rounding and no news.
NEWS = 1e-9


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The decision and the bound that one run found for an instance."""

    where: str  # its source, for messages
    problem: str
    instance: str
    answer: Answer
    # Whether it was made on exactly this instance; None where that is not told.
    about: Callable[[Instance], bool] | None = None

    @property
    def by(self) -> str:
        """Method and solver, for the record."""
        method, solver = self.answer.method, self.answer.solver
        return f"{method} ({solver})"[:200] if solver else method


@dataclass(frozen=True)
class Change:
    """The best-known record of one instance before and after new findings."""

    entry: Entry
    before: BestKnown | None  # None where there was no record
    after: BestKnown | None  # None where none can be
    refused: tuple[str, ...]  # a line for each finding that is not to be believed

    @property
    def news(self) -> bool:
        """Whether there is something to write."""
        return self.after is not None and self.after != self.before

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        keys = ("objective", "bound", "found_by", "proved_by")
        records = {"before": self.before, "after": self.after}
        return {
            "problem": self.entry.problem,
            "instance": self.entry.name,
            "changed": self.news,
            **{n: {key: getattr(r, key, None) for key in keys} for n, r in records.items()},
        }


def findings_of_answers(value: Any, where: str) -> Iterator[Finding]:
    """The results of an answer document (`solve --json`); raises InputError."""
    answers = parse(AnswerFile, value, where=where)
    yield from (
        Finding(
            where=f"{where}: {answer.method}",
            problem=answers.problem,
            instance=answers.instance,
            answer=answer,
        )
        for answer in answers.results
    )


def shelf(folder: Path | None) -> list[Entry]:
    """Where records lie: the packaged library, or the instance files in a folder and below."""
    if folder is None:
        return library()
    require(folder.is_dir(), "no such folder", where=str(folder))
    return entries_in(folder)


def changes(entries: Iterable[Entry], findings: Iterable[Finding]) -> Iterator[Change]:
    """One per instance with findings; raises InputError where one is of an instance that is not
    there."""
    by_name = grouped(((finding.problem, finding.instance), finding) for finding in findings)
    there = {(entry.problem, entry.name): entry for entry in entries}
    for key, group in by_name.items():
        require(
            key in there,
            "no such instance among those to update",
            where=group[0].where,
            got="/".join(key),
        )
        yield change(there[key], group)


def change(entry: Entry, findings: Sequence[Finding]) -> Change:
    """The record of one instance after its findings."""
    instance, before = entry.load(), entry.best_known()
    usable: list[tuple[Finding, Claim]] = []
    refused = []
    for finding in findings:
        try:
            about_this = finding.about is None or finding.about(instance)
            other = f"is about another instance called {entry.name}"
            require(about_this, other, where=finding.where)
            claim = claim_of(finding.answer, instance, finding.where, "decision")
            usable.append((finding, claim))
        except InputError as error:
            refused.append(str(error))
    known = []
    if before is not None:
        known = [replace(claim_of_record(before, instance, entry.name), source="the record")]
    verdicts = judge([*(claim for _, claim in usable), *known], instance)
    own = verdicts.pop() if known else None
    judged = [(f, verdict) for (f, _), verdict in zip(usable, verdicts, strict=True)]
    refused += [f"{f.where}: {complaint}" for f, v in judged for complaint in v.complaints]
    after = before
    if own is not None and own.complaints:
        refused += [f"{entry.name}: the record itself: {complaint}" for complaint in own.complaints]
    else:
        good = [(f, v) for f, v in judged if not v.complaints]
        after = with_bound(with_decision(before, good), good, instance)
    return Change(entry, before, after, tuple(refused))


def with_decision(
    before: BestKnown | None, good: Sequence[tuple[Finding, Verdict]]
) -> BestKnown | None:
    """The record with the best decision; as it was where none is better."""
    priced = [(v.objective, f) for f, v in good if v.objective is not None]
    objective, finding = min(priced, key=lambda pair: pair[0], default=(0.0, None))
    if finding is None or (before is not None and objective >= before.objective * (1 - NEWS)):
        return before
    old = {} if before is None else before.model_dump()
    return BestKnown.model_validate(
        {
            "problem": finding.problem,
            "instance": finding.instance,
            **old,
            "objective": objective,
            "found_by": finding.by,
            "decision": finding.answer.decision,
        }
    )


def with_bound(
    record: BestKnown | None, good: Sequence[tuple[Finding, Verdict]], instance: Instance
) -> BestKnown | None:
    """The record with the highest bound that an exact method proved of this very instance, at most
    the objective."""
    exact = {method.name for method in instance.family.methods if method.exact}
    proved = [
        (f.answer.bound, f.by)
        for f, v in good
        if f.answer.bound is not None
        and f.answer.method in exact
        and (f.about is not None or v.objective is not None)
    ]
    if record is None or not proved:
        return record
    bound, by = max(proved)
    bound = min(bound, record.objective)
    if record.bound is None or bound > record.bound * (1 + NEWS):
        return record.model_copy(update={"bound": bound, "proved_by": by})
    # rounding may leave a bound a hair above a better decision
    return record.model_copy(update={"bound": min(record.bound, record.objective)})


def write(change: Change) -> None:
    """Put the new record in its place, whole; raises InputError where the library is no folder (a
    zip archive, say)."""
    file = change.entry.best_file
    if not isinstance(file, Path):
        raise InputError(
            "its library is not a folder that can be written to", where=change.entry.name
        )
    assert change.after is not None
    write_text(file, to_json(change.after.model_dump(mode="json")))
