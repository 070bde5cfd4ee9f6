"""A problem to test the command line with: choose the least of some numbers. Methods misbehave on
demand."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

from hetplan.errors import UnsupportedError
from hetplan.schema import Count, NonNegative, StrictModel
from hetplan.solvers.registry import Evaluation, Family, Method
from hetplan.solvers.run import Outcome, Run, Stop


class Data(StrictModel):
    """The numbers to choose from."""

    numbers: list[NonNegative]


class Decision(StrictModel):
    """Which one."""

    index: Count


def evaluate(data: Data, decision: Decision) -> Evaluation:
    """The number chosen."""
    if decision.index >= len(data.numbers):
        return Evaluation(
            None, (f"index is {decision.index}, expected one of 0..{len(data.numbers) - 1}",)
        )
    return Evaluation(data.numbers[decision.index], (), {"number": data.numbers[decision.index]})


def exact(data: Data, run: Run) -> Outcome[Decision]:
    """The least number, proven."""
    if not data.numbers:
        return Outcome(stop=Stop.INFEASIBLE, message="there are no numbers")
    best = min(data.numbers)
    return Outcome(stop=Stop.OPTIMAL, decision=Decision(index=data.numbers.index(best)), bound=best)


def first(data: Data, run: Run) -> Outcome[Decision]:
    """The first number, no proof, and a library that warns."""
    warnings.warn("only developers want to read this", RuntimeWarning, stacklevel=1)
    return Outcome(stop=Stop.DONE, decision=Decision(index=0), message="took the first")


def at_work() -> None:
    """Tell the test that waits for it."""
    marker = os.environ.get("FAKE_MARKER")
    if marker:
        Path(marker).touch()


def patient(data: Data, run: Run) -> Outcome[Decision]:
    """The first number after waiting for the keyboard or the time limit."""
    at_work()
    run.report(incumbent=data.numbers[0], bound=0.5, note="waiting")
    while not run.should_stop:
        time.sleep(0.01)
    stop = Stop.INTERRUPTED if run.cancelled else Stop.LIMIT
    return Outcome(stop=stop, decision=Decision(index=0), bound=0.5, message="stopped")


def deaf(data: Data, run: Run) -> Outcome[Decision]:
    """Hears no wish to stop."""
    at_work()
    time.sleep(60)
    return first(data, run)


def clueless(data: Data, run: Run) -> Outcome[Decision]:
    """Finds nothing in time, but has a bound."""
    return Outcome(stop=Stop.LIMIT, bound=0.25, message="time is up")


def broken(data: Data, run: Run) -> Outcome[Decision]:
    """A bug."""
    raise ZeroDivisionError("division\nby zero")


def liar(data: Data, run: Run) -> Outcome[Decision]:
    """A bound above what its decision is worth."""
    return Outcome(stop=Stop.OPTIMAL, decision=Decision(index=0), bound=data.numbers[0] + 1)


def proud(data: Data, run: Run) -> Outcome[Decision]:
    """Calls the first number the least."""
    return Outcome(stop=Stop.OPTIMAL, decision=Decision(index=0), bound=data.numbers[0])


def denier(data: Data, run: Run) -> Outcome[Decision]:
    """Sees no number."""
    return Outcome(stop=Stop.INFEASIBLE)


def cut_short(data: Data, run: Run) -> Outcome[Decision]:
    """A bug: reads what is not there."""
    raise EOFError("Ran out of input")


def picky(data: Data, run: Run) -> Outcome[Decision]:
    """Takes no instance."""
    raise UnsupportedError("picky takes no numbers", expected="method auto")


FAMILY = Family(
    name="fake",
    title="the least number",
    paper="none",
    data="fakes.family:Data",
    decision="fakes.family:Decision",
    evaluate="fakes.family:evaluate",
    methods=(
        Method("auto", "fakes.family:exact", True, "the least", uses=("cp-sat", "highs", "pyomo")),
        *(
            Method(name, f"fakes.family:{function}", False, summary)
            for name, function, summary in (
                ("first", "first", "the first"),
                ("patient", "patient", "waits"),
                ("deaf", "deaf", "sleeps"),
                ("clueless", "clueless", "nothing"),
                ("broken", "broken", "a bug"),
                ("liar", "liar", "a lie"),
                ("picky", "picky", "refuses"),
                ("proud", "proud", "a wrong optimum"),
                ("denier", "denier", "a wrong infeasible"),
                ("cut-short", "cut_short", "a file that ends too early"),
            )
        ),
    ),
)
