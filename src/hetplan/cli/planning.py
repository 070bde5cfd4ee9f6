"""What `hetplan plan` prints: the ranking, the winner's stages, what is proven, and why it takes
that long."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetplan.planner.ranking import pareto
from hetplan.text import (
    Table,
    bytes_text,
    count_text,
    devices_counted,
    number_text,
    percent_text,
    seconds_text,
    share_text,
)

if TYPE_CHECKING:
    from hetplan.planner.candidate import Candidate
    from hetplan.planner.ranking import Planning
    from hetplan.profiling.workload import Workload


def planning_tables(planning: Planning) -> list[Table]:
    """The ranking, what is proven about the winner, and the winner's stages."""
    workload, best, explained = planning.workload, planning.best, planning.explanation
    # A strategy whose own problem leaves something out of its price: its bound would stand beside
    # another sum.
    apart = any(priced_apart(candidate) for candidate in planning.candidates)
    rows = tuple(
        candidate_row(candidate, workload, best, apart) for candidate in planning.candidates
    )
    header = (
        "plan",
        "status",
        "iteration",
        "vs best",
        "closed form",
        *(("objective",) if apart else ()),
        "bound",
        "gap",
        "least headroom",
        "tokens/s",
        "$/1M tok",
        "solve",
    )
    reasons = (
        *figures_notes(planning, apart),
        *(f"{c.name}: {c.message}" for c in planning.candidates if c.message),
        *planning.notes,
    )
    title = workload_title(workload, planning.precisions)
    ranking = Table(title, header, rows, reasons, right=tuple(range(2, len(header))))
    if best is None or explained is None:
        return [ranking, no_winner(planning)]
    first, *rest = best.tables
    title = f"winner {best.name}: {first.title}"
    return [
        ranking,
        Table(
            title, first.header, first.rows, (*first.notes, verdict(best, workload)), first.right
        ),
        *rest,
        explained.table(workload),
        *pareto_tables(planning),
    ]


def no_winner(planning: Planning) -> Table:
    """Why there is none: everything that fits costs too much, or nothing fits in memory."""
    fitting = [c for c in planning.candidates if c.fits_memory and c.plan is not None]
    money = [(c.money_per_million_tokens(planning.workload), c.name) for c in fitting]
    prices = [(each, name) for each, name in money if each is not None]
    if not prices:
        told = (
            *needs(planning.workload),
            *(f"would fit: {relaxed.what}" for relaxed in planning.relaxations),
        )
        return Table("no winner: nothing found fits in memory", (), (), told)
    least, name = min(prices)
    cheapest = f"cheapest that fits: {name}, {number_text(least, 4)} per million tokens"
    limit = number_text(planning.criteria.money_limit, 4)
    return Table(
        f"no winner: nothing that fits costs at most {limit} per million tokens",
        (),
        (),
        (cheapest,),
    )


def pareto_tables(planning: Planning) -> list[Table]:
    """The candidates that nothing beats in both time and money, where there are several."""
    workload = planning.workload
    front = [planning.candidates[i] for i in pareto(planning.candidates, workload)]
    if len(front) < 2:
        return []
    rows = tuple(
        (
            c.name,
            seconds_text(c.predicted_seconds),
            number_text(c.money_per_million_tokens(workload), 4),
            devices_used(c),
        )
        for c in front
    )
    title = "time and money: of the plans found, nothing is both faster and cheaper than these"
    return [Table(title, ("plan", "iteration", "$/1M tok", "devices"), rows, right=(1, 2))]


def devices_used(candidate: Candidate) -> str:
    """`12 V100-SXM2-16GB + 4 T4`."""
    plan = candidate.plan
    counts = Counter(plan.devices[device].type for device in plan.ranks) if plan else Counter[str]()
    return devices_counted(counts)


def figures_notes(planning: Planning, apart: bool) -> tuple[str, ...]:
    """What the columns are of, and how far replay and closed form are from each other."""
    ratios = [c.optimism for c in planning.candidates if c.optimism is not None]
    if not ratios:
        return ()
    own = "status, objective, bound and gap are" if apart else "status, bound and gap are"
    return (
        f"iteration: replayed event by event, {min(ratios):.3g} to {max(ratios):.3g} times the strategies' "
        f"closed forms; {own} of each strategy's own problem",
    )


def workload_title(workload: Workload, precisions: Sequence[str] = ()) -> str:
    """`gpt2-medium (406 M parameters) on amp-mixed (12 V100 + 4 T4), batch 32 x 1024 tokens, fp16
    …`.

    precisions: all that were planned, where the workload's is but one of them.
    """
    planned = " or ".join(precisions or (workload.precision,))
    devices = devices_counted(workload.cluster.counts())
    tokens = "" if workload.sequence is None else f" x {workload.sequence} tokens"
    return (
        f"{workload.model.name} ({count_text(workload.model.params)} parameters) on {workload.cluster.name} "
        f"({devices}), batch {workload.global_batch}{tokens}, {planned}, "
        f"{workload.profile.provenance.kind} profile"
    )


def priced_apart(candidate: Candidate) -> bool:
    """Whether the strategy's price of the plan is another figure than the objective that the bound
    belongs to."""
    seconds, objective = candidate.closed_form_seconds, candidate.objective
    return (
        seconds is not None and objective is not None and abs(seconds - objective) > 1e-9 * seconds
    )


def candidate_row(
    candidate: Candidate, workload: Workload, best: Candidate | None, apart: bool
) -> tuple[str, ...]:
    """One line of the ranking; with `apart` the objective has a column of its own."""
    return (
        candidate.name,
        candidate.status,
        seconds_text(candidate.predicted_seconds),
        relative_text(candidate, best),
        seconds_text(candidate.closed_form_seconds),
        *((seconds_text(candidate.objective),) if apart else ()),
        seconds_text(candidate.bound),
        percent_text(candidate.gap),
        memory_text(candidate, workload),
        count_text(candidate.tokens_per_second(workload)),
        number_text(candidate.money_per_million_tokens(workload), 4),
        seconds_text(candidate.solve_seconds),
    )


def relative_text(candidate: Candidate, best: Candidate | None) -> str:
    """How much longer an iteration takes than the winner's: `+65.2 %`; nothing for what does not
    fit."""
    if (
        best is None
        or candidate is best
        or candidate.predicted_seconds is None
        or not best.predicted_seconds
    ):
        return ""
    more = candidate.predicted_seconds / best.predicted_seconds - 1
    return percent_text(more) if more < 0 else f"+{percent_text(more)}"


def memory_text(candidate: Candidate, workload: Workload) -> str:
    """What the device in use nearest to (or furthest above) its limit holds, of what it can use."""
    if candidate.peak_bytes is None:
        return "-"
    usable = workload.device_bytes()
    limits = [usable[device.type] for device in workload.cluster.devices]
    left = [
        limit - peak if peak else math.inf
        for limit, peak in zip(limits, candidate.peak_bytes, strict=True)
    ]
    tightest = left.index(min(left))
    text = share_text(candidate.peak_bytes[tightest], limits[tightest])
    return text if candidate.fits_memory else f"{text} !"


def needs(workload: Workload) -> tuple[str, ...]:
    """What the model's states alone take, beside what there is."""
    usable = workload.device_bytes()
    total = sum(usable[name] * count for name, count in workload.cluster.counts().items())
    return (
        f"weights, gradients and optimizer states: {bytes_text(workload.state_bytes)} in one copy of the model; "
        f"all devices together can use {bytes_text(total)}",
    )


def verdict(best: Candidate, workload: Workload) -> str:
    """What is proven, and what it would run."""
    devices = devices_used(best)
    if best.gap is None:
        proven = "no bound is proven"
    elif best.status == "optimal":
        proven = "proven optimal for its formula"
    else:
        proven = f"proven within {percent_text(best.gap)} of the optimum of its formula"
    return f"uses {devices} in {workload.precision}; {proven}"
