"""Best-known records, bettered by what answers bring: only upwards in quality, and never on
anybody's word alone.

An objective is taken where the independent evaluator prices the decision below the record's. A
bound cannot be priced again: it is taken from exact methods only, where the finding is certainly
about this very instance (its key says so, or its own decision is worth here what it states), where
it lies above the record's and no decision known refutes it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetplan.errors import InputError, require
from hetplan.files import to_json, write_text
from hetplan.instances.answers import (
    Answer,
    AnswerFile,
    Claim,
    Verdict,
    claim_of,
    claim_of_record,
    judge,
)
from hetplan.instances.library import (
    BestKnown,
    Entry,
    Instance,
    entries_in,
    library,
)
from hetplan.schema import parse
from hetplan.text import grouped

# Less than this, relatively, is rounding and no news.
NEWS = 1e-9


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one run says of an instance."""

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
    """What the findings of one instance come to."""

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
