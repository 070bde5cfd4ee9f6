"""`hetplan instances validate` checks instance files, and what is said of these instances."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from hetplan.cli.help_page import described
from hetplan.cli.options import JsonOption, offer, open_instance
from hetplan.cli.output import emit, note
from hetplan.errors import InputError
from hetplan.files import read_json
from hetplan.instances.library import BEST, FORMAT, Entry, entry_of, find
from hetplan.instances.records import Finding, change, findings_of_answers
from hetplan.solvers.registry import contradictions
from hetplan.studies.findings import Study
from hetplan.studies.rows import FOLDER, Row, findings_of_rows, kept_rows
from hetplan.text import Table, counted, grouped


@dataclass
class Contents:
    """What the arguments of the command hold."""

    # one for each instance: its file, whether it is valid, its problem and name or what is wrong
    files: list[dict[str, Any]] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)  # of the valid files and names
    answers: list[Finding] = field(default_factory=list)  # of outputs of `solve --json`
    rows: list[Row] = field(default_factory=list)  # of studies
    row_findings: list[Finding] = field(default_factory=list)  # of `rows`
    faults: list[str] = field(default_factory=list)  # a line for each file that cannot be used

    def add(self, argument: Path) -> None:
        """Add what a folder holds, or one instance."""
        if os.path.isdir(argument):
            self.add_documents(argument)
            self.add_studies(argument)
        else:
            self.add_instance(str(argument))

    def add_instance(self, argument: str) -> None:
        """Add the instance in a file, on standard input or of the library, or what is wrong with
        it."""
        try:
            opened = open_instance(argument)
            if os.path.exists(argument):
                self.entries.append(entry_of(Path(argument)))
            elif (entry := find(argument)) is not None:
                self.entries.append(entry)
        except InputError as error:
            self.files.append({"file": argument, "valid": False, "error": str(error)})
            self.faults.append(str(error))
        else:
            names = {"problem": opened.problem, "name": opened.name}
            self.files.append({"file": argument, "valid": True, **names})

    def add_documents(self, folder: Path) -> None:
        """Add the instances and answers in a folder and its subfolders. Best-known records belong
        to their instances; other documents are skipped."""
        for path in sorted(folder.rglob("*.json*")):
            if path.name.endswith(BEST):
                continue
            try:
                value = read_json(path)
                if not isinstance(value, dict):
                    continue
                if value.get("format") == FORMAT:
                    self.add_instance(str(path))
                elif {"answers", "results"} & value.keys():
                    self.answers += findings_of_answers(value, str(path))
            except InputError as error:
                self.faults.append(str(error))

    def add_studies(self, folder: Path) -> None:
        """Add the rows of the studies in a folder and its subfolders."""
        for rows_folder in sorted(folder.rglob(FOLDER)):
            study = rows_folder.parent
            kept = kept_rows(study)
            self.faults += kept.faults
            self.rows += kept.rows
            self.row_findings += findings_of_rows(kept.rows, str(study))

    def contradictions(self) -> list[str]:
        """A line for each two runs of one instance of which one is wrong."""
        answers = grouped(((each.problem, each.instance), each.answer) for each in self.answers)
        lines = []
        for (_, instance), answers_of_one in answers.items():
            lines += [f"{instance}: {line}" for line in contradictions(answers_of_one)]
        return lines + Study(self.rows).conflicts()

    def priced(self) -> tuple[int, list[str]]:
        """(number of runs that were priced again, a line for each record, decision and bound that
        does not hold).

        A run is not priced where its instance, as it was then, is neither here nor in the library.
        """
        findings = [*self.answers, *self.row_findings]
        findings_of = grouped(((each.problem, each.instance), each) for each in findings)
        entries_of = grouped(((entry.problem, entry.name), entry) for entry in self.entries)
        for problem, name in findings_of.keys() - entries_of.keys():
            packaged = find(f"{problem}/{name}")
            if packaged is not None:
                entries_of[problem, name] = [packaged]
        count, refused = 0, list[str]()
        for key, entries in entries_of.items():
            findings = findings_of.get(key, [])
            priced = set()  # positions in `findings`
            for entry in entries:
                instance = entry.load()
                here = [
                    position
                    for position, finding in enumerate(findings)
                    if finding.about is None or finding.about(instance)
                ]
                refused += change(entry, [findings[position] for position in here]).refused
                priced.update(here)
            count += len(priced)
        return count, refused


@described(
    examples=(
        ("Files of your own", "hetplan instances validate mine.json"),
        ("Whether what a folder's runs say holds", "hetplan instances validate my-study"),
    ),
)
def validate(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Instance files, folders, - for standard input, or names of the library.",
            autocompletion=offer("instances"),
        ),
    ],
    json: JsonOption = False,
) -> int:
    """Check instance files against their schemas, and price the best-known records beside them.

    A folder stands for its instances, its outputs of `solve --json` and its studies. Their
    decisions are priced again where their instances are there or in the library. Exit code 2 when a
    file cannot be used, 3 when runs contradict each other, 1 when a decision or a bound does not
    hold.
    """
    contents = Contents()
    for argument in files:
        contents.add(argument)
    conflicts = contents.contradictions()
    priced, refused = contents.priced()
    lines = [
        f"{row['file']}: {row['problem']} instance {row['name']!r}, valid"
        for row in contents.files
        if row["valid"]
    ]
    runs = len(contents.answers) + len(contents.rows)
    if runs:
        lines.append(f"{counted(runs, 'run')} compared, {priced} priced again")
    document = {
        "files": contents.files,
        "runs": runs,
        "priced": priced,
        "faults": contents.faults,
        "contradictions": conflicts,
        "refused": refused,
    }
    emit(document, [Table("", (), (), tuple(lines))] if lines else [], json=json)
    note(*(f"error: {line}" for line in [*contents.faults, *conflicts, *refused]))
    if contents.faults:
        return 2
    if conflicts:
        return 3
    return 1 if refused else 0
