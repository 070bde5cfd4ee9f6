"""The proven claims on plans: the ladder of bounds, and its claims in words."""

from collections.abc import Iterable, Sequence
from typing import Any

from hetplan.plans.alike import has_equal_replicas
from hetplan.plans.ladder import Rung, RungName
from hetplan.plans.plan import Plan
from hetplan.solvers.run import OPTIMAL_GAP, relative_gap
from hetplan.text import Column, Table, percent_text, seconds_text

# The plans that a bound is of, in words.
PLANS_OF_STAGES = "plan of stages"
WITH_WHOLE = "with whole backward passes"  # as GPipe, 1F1B and interleaved 1F1B have them

# The rungs that say the same of plans in every precision.
OF_ANY_SHAPE: tuple[RungName, ...] = ("alone", "equal", "all")


def joined_ladders(ladders: Sequence[Sequence[Rung]]) -> tuple[Rung, ...]:
    """The ladder of the plans of several ladders together, one for each precision. Rungs of single
    shapes are left out where there are several, because each ladder has shapes of its own."""
    if len(ladders) == 1:
        return tuple(ladders[0])
    together = []
    for name in OF_ANY_SHAPE:
        rungs = [rung for ladder in ladders for rung in ladder if rung.rung == name]
        if rungs and len(rungs) == len(ladders):
            together.append(Rung(rung=name, bound=least_bound(rungs), best=least_best(rungs)))
    return tuple(together)


def least_bound(rungs: Iterable[Rung]) -> float:
    """Seconds that no plan of any of these classes replays below."""
    return min(rung.bound for rung in rungs)


def least_best(rungs: Iterable[Rung]) -> float | None:
    """Seconds of the fastest known plan of these classes; None where none is known."""
    return min((rung.best for rung in rungs if rung.best is not None), default=None)


def with_degrees(
    ladder: Iterable[Rung], computing_alone: Sequence[float], best: float | None
) -> tuple[Rung, ...]:
    """The ladder where plans with further degrees belong to all plans, too.

    computing_alone: lower bounds of such plans. best: seconds of the fastest known plan.
    """
    changed = []
    for rung in ladder:
        if rung.rung in ("alone", "all"):
            bests = [seconds for seconds in (rung.best, best) if seconds is not None]
            least, fastest = min(rung.bound, *computing_alone), min(bests, default=None)
            rung = rung.model_copy(update={"bound": least, "best": fastest})
        changed.append(rung)
    return tuple(changed)


def with_any_order(ladder: Iterable[Rung], bound: float, best: float | None) -> tuple[Rung, ...]:
    """The ladder with a rung for plans in any order of passes.

    bound: lower bound of such plans. best: seconds of the fastest one that is known.
    """
    last = Rung(rung="any-order", bound=bound, best=best)
    changed = []
    for rung in ladder:
        if rung.rung == "alone":  # computing alone takes as long in every order
            rung = rung.model_copy(update={"best": least_best([rung, last])})
        changed.append(rung)
    return (*changed, last)


def gap(rung: Rung) -> float | None:
    """The gap between the bound and the fastest known plan of the class, as a share of the plan's
    seconds; None where no plan is known."""
    return relative_gap(rung.best, rung.bound)


def documents(ladder: Iterable[Rung]) -> list[dict[str, Any]]:
    """The rungs as JSON types, with their gaps."""
    return [{**rung.model_dump(), "gap": gap(rung)} for rung in ladder]


def rung_text(rung: Rung) -> str:
    """The plans of a rung, and the costs that its bound counts."""
    shape = "1 pipeline"
    if rung.replicas is not None and rung.replicas > 1:
        shape = f"{rung.replicas} equal replicas"
    texts: dict[RungName, str] = {
        "alone": "all plans, by computing alone",
        "micro-batches": f"{shape}, micro-batches of {rung.micro_batch}, by computing alone",
        "passes": "the same, with fill and drain",
        "links": "the same, with cards and joins",
        "equal": "all plans with equal replicas",
        "all": f"all plans of stages {WITH_WHOLE}",
        "any-order": "all plans of stages, in any order of passes",
    }
    return texts[rung.rung]


def ladder_table(ladder: Sequence[Rung], levels: str = "") -> Table:
    """The ladder as a table, one line for each rung. levels: the ZeRO levels of all its plans, as
    text; empty: any."""
    plan = f"plan with ZeRO {levels}" if levels else "plan"
    return Table.of(
        f"what is proven: no {plan} of a class is faster, when replayed, than its bound",
        ladder,
        [
            Column("plans", rung_text),
            Column("bound", lambda rung: rung.bound, seconds_text, right=True),
            Column("best known", lambda rung: rung.best, seconds_text, right=True),
            Column("gap", gap, percent_text, right=True),
        ],
    )


def claim(
    plan: Plan | None,
    seconds: float,
    bound: float,
    ladder: Iterable[Rung],
    *,
    plans: str,
    bound_whole: float | None = None,
    further: bool,
    levels: str = "",
) -> str:
    """The strongest claim that is proven of a plan, in words.

    plan: None where it is not known. seconds: of the plan. bound: of all plans. plans: these plans,
    in words. bound_whole: of those with whole backward passes; None where `bound` is of no others.
    further: whether plans with context and expert ranks are among them. levels: their ZeRO levels,
    as text; empty: any.
    """
    if further:
        plans += ", with context and expert ranks or without,"
    of_all = relative_gap(seconds, bound)
    assert of_all is not None
    if of_all <= OPTIMAL_GAP:
        return f"no {plans} is faster when replayed: it is optimal"
    every = f"no {plans} is faster than {limit_text(seconds, bound)}"
    largest = bound
    if bound_whole is not None and bound_whole > bound:
        every += f", none {WITH_WHOLE} than {seconds_text(bound_whole)}"
        largest = bound_whole
    equal = next((rung for rung in ladder if rung.rung == "equal"), None)
    if equal is None or equal.bound <= largest * (1 + OPTIMAL_GAP):
        return every
    qualities = ["equal replicas", "whole backward passes"]
    if levels:
        qualities.append(f"ZeRO {levels}")
    if further:
        qualities.append("no context or expert ranks")
    of_class = f"plans with {' and '.join(qualities)}"
    if plan is None or not has_equal_replicas(plan):
        text = f"{every}; of {of_class} none is faster than {seconds_text(equal.bound)}"
        if equal.best is None:
            return text
        best, share = seconds_text(equal.best), percent_text(gap(equal))
        return f"{text}, and the best that is known takes {best} (gap {share})"
    of_equal = relative_gap(seconds, equal.bound)
    assert of_equal is not None
    if of_equal <= OPTIMAL_GAP:
        return f"of {of_class} none is faster when replayed; {every}"
    return f"of {of_class} none is faster than {limit_text(seconds, equal.bound)}; {every}"


def limit_text(seconds: float, bound: float) -> str:
    """A bound, with how far it is below a plan's seconds."""
    share = percent_text(relative_gap(seconds, bound))
    return f"{seconds_text(bound)} when replayed (gap {share})"
