"""Findings of runs, and the best-known records that they improve.

A finding replaces a record's decision where the independent evaluator prices its decision below the
record's objective. A bound cannot be priced again. It replaces a record's bound only under these
conditions: an exact method proved it; it certainly belongs to this very instance (the key of a
study's row says so, or the finding's own decision has its stated objective here); it lies above the
record's bound; and no known decision refutes it.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetplan.errors import InputError, require
from hetplan.files import to_json, write_text
from hetplan.instances.answers import (
    Answer,
    Claim,
    Verdict,
    answers_by_place,
    claim_of,
    claim_of_record,
    judge,
)
from hetplan.instances.library import BestKnown, Entry, Instance, entries_in, library
from hetplan.text import grouped

# Relative improvement of a record up to which the difference counts as rounding.
LEAST_IMPROVEMENT = 1e-9
LONGEST_NAME = 200  # characters of a `Name`


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The decision and the bound that one run found for an instance."""

    where: str  # the finding's source, for messages
    problem: str
    instance: str  # name
    answer: Answer
    # Whether the run solved exactly the given instance; None where the source does not say.
    about: Callable[[Instance], bool] | None = None

    @property
    def found_by(self) -> str:
        """The method and its solver, as a best-known record states them."""
        method, solver = self.answer.method, self.answer.solver
        if not solver:
            return method
        return f"{method} ({solver})"[:LONGEST_NAME]


@dataclass(frozen=True)
class Change:
    """The best-known record of one instance before and after new findings."""

    entry: Entry
    before: BestKnown | None  # None: there was no record
    after: BestKnown | None  # None: no finding gives a record
    refused: tuple[str, ...]  # a line for each complaint about a finding

    @property
    def changed(self) -> bool:
        """Whether the record changes, so that it has to be written."""
        return self.after is not None and self.after != self.before

    def document(self) -> dict[str, Any]:
        """The change as JSON types."""
        return {
            "problem": self.entry.problem,
            "instance": self.entry.name,
            "changed": self.changed,
            "before": record_figures(self.before),
            "after": record_figures(self.after),
        }


def record_figures(record: BestKnown | None) -> dict[str, Any]:
    """The figures of a record and the methods behind them; each is None without a record."""
    keys = ("objective", "bound", "found_by", "proved_by")
    return {key: None if record is None else getattr(record, key) for key in keys}


def findings_of_answers(value: Any, where: str) -> Iterator[Finding]:
    """The results of an answer document, of one instance or of several, as findings.

    value: the parsed JSON. where: its source, for messages. Raises InputError.
    """
    for answers, place in answers_by_place(value, where):
        for answer in answers.results:
            yield Finding(
                where=f"{place}: {answer.method}",
                problem=answers.problem,
                instance=answers.instance,
                answer=answer,
            )


def entries_to_update(folder: Path | None) -> list[Entry]:
    """The instances whose records can be updated: the packaged library (None), or the instance
    files in a folder and its subfolders."""
    if folder is None:
        return library()
    require(os.path.isdir(folder), "no such folder", where=str(folder))
    return entries_in(folder)


def changes(entries: Iterable[Entry], findings: Iterable[Finding]) -> Iterator[Change]:
    """The change of each instance's record for which there are findings. Raises InputError for a
    finding of an instance that is not among the entries."""
    findings_of = grouped(((finding.problem, finding.instance), finding) for finding in findings)
    entry_of = {(entry.problem, entry.name): entry for entry in entries}
    for key, group in findings_of.items():
        require(
            key in entry_of,
            "no such instance among those to update",
            where=group[0].where,
            got="/".join(key),
        )
        yield change(entry_of[key], group)


def change(entry: Entry, findings: Sequence[Finding]) -> Change:
    """The change of one instance's record by its findings.

    A finding with a complaint is refused. Where the record itself gives rise to a complaint, it
    stays as it is.
    """
    instance = entry.load()
    before = entry.best_known()
    claims, refused = claims_of(findings, instance)
    to_judge = [claim for _, claim in claims]
    if before is not None:
        record_claim = claim_of_record(before, instance, entry.name)
        to_judge.append(replace(record_claim, source="the record"))
    verdicts = judge(to_judge, instance)
    record_verdict = verdicts.pop() if before is not None else None  # the record was added last
    judged = [(finding, verdict) for (finding, _), verdict in zip(claims, verdicts, strict=True)]
    for finding, verdict in judged:
        refused += [f"{finding.where}: {complaint}" for complaint in verdict.complaints]
    after = before
    if record_verdict is not None and record_verdict.complaints:
        refused += [
            f"{entry.name}: the record itself: {complaint}"
            for complaint in record_verdict.complaints
        ]
    else:
        good = [(finding, verdict) for finding, verdict in judged if not verdict.complaints]
        after = with_bound(with_decision(before, good), good, instance)
    return Change(entry, before, after, tuple(refused))


def claims_of(
    findings: Sequence[Finding], instance: Instance
) -> tuple[list[tuple[Finding, Claim]], list[str]]:
    """(claims, refused): the claim of each finding that can be judged, and a line for each finding
    about another instance or with a malformed decision."""
    claims: list[tuple[Finding, Claim]] = []
    refused: list[str] = []
    for finding in findings:
        if finding.about is not None and not finding.about(instance):
            refused.append(f"{finding.where}: is about another instance called {instance.name}")
            continue
        try:
            claim = claim_of(finding.answer, instance, finding.where, "decision")
        except InputError as error:
            refused.append(str(error))
        else:
            claims.append((finding, claim))
    return claims, refused


def with_decision(
    before: BestKnown | None, good: Sequence[tuple[Finding, Verdict]]
) -> BestKnown | None:
    """The record with the best decision of the findings, or as it was where none is better.

    good: the findings without complaints.
    """
    best: tuple[float, Finding] | None = None  # (objective, finding)
    for finding, verdict in good:
        objective = verdict.objective
        if objective is not None and (best is None or objective < best[0]):
            best = (objective, finding)
    if best is None:
        return before
    objective, finding = best
    if before is not None and objective >= before.objective * (1 - LEAST_IMPROVEMENT):
        return before
    record: dict[str, Any] = {"problem": finding.problem, "instance": finding.instance}
    if before is not None:
        record = before.model_dump()  # its bound and its note stay
    record |= {
        "objective": objective,
        "found_by": finding.found_by,
        "decision": finding.answer.decision,
    }
    return BestKnown.model_validate(record)


def with_bound(
    record: BestKnown | None, good: Sequence[tuple[Finding, Verdict]], instance: Instance
) -> BestKnown | None:
    """The record with the highest bound that an exact method proved for this very instance, but at
    most the record's objective. good: the findings without complaints."""
    exact = {method.name for method in instance.family.methods if method.exact}
    proved = []  # (bound, method and solver)
    for finding, verdict in good:
        # `change` has refused the findings whose `about` says another instance. Without `about`, a
        # valid decision with the stated objective shows that the run solved this instance.
        about_this = finding.about is not None or verdict.objective is not None
        bound = finding.answer.bound
        if bound is not None and about_this and finding.answer.method in exact:
            proved.append((bound, finding.found_by))
    if record is None or not proved:
        return record
    highest, by = max(proved)
    highest = min(highest, record.objective)  # `judge` lets it be higher by rounding
    if record.bound is None or highest > record.bound * (1 + LEAST_IMPROVEMENT):
        return record.model_copy(update={"bound": highest, "proved_by": by})
    # Rounding may leave the old bound slightly above a better decision.
    return record.model_copy(update={"bound": min(record.bound, record.objective)})


def write(change: Change) -> None:
    """Write the new record's file, atomically. Raises InputError where the library is no folder but
    a zip archive, for example. change: one with `changed`."""
    file = change.entry.best_file
    if not isinstance(file, Path):
        raise InputError(
            "its library is not a folder that can be written to", where=change.entry.name
        )
    assert change.after is not None  # by `changed`
    write_text(file, to_json(change.after.model_dump(mode="json")))
