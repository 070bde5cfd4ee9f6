"""The problems that the checker knows, and how it has hetplan solve a drawn instance."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from hetplan.cli.main import main
from hetplan.formulations import family
from play.judge import Judgement, judge
from play.problem import Data, Problem

NAMES = ("amp", "astra", "hap", "poplar", "ditto", "joint")
# Methods that take all the time that they may, and the seconds that they get here.
ENDLESS = {"joint": {"search": 0.3}}


def problem(name: str) -> Problem:
    """What the checker knows of a problem."""
    found: Problem = importlib.import_module(f"play.{name}_rules").PROBLEM
    return found


def drawn(name: str, seed: int, *, wild: bool = False) -> Data:
    """The instance of a seed. wild: some of its numbers have another magnitude."""
    rng = Random(f"{name} {seed}")
    data = problem(name).draw(rng)
    if wild:
        spread(rng, data)
    return data


def spread(rng: Random, data: Any) -> None:
    """Multiply some of the numbers inside by powers of ten.

    Links stay as they are, because they are symmetric, the tables of `joint`, because the host's
    part of a pass is at most the pass, and whole numbers, because they count.
    """
    inside = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in list(inside):
        if isinstance(value, float) and rng.random() < 0.2:
            data[key] = value * 10.0 ** rng.randint(-7, 7)
        elif isinstance(value, dict | list) and key not in ("bandwidth", "tables"):
            spread(rng, value)


@dataclass(frozen=True)
class Answer:
    """What one call of `hetplan solve FILE --json` gave."""

    exact: dict[str, bool]  # the methods that were asked for, and whether each proves
    code: int  # the exit code
    document: dict[str, Any] | None  # None where nothing was printed
    errors: str  # standard error


@dataclass(frozen=True)
class Played:
    """A tiny instance, its optimum, and hetplan's answers."""

    problem: Problem
    data: Data
    best: float | None
    answers: list[Answer]

    def judged(self) -> Judgement:
        """All complaints and remarks."""
        whole = Judgement()
        for answer in self.answers:
            if answer.document is None:
                whole.complaints.append(f"exit code {answer.code}, {answer.errors.strip()}")
                continue
            one = judge(
                self.problem, self.data, self.best, answer.document, answer.code, answer.exact
            )
            whole.complaints += one.complaints
            whole.remarks += one.remarks
        return whole


def play(
    name: str, data: Data, folder: Path, methods: Sequence[str] = (), limit: float = 10.0
) -> Played:
    """Enumerate an instance and have hetplan answer it.

    methods: by name; none: all of the family. limit: seconds for each method.
    """
    exact = {method.name: method.exact for method in family(name).methods}
    chosen = {method: exact[method] for method in (methods or exact)}
    endless = ENDLESS.get(name, {})
    ending = {method: proves for method, proves in chosen.items() if method not in endless}
    calls = [(ending, limit)] if ending else []
    calls += [
        ({method: chosen[method]}, seconds)
        for method, seconds in endless.items()
        if method in chosen
    ]
    header = {"format": "hetplan-instance", "version": 1, "problem": name, "name": "played"}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(header | {"origin": "drawn at random", "data": data}))
    answers = [answer_of(path, called, seconds) for called, seconds in calls]
    return Played(problem(name), data, problem(name).optimum(data), answers)


def answer_of(path: Path, exact: dict[str, bool], limit: float) -> Answer:
    """The answer of the command line, which runs in this process."""
    options = ["--method", ",".join(exact), "--time-limit", str(limit), "--threads", "1"]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["solve", str(path), "--json", "--quiet", *options])
    document = json.loads(out.getvalue()) if out.getvalue() else None
    return Answer(exact, code, document, err.getvalue())
