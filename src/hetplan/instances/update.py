"""Best-known records, bettered by what answers bring: only upwards in quality, and never on
anybody's word alone.

An objective is taken where the independent evaluator prices the decision below the record's. A
bound cannot be priced again: it is taken from exact methods only, where the finding is certainly
about this very instance (its key says so, or its own decision is worth here what it states), where
it lies above the record's and no decision known refutes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from hetplan.errors import InputError
from hetplan.files import read_json, to_json, write_text
from hetplan.instances.answers import AnswerFile, Claim, Status, parse_decision
from hetplan.instances.envelope import Instance, load_instance
from hetplan.instances.judging import Verdict, judge
from hetplan.instances.library import BEST_FORMAT, BEST_VERSION, BestKnown, Entry, library
from hetplan.instances.shelf import record_name
from hetplan.schema import parse

# Less than this, relatively, is rounding and no news.
NEWS = 1e-9


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one run says of an instance. where: its source, for messages. by: method and solver, for
    the record.

    about: whether it was made on exactly this instance; None where that is not told.
    """

    where: str
    problem: str
    instance: str
    method: str
    by: str
    status: Status | None = None
    objective: float | None = None
    bound: float | None = None
    decision: dict[str, Any] | None = None
    about: Callable[[Instance], bool] | None = None


@dataclass(frozen=True)
class Change:
    """What the findings of one instance come to. before: None where there was no record; after:
    None where none can be.

    refused: a line for each finding that is not to be believed.
    """

    entry: Entry
    before: BestKnown | None
    after: BestKnown | None
    refused: tuple[str, ...]

    @property
    def news(self) -> bool:
        """Whether there is something to write."""
        return self.after is not None and self.after != self.before

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        figures = {
            name: {
                key: getattr(record, key, None)
                for key in ("objective", "bound", "found_by", "proved_by")
            }
            for name, record in (("before", self.before), ("after", self.after))
        }
        return {
            "problem": self.entry.problem,
            "instance": self.entry.name,
            "changed": self.news,
            **figures,
        }


def findings_of_answers(value: Any, where: str) -> Iterator[Finding]:
    """The results of an answer document (`solve --json`); raises InputError."""
    answers = parse(AnswerFile, value, where=where)
    for answer in answers.results:
        yield Finding(
            where=f"{where}: {answer.method}",
            problem=answers.problem,
            instance=answers.instance,
            method=answer.method,
            by=f"{answer.method} ({answer.solver})"[:200] if answer.solver else answer.method,
            status=answer.status,
            objective=answer.objective,
            bound=answer.bound,
            decision=answer.decision,
        )


def shelf(folder: Path | None) -> list[Entry]:
    """Where records lie: the packaged library, or every instance file in a folder and below."""
    if folder is None:
        return library()
    if not folder.is_dir():
        raise InputError("no such folder", where=str(folder))
    found = []
    for path in sorted(folder.rglob("*.json*")):
        record = record_name(path.name)
        if record is not None and is_instance(path):
            made = load_instance(path)
            found.append(Entry(made.problem, made.name, path, path.with_name(record)))
    return found


def is_instance(path: Path) -> bool:
    """Whether it says so itself; other JSON may lie beside instances."""
    value = read_json(path)
    return isinstance(value, dict) and value.get("format") == "hetplan-instance"


def changes(entries: Iterable[Entry], findings: Iterable[Finding]) -> Iterator[Change]:
    """One per instance with findings; raises InputError where one is of an instance that is not
    there."""
    by_name: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        by_name[finding.problem, finding.instance].append(finding)
    there = {(entry.problem, entry.name): entry for entry in entries}
    for key, group in by_name.items():
        if key not in there:
            raise InputError(
                "no such instance among those to update", where=group[0].where, got="/".join(key)
            )
        yield change(there[key], group)


def change(entry: Entry, findings: Sequence[Finding]) -> Change:
    """The record of one instance after its findings."""
    instance, before = entry.load(), entry.best_known()
    usable, refused = [], []
    for finding in findings:
        if finding.about is not None and not finding.about(instance):
            refused.append(f"{finding.where}: is about another instance called {entry.name}")
            continue
        try:
            usable.append((finding, claim_of(finding, instance)))
        except InputError as error:
            refused.append(str(error))
    known = [] if before is None else [claim_of_record(before, instance)]
    verdicts = judge([claim for _, claim in usable] + known, instance)
    for (finding, _), verdict in zip(usable, verdicts, strict=False):
        refused += [f"{finding.where}: {complaint}" for complaint in verdict.complaints]
    if known and verdicts[-1].complaints:
        refused += [
            f"{entry.name}: the record itself: {complaint}" for complaint in verdicts[-1].complaints
        ]
        return Change(entry, before, before, tuple(refused))
    good = [(f, v) for (f, _), v in zip(usable, verdicts, strict=False) if not v.complaints]
    return Change(
        entry, before, with_bound(with_decision(before, good), good, instance), tuple(refused)
    )


def claim_of(finding: Finding, instance: Instance) -> Claim:
    """The finding with its decision read; raises InputError where that is malformed."""
    decision = finding.decision
    return Claim(
        source=finding.method,
        decision=None
        if decision is None
        else parse_decision(decision, instance, finding.where, "decision"),
        status=finding.status,
        objective=finding.objective,
        bound=finding.bound,
    )


def claim_of_record(record: BestKnown, instance: Instance) -> Claim:
    """What stands in the record."""
    decision = parse_decision(record.decision, instance, record.instance, "decision")
    return Claim(
        source="the record", decision=decision, objective=record.objective, bound=record.bound
    )


def with_decision(
    before: BestKnown | None, good: Sequence[tuple[Finding, Verdict]]
) -> BestKnown | None:
    """The record with the best decision; as it was where none is better."""
    priced = [(v.objective, f) for f, v in good if v.objective is not None]
    if not priced:
        return before
    objective, finding = min(priced, key=lambda pair: pair[0])
    if before is not None and objective >= before.objective * (1 - NEWS):
        return before
    assert finding.decision is not None
    if before is not None:
        return replace_in(
            before, objective=objective, found_by=finding.by, decision=finding.decision
        )
    return BestKnown(
        format=BEST_FORMAT,
        version=BEST_VERSION,
        problem=finding.problem,
        instance=finding.instance,
        objective=objective,
        found_by=finding.by,
        decision=finding.decision,
    )


def with_bound(
    record: BestKnown | None, good: Sequence[tuple[Finding, Verdict]], instance: Instance
) -> BestKnown | None:
    """The record with the highest bound that an exact method proved of this very instance, at most
    the objective."""
    exact = {method.name for method in instance.family.methods if method.exact}
    proved = [
        (f.bound, f)
        for f, v in good
        if f.bound is not None
        and f.method in exact
        and (f.about is not None or v.objective is not None)
    ]
    if record is None or not proved:
        return record
    bound, finding = max(proved, key=lambda pair: pair[0])
    bound = min(bound, record.objective)
    if record.bound is not None and bound <= record.bound * (1 + NEWS):
        # rounding may leave a bound a hair above a better decision
        return (
            record
            if record.bound <= record.objective
            else replace_in(record, bound=record.objective)
        )
    return replace_in(record, bound=bound, proved_by=finding.by)


def replace_in(record: BestKnown, **fields: Any) -> BestKnown:
    """The record with other values, checked."""
    return BestKnown.model_validate({**record.model_dump(), **fields})


def write(change: Change) -> None:
    """Put the new record in its place, whole; raises InputError where it cannot be written."""
    assert change.after is not None
    write_text(
        place(change.entry.best_file, change.entry.name),
        to_json(change.after.model_dump(mode="json")),
    )


def place(resource: Traversable, name: str) -> Path:
    """The file of a record; raises InputError where the library is no folder (a zip archive,
    say)."""
    if not isinstance(resource, Path):
        raise InputError("its library is not a folder that can be written to", where=name)
    return resource
